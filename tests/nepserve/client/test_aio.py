from __future__ import annotations

import asyncio
import pickle
import ssl
import threading

import numpy as np
import pytest

from nepcore.structures import Structure
from nepserve.client import (
    AsyncClient,
    Client,
    ConnectionFailed,
    InvalidAnswer,
    NepserveError,
    Overloaded,
    Retry,
    ServerError,
    StructureRejected,
    Timeout,
)

SI2 = {
    "numbers": [14, 14],
    "positions": [[0.0, 0, 0], [1.3, 1.4, 1.2]],
    "cell": [[0, 2.7, 2.7], [2.7, 0, 2.7], [2.7, 2.7, 0]],
    "pbc": True,
}
SOON = Retry(limit=5, first=0.0, longest=0.0)


def structures(count):
    rng = np.random.default_rng(3)
    return [
        Structure.make(rng.choice([1, 8, 14], 1 + k % 3), rng.uniform(0, 2.5, (1 + k % 3, 3))) for k in range(count)
    ]


def run(server, job, **options):
    async def main():
        async with AsyncClient(server.url, **{"retries": SOON, **options}) as client:
            return await job(client)

    return asyncio.run(main())


def test_the_same_request_and_the_same_results_as_the_other_client(server):
    names = ["energy", "energies", "forces", "stress", "virials"]
    options = {"api_key": "k", "model": "toy", "timeout": 9.0, "priority": "bulk", "dtype": "float32"}
    there = run(server, lambda client: client.evaluate(SI2, names), **options)
    here = Client(server.url, **options).evaluate(SI2, names)
    assert list(there.values) == list(here.values)
    for name in names:
        np.testing.assert_array_equal(there[name], here[name])
    first, second = server.evaluations
    assert first.body == second.body
    for header in ("authorization", "x-priority", "content-type", "accept", "accept-encoding", "user-agent", "host"):
        assert first.headers[header] == second.headers[header]
    assert 0 < float(first.headers["x-request-timeout"]) <= 9.0
    assert len(first.headers["x-request-id"]) == 16


def test_many(server):
    items = structures(50)
    shown = []

    async def job(client):
        return await client.evaluate_many(items, chunk_atoms=9, progress=lambda *seen: shown.append(seen))

    found = run(server, job)
    wanted = Client(server.url).evaluate_many(items)
    np.testing.assert_array_equal(found["forces"], wanted["forces"])
    np.testing.assert_array_equal(found["energy"], wanted["energy"])
    assert shown[-1] == (50, 50)
    assert server.evaluations[0].headers["x-priority"] == "bulk"
    empty = run(server, lambda client: client.evaluate_many([], ["energy"]))
    assert len(empty) == 0


def test_failures_are_returned_in_their_places_or_raised(server):
    items = structures(9)
    items[1] = "no structure"
    items[4] = Structure.make(["Ge"], [[0, 0, 0]])
    found = run(server, lambda client: client.evaluate_many(items, on_error="return", chunk_atoms=3))
    assert {i: e.code for i, e in found.errors.items()} == {1: "bad_value", 4: "unknown_element"}
    with pytest.raises(StructureRejected) as caught:
        run(server, lambda client: client.evaluate_many(items))
    assert caught.value.index == 1
    items[1] = items[0]
    with pytest.raises(StructureRejected, match="structure 5") as caught:
        run(server, lambda client: client.evaluate_many(items, chunk_atoms=3))
    assert caught.value.index == 4


def test_a_body_too_large_for_the_server_is_halved(server, fault):
    items = structures(12)
    answer = server.right

    def right(seen):
        if seen.path == "/v1/evaluate" and sum(seen.counts) > 7:
            document = fault(413, "too_large", "too many atoms", max_atoms=7)
            return 413, document.kind, document.body
        return answer(seen)

    wanted = Client(server.url).evaluate_many(items)["forces"]
    server.right = right
    found = run(server, lambda client: client.evaluate_many(items))
    np.testing.assert_array_equal(found["forces"], wanted)


def test_what_the_server_says_of_itself(server, fault):
    async def job(client):
        server.ready.append(fault(503, "starting", "warming up"))
        return (
            await client.models(), await client.model("toy"), await client.status(), await client.version(),
            await client.ready(), await client.ready(), repr(client),
        )  # fmt: skip

    models, model, status, version, early, late, text = run(server, job)
    assert (models[0]["name"], model["name"], status, version) == (
        "toy",
        "toy",
        {"queue": {"atoms": 0}},
        {"nepserve": "0"},
    )
    assert (early, late) == (False, True)
    assert text == f"AsyncClient({server.url!r})"


def test_waiting_until_ready(server, fault, reply):
    server.ready.extend([fault(503, "starting", "warming up")] * 3)
    run(server, lambda client: client.wait_until_ready(60.0))
    assert len(server.seen) == 4
    server.ready.extend([fault(503, "starting", "3 of 7 shapes")] * 1000)
    with pytest.raises(Timeout, match="3 of 7"):
        run(server, lambda client: client.wait_until_ready(0.1))
    server.ready.clear()
    server.ready.append(reply(404, b"nothing", "text/plain"))
    with pytest.raises(ServerError):
        run(server, lambda client: client.wait_until_ready(60.0))


def test_one_client_in_several_loops_and_pickled(server):
    client = AsyncClient(server.url)
    energies = {asyncio.run(client.evaluate(SI2))["energy"] for _ in range(3)}
    energies.add(asyncio.run(pickle.loads(pickle.dumps(client)).evaluate(SI2))["energy"])
    assert len(energies) == 1


def test_closing_is_not_final(server):
    async def job(client):
        await client.evaluate(SI2)
        await client.close()
        return await client.evaluate(SI2)

    assert run(server, job)["energy"]


def test_unix_socket_and_prefix(make_server, tmp_path, server):
    unix = make_server(socket_path=tmp_path / "nep.sock")
    assert run(unix, lambda client: client.evaluate(SI2))["energy"]
    asyncio.run(AsyncClient(server.url + "/lab/si").evaluate(SI2))
    assert server.seen[-1].path == "/lab/si/v1/evaluate"


def test_tls(make_server, certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    server = make_server(tls=context)
    assert run(server, lambda client: client.evaluate(SI2), verify=certificate[0])["energy"]
    assert run(server, lambda client: client.evaluate(SI2), verify=False)["energy"]
    with pytest.raises(ConnectionFailed, match=r"(?i)certificate"):
        run(server, lambda client: client.evaluate(SI2))


def test_no_room_is_tried_again_until_there_is(server, fault):
    server.plan.extend([fault(429, "queue_full", "full", {"Retry-After": "0"}), fault(503, "starting")])
    assert run(server, lambda client: client.evaluate(SI2))["energy"]
    assert len(server.evaluations) == 3
    server.always = fault(429, "queue_full", "full")
    with pytest.raises(Overloaded) as caught:
        run(server, lambda client: client.evaluate(SI2))
    assert caught.value.attempts == 6


def test_nobody_there(server, tmp_path):
    server.stop()
    with pytest.raises(ConnectionFailed, match="Is the server running") as caught:
        run(server, lambda client: client.evaluate(SI2))
    assert caught.value.attempts == 3
    with pytest.raises(ConnectionFailed, match=r"[Nn]o such file"):
        asyncio.run(AsyncClient(f"unix://{tmp_path}/none", retries=SOON).evaluate(SI2))


def test_an_answer_that_does_not_come(server, reply):
    never = threading.Event()
    server.always = reply(wait=never)
    with pytest.raises(Timeout, match=r"0\.2 s"):
        run(server, lambda client: client.evaluate(SI2), timeout=0.2)
    with pytest.raises(Timeout) as caught:
        run(server, lambda client: client.evaluate_many(structures(6), chunk_atoms=2), timeout=0.2)
    never.set()
    assert caught.value.structures is not None


def test_kept_connections_that_were_closed_are_no_fault(server, reply):
    async def job(client):
        for _ in range(3):
            server.plan.append(reply(cut=True))
            await client.evaluate(SI2)
        await client.evaluate(SI2)
        server.plan.append(reply(mute=True))
        return await client.evaluate(SI2)

    assert run(server, job, retries=0)["energy"]


@pytest.mark.parametrize("keep", [0, 100])
def test_a_truncated_answer_is_tried_again_and_then_an_error(server, reply, keep):
    server.plan.append(reply(keep=keep))
    assert run(server, lambda client: client.evaluate(SI2))["energy"]
    server.always = reply(keep=keep)
    with pytest.raises(ConnectionFailed):
        run(server, lambda client: client.evaluate(SI2))
    assert len(server.evaluations) < 10


@pytest.mark.parametrize(
    "options",
    [
        {"change": lambda message: message.pop("forces") and None},
        {"change": lambda message: message.update(energy=np.array([np.nan]).tobytes())},
        {"body": b"<html>", "kind": "text/html"},
        {"headers": {"Content-Encoding": "gzip"}},
        {"body": b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "form": "raw"},
        {"body": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "form": "raw"},
    ],
    ids=["no forces", "NaN", "html", "gzip", "ssh", "chunks"],
)
def test_an_answer_that_is_not_whole_is_no_answer(server, reply, options):
    server.always = reply(**options)
    with pytest.raises(InvalidAnswer):
        run(server, lambda client: client.evaluate(SI2))
    assert len(server.evaluations) == 1


def test_a_redirect_is_not_followed(server, reply, make_server):
    other = make_server()
    server.always = reply(307, b"", headers={"Location": other.url})
    with pytest.raises(ServerError, match="redirects"):
        run(server, lambda client: client.evaluate(SI2))
    assert other.seen == []


def test_proxies_of_the_environment_are_left_alone(server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    assert run(server, lambda client: client.evaluate(SI2))["energy"]


def test_a_cancelled_call_leaves_the_client_in_order(server, reply):
    never = threading.Event()
    server.plan.append(reply(wait=never))

    async def job(client):
        task = asyncio.create_task(client.evaluate_many(structures(20), chunk_atoms=4))
        while not server.evaluations:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await client.evaluate(SI2)

    assert run(server, job)["energy"]
    never.set()


def test_one_failure_ends_the_rest(server, fault):
    server.plan.append(fault(500, "internal", "oops"))

    async def job(client):
        before = asyncio.all_tasks()
        with pytest.raises(NepserveError):
            await client.evaluate_many(structures(200), chunk_atoms=4)
        return asyncio.all_tasks() - before

    assert run(server, job) == set()
    assert len(server.evaluations) < 20
