"""Two engines behind one port: the same bits as one, and nothing lost when either is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

from nepserve.client import Client, Retry
from servers import is_gone, running

if TYPE_CHECKING:
    from pathlib import Path

PRODUCT = "nepcore:load"


def structures(n, seed=1):
    rng = np.random.default_rng(seed)
    return [
        {
            "symbols": ["Si"] * k,
            "positions": rng.random((k, 3)) * 6 + 12 * np.arange(k)[:, None] / k,
            "cell": np.eye(3) * 14.0,
        }
        for k in rng.integers(2, 12, n)
    ]


def two(model, **more):
    return running(loader=PRODUCT, models=[f"si={model}"], devices="cpu:2", backend="rule", **more)


def devices(server):
    return server.get("/v1/status").json()["engine"]["devices"]


def all_ready(server, seconds=60):
    end = time.monotonic() + seconds
    while not all(each["ready"] for each in devices(server)):
        assert time.monotonic() < end, server.log
        time.sleep(0.05)
    return server


def metric(server, name):
    return sum(
        float(line.rpartition(" ")[2]) for line in server.get("/metrics").text.splitlines() if line.startswith(name)
    )


def test_two_engines_give_the_bits_of_one_and_both_work(model: Path) -> None:
    block = structures(200)
    with running(loader=PRODUCT, models=[f"si={model}"], device="cpu", threads=1, backend="rule") as one:
        one.ready(60)
        wanted = Client(one.url).evaluate_many(block, chunk_atoms=60)
    with two(model) as server:
        all_ready(server.ready(60))
        assert len(server.engines()) == 2
        before = [psutil.Process(pid).cpu_times().user for pid in server.engines()]
        client = Client(server.url)
        found = client.evaluate_many(block, chunk_atoms=60)
        singles = [client.evaluate(each)["energy"] for each in block[:40]]
        for name in ("energy", "forces"):
            np.testing.assert_array_equal(found[name], wanted[name])
        assert singles == wanted["energy"][:40].tolist()
        after = [psutil.Process(pid).cpu_times().user for pid in server.engines()]
        assert all(b > a for a, b in zip(before, after, strict=True)), "one of them did nothing"
        assert server.terminate() == 0


@pytest.mark.parametrize("which", [0, 1], ids=["the first", "the second"])
def test_either_may_be_killed_under_load_and_nothing_is_lost(model: Path, which: int) -> None:
    block = structures(40)
    with two(model) as server:
        all_ready(server.ready(60))
        wanted = Client(server.url).evaluate_many(block)["energy"]
        pid = devices(server)[which]["pid"]
        wrong: list[object] = []
        answered = [0]
        stop = threading.Event()

        def ask(k: int) -> None:
            # Not once does a client have to ask again: the other engine takes what the dead one had.
            client = Client(server.url, retries=Retry(limit=0))
            while not stop.is_set():
                i = (answered[0] + k) % len(block)
                try:
                    if client.evaluate(block[i])["energy"] != wanted[i]:
                        wrong.append(i)
                except Exception as error:
                    wrong.append(error)
                answered[0] += 1

        clients = [threading.Thread(target=ask, args=(k,)) for k in range(6)]
        for thread in clients:
            thread.start()
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        assert is_gone(pid)
        seen = answered[0]
        time.sleep(0.5)
        assert server.get("/readyz").status_code == 200
        stop.set()
        for thread in clients:
            thread.join(30)
        assert wrong == []
        assert answered[0] > seen
        all_ready(server)
        assert devices(server)[which]["pid"] != pid
        assert metric(server, "nepserve_engine_restarts_total") == 1
        assert server.terminate() == 0


def test_a_model_is_replaced_on_both(model: Path, tmp_path: Path) -> None:
    from servers import write_model

    other = write_model(tmp_path / "other.txt", "C", "Si", "Ge", "Sn", seed=5)
    with two(model) as server:
        all_ready(server.ready(60))
        client = Client(server.url)
        block = structures(30)
        before = [client.evaluate(each)["energy"] for each in block]
        import httpx

        answer = httpx.post(
            server.url + "/v1/models?name=si", content=other.read_bytes(), headers={"Content-Type": "text/plain"},
            timeout=60,
        )  # fmt: skip
        assert answer.status_code == 201, answer.text
        after = [client.evaluate(each)["energy"] for each in block]
        assert not set(before) & set(after)
        bad = httpx.post(
            server.url + "/v1/models?name=si", content=b"nonsense", headers={"Content-Type": "text/plain"}, timeout=60
        )
        assert bad.status_code == 422
        assert [client.evaluate(each)["energy"] for each in block] == after
        # An engine that is started again has the new model.
        pid = devices(server)[1]["pid"]
        os.kill(pid, signal.SIGKILL)
        assert is_gone(pid)
        end = time.monotonic() + 60
        while devices(server)[1].get("pid") == pid or not devices(server)[1]["ready"]:
            assert time.monotonic() < end, server.log
            time.sleep(0.05)
        assert [client.evaluate(each)["energy"] for each in block] == after


def test_one_that_keeps_failing_drops_out_alone(model: Path) -> None:
    with two(model, engine_restarts=0) as server:
        all_ready(server.ready(60))
        os.kill(devices(server)[1]["pid"], signal.SIGKILL)
        server.wait_for("cpu#2 drops out")
        assert np.isfinite(Client(server.url).evaluate(structures(1)[0])["energy"])
        assert server.get("/readyz").status_code == 200
        os.kill(devices(server)[0]["pid"], signal.SIGKILL)
        assert server.wait() == 1


def test_models_are_loaded_without_the_first_device(model: Path, tmp_path: Path) -> None:
    import httpx

    from servers import write_model

    other = write_model(tmp_path / "other.txt", "C", "Si", "Ge", "Sn", seed=5)
    with two(model, engine_restarts=0) as server:
        all_ready(server.ready(60))
        os.kill(devices(server)[0]["pid"], signal.SIGKILL)
        server.wait_for("cpu#1 drops out")
        answer = httpx.post(
            server.url + "/v1/models?name=new", content=other.read_bytes(), headers={"Content-Type": "text/plain"},
            timeout=60,
        )  # fmt: skip
        assert answer.status_code == 201, answer.text
        assert answer.json()["backend"]
        assert np.isfinite(Client(server.url, model="new").evaluate(structures(1)[0])["energy"])
        assert httpx.delete(server.url + "/v1/models/new", timeout=60).status_code == 204


def test_devices_that_are_no_devices_are_refused_at_the_start(model: Path) -> None:
    from nepserve import server, settings

    with pytest.raises(settings.SettingsError, match="--devices"):
        server.run(settings.load({"models": [str(model)], "devices": "none", "port": 0}))


def test_a_start_that_is_refused_leaves_no_socket(model: Path, tmp_path: Path) -> None:
    from nepserve import server, settings

    for flags in ({"devices": "none"}, {"frame_socket": str(tmp_path / "none" / "s")}):
        with pytest.raises(settings.SettingsError):
            server.run(settings.load({"models": [str(model)], "uds": str(tmp_path / "s"), **flags}))
        assert not (tmp_path / "s").exists()
