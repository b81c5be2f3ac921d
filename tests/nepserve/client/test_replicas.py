"""Several servers: the choice as a rule without time, then both clients against servers that break and come back."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time

import numpy as np
import pytest

from nepserve.client import AsyncClient, Client, ConnectionFailed, Overloaded, Retry
from nepserve.client.replicas import FIRST_REST, HALF_LIFE, LONGEST_REST, REREAD_SECONDS, Course, Replicas
from nepserve.client.retry import Attempts

A, B, C = "http://a:1", "http://b:1", "http://c:1"
PAIR = {"symbols": ["Si", "Si"], "positions": [[0, 0, 0], [0, 0, 1.5]]}


def urls(replicas):
    return [member.address.text for member in replicas.members]


def course(replicas, atoms=10, timeout=100.0, **policy):
    return Course(replicas, Attempts(Retry(**policy), 0.0, timeout, draw=lambda: 1.0), atoms)


def where(replicas, now, tried=()):
    return replicas.choose(now, tried).address.text


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (A, [A]),
        (f"{A},{B}", [A, B]),
        (f" {A} , {B}/ ,", [A, B]),
        ([A, B, A], [A, B]),
        ((A,), [A]),
    ],
    ids=["one", "commas", "blanks", "list with one twice", "tuple"],
)
def test_servers_are_one_address_or_several(given, found):
    replicas = Replicas(given)
    assert urls(replicas) == found
    assert urls(Replicas(replicas.text)) == found


@pytest.mark.parametrize("given", ["", ",", [], "a:1", f"{A},nonsense", "file:", "file://elsewhere/a", [b"http://a"]])
def test_what_names_no_server_is_refused(given):
    with pytest.raises(ValueError, match=r"address|file"):
        Replicas(given)


def test_a_file_of_addresses_may_come_later_and_change(tmp_path):
    path = tmp_path / "addresses.txt"
    replicas = Replicas(path)
    assert replicas.text == f"file:{path}"
    assert replicas.several
    assert replicas.choose(0.0) is None
    path.write_text(f"# two of them\n{A}  node-a\n\n{B}\n")
    assert replicas.choose(0.1) is None, "it is not looked at before every request"
    assert where(replicas, REREAD_SECONDS + 0.1) in {A, B}
    first = {member.address.text: member for member in replicas.members}
    path.write_text(f"{B}\n{C}\n")
    replicas.refresh(10.0)
    assert urls(replicas) == [B, C]
    assert replicas.members[0] is first[B], "what is known of one that stays is kept"
    path.write_text("half a li")
    replicas.refresh(20.0)
    path.unlink()
    replicas.refresh(30.0)
    assert urls(replicas) == [B, C]


def test_one_that_returns_under_another_address_has_no_past(tmp_path):
    """What takes the place of a lost one is asked at once; so is the old address, should it return."""
    path = tmp_path / "addresses.txt"
    path.write_text(f"{A}\n{B}\n")
    replicas = Replicas(path)
    a, b = replicas.members
    for _ in range(20):
        a.failed(0.0)
    b.answered(0.0, "1000")
    assert {where(replicas, 1.0) for _ in range(50)} == {B}, "the other one rests, whatever waits here"
    path.write_text(f"{C}\n{B}\n")
    assert where(replicas, 3.0) == C
    b.answered(3.0, "1000")
    path.write_text(f"{C}\n{B}\n{A}\n")
    assert {where(replicas, 5.0) for _ in range(50)} == {A, C}
    assert replicas.members[1] is b


def test_a_request_on_its_way_to_one_that_left_the_file_goes_on_elsewhere(tmp_path):
    path = tmp_path / "addresses.txt"
    path.write_text(f"{A}\n")
    request = course(Replicas(path))
    assert request.go(0.0).address.text == A
    path.write_text(f"{B}\n")
    assert request.failed(2.0, cut=True, hopeless=False) == 0.0
    assert request.go(2.0).address.text == B


def test_a_file_that_holds_no_addresses_is_refused_with_its_line(tmp_path):
    path = tmp_path / "addresses.txt"
    path.write_text(f"{A}\nnonsense\n")
    with pytest.raises(ValueError, match="line 2"):
        Replicas(f"file:{path}")


def test_the_least_queued_atoms_decide():
    replicas = Replicas([A, B])
    a, b = replicas.members
    a.answered(0.0, "5000")
    b.answered(0.0, "100")
    assert where(replicas, 0.0) == B
    waiting = course(replicas, atoms=1000)
    assert waiting.go(0.0) is b
    assert course(replicas, atoms=100_000).go(8 * HALF_LIFE) is a, "what was said long ago counts less and less"
    waiting.left()
    assert where(replicas, 8 * HALF_LIFE) == B


@pytest.mark.parametrize("said", [None, "", "-1", "many", "1e3", "9" * 40], ids=str)
def test_a_queue_that_is_no_number_is_not_believed(said):
    member = Replicas(A).members[0]
    member.answered(0.0, said)
    assert member.load(0.0) == 0


def test_equals_take_turns():
    replicas = Replicas([A, B, C])
    assert {where(replicas, 0.0) for _ in range(200)} == {A, B, C}


def test_one_that_failed_is_left_alone_longer_each_time_and_let_back_in():
    replicas = Replicas([A, B])
    a = replicas.members[0]
    a.failed(0.0)
    assert {where(replicas, 0.4 * FIRST_REST) for _ in range(50)} == {B}
    assert {where(replicas, FIRST_REST) for _ in range(50)} == {A, B}
    for _ in range(20):
        a.failed(0.0)
    assert 0.5 * LONGEST_REST <= a.rests_until <= LONGEST_REST
    a.answered(1.0, None)
    assert {where(replicas, 1.0) for _ in range(50)} == {A, B}


def test_those_at_rest_are_asked_before_a_request_is_given_up():
    replicas = Replicas([A, B])
    for member in replicas.members:
        member.failed(0.0)
    tried = [replicas.choose(0.0)]
    tried.append(replicas.choose(0.0, tried))
    assert set(tried) == set(replicas.members)
    assert replicas.choose(0.0, tried) is None


def test_a_request_goes_round_at_once_and_waits_only_between_rounds():
    replicas = Replicas([A, B, C])
    request = course(replicas, first=1.0, longest=1.0)
    for round_ in range(2):
        seen = set()
        for last in (False, False, True):
            seen.add(request.go(0.0).address.text)
            assert request.failed(0.0, cut=False, hopeless=False) == (1.0 if last else 0.0)
        assert seen == {A, B, C}, round_
    assert request.attempts.repeated == 2


def test_a_request_that_breaks_connections_ends_four_servers_at_most():
    replicas = Replicas([f"http://h{k}:1" for k in range(9)])
    request = course(replicas, cut=3)
    broken = 1
    request.go(0.0)
    while request.failed(0.0, cut=True, hopeless=False) is not None:
        request.go(0.0)
        broken += 1
    assert broken == 4


def test_without_repetitions_a_request_stays_where_it_was():
    replicas = Replicas([A, B])
    request = course(replicas, limit=0)
    request.go(0.0)
    assert request.failed(0.0, cut=False, hopeless=False) is None


def test_a_name_that_does_not_exist_does_not_stop_the_others():
    replicas = Replicas([A, B])
    request = course(replicas)
    request.go(0.0)
    assert request.failed(0.0, cut=False, hopeless=True) == 0.0
    request.go(0.0)
    assert request.failed(0.0, cut=False, hopeless=False) is not None
    alone = course(Replicas(A))
    alone.go(0.0)
    assert alone.failed(0.0, cut=False, hopeless=True) is None


def test_after_a_fork_the_parents_requests_do_not_count(monkeypatch):
    replicas = Replicas([A, B])
    course(replicas, atoms=99).go(0.0)
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert [member.load(0.0) for member in replicas.members] == [0, 0]


# -- both clients ------------------------------------------------------------------------------------------------


class Sync:
    def __init__(self, *args, **options):
        self.client = Client(*args, **options)

    def __getattr__(self, name):
        return getattr(self.client, name)


class Async:
    """The asynchronous client, called as the other one is: from a loop in a thread of its own."""

    def __init__(self, *args, **options):
        self.client = AsyncClient(*args, **options)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def __getattr__(self, name):
        found = getattr(self.client, name)
        if name in {"replicas", "url"}:
            return found
        return lambda *args, **options: asyncio.run_coroutine_threadsafe(found(*args, **options), self.loop).result(60)

    def stop(self):
        asyncio.run_coroutine_threadsafe(self.client.close(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


@pytest.fixture(params=["sync", "async"])
def connect(request):
    """A client of either kind."""
    made = []

    def make(*args, **options):
        made.append((Sync if request.param == "sync" else Async)(*args, **options))
        return made[-1]

    yield make
    for client in made:
        if isinstance(client, Async):
            client.stop()
        else:
            client.close()


def crystals(n):
    rng = np.random.default_rng(3)
    return [{"symbols": ["Si"] * 4, "positions": rng.normal(size=(4, 3)) * 2} for _ in range(n)]


def test_many_structures_are_split_and_come_back_in_order(connect, make_server):
    servers = [make_server() for _ in range(3)]
    structures = crystals(60)
    alone = Client(servers[0].url).evaluate_many(structures, chunk_atoms=8)
    for server in servers:
        server.seen.clear()
    found = connect([s.url for s in servers]).evaluate_many(structures, chunk_atoms=8)
    np.testing.assert_array_equal(found["forces"], alone["forces"])
    assert min(len(s.evaluations) for s in servers) > 0
    assert sum(len(s.evaluations) for s in servers) == 30


def test_a_server_that_is_slow_does_not_hold_up_the_others(make_server, reply):
    slow, quick = make_server(), make_server()
    gate = threading.Event()
    slow.always = reply(wait=gate)
    finished = []

    def progress(done, _):
        finished.append(done)
        if done >= 24:
            # The quick one has done more than was under way when the slow one began to wait.
            gate.set()

    found = Client([slow.url, quick.url], timeout=30).evaluate_many(crystals(40), chunk_atoms=8, progress=progress)
    assert len(found) == 40
    assert gate.is_set()


def test_a_dead_server_passes_its_requests_on(connect, make_server):
    dead, alive = make_server(), make_server()
    client = connect([dead.url, alive.url])
    for _ in range(6):
        client.evaluate(PAIR)
    dead.stop()
    for _ in range(20):
        assert np.isfinite(client.evaluate(PAIR)["energy"])
    assert len(dead.evaluations) + len(alive.evaluations) == 26
    known = {entry["url"]: entry for entry in client.replicas()}
    assert "rests" not in known[alive.url]


def test_a_server_that_ends_under_load_loses_nothing(connect, make_server):
    dying, alive = make_server(), make_server()
    structures = crystals(200)
    alone = Client(alive.url).evaluate_many(structures, chunk_atoms=4)

    def progress(done, _):
        if done >= 50 and not dying.stopped.is_set():
            dying.stop()

    found = connect([dying.url, alive.url]).evaluate_many(structures, chunk_atoms=4, progress=progress)
    np.testing.assert_array_equal(found["energy"], alone["energy"])
    assert dying.stopped.is_set()


def test_a_server_that_comes_back_is_asked_again(connect, make_server, fault):
    first, second = make_server(), make_server()
    first.always = fault(503, "engine_down")
    client = connect([first.url, second.url])
    for _ in range(10):
        client.evaluate(PAIR)
    first.always = None
    before = len(first.evaluations)
    end = time.monotonic() + 20
    while len(first.evaluations) == before and time.monotonic() < end:
        client.evaluate(PAIR)
        time.sleep(0.02)
    assert len(first.evaluations) > before


@pytest.mark.parametrize("refusal", [(429, "queue_full"), (503, "draining"), (502, "")], ids=str)
def test_one_without_room_is_passed_by_at_once(connect, make_server, refusal, fault):
    full, free = make_server(), make_server()
    full.always = fault(*refusal, headers={"Retry-After": "30"})
    client = connect([full.url, free.url], timeout=20)
    for _ in range(10):
        client.evaluate(PAIR)
    assert len(free.evaluations) == 10
    assert len(full.evaluations) < 3, "it is left alone for a while"


def test_when_none_has_room_the_client_waits_as_it_does_for_one(connect, make_server, fault):
    servers = [make_server(), make_server()]
    for server in servers:
        server.plan.append(fault(429, "queue_full", headers={"Retry-After": "0.05"}))
    client = connect([s.url for s in servers], retries=Retry(first=0.01, longest=0.01))
    client.evaluate(PAIR)
    assert sum(len(s.evaluations) for s in servers) == 3
    for server in servers:
        server.always = fault(429, "queue_full")
    with pytest.raises(Overloaded):
        connect([s.url for s in servers], retries=Retry(limit=2, first=0.01, longest=0.01)).evaluate(PAIR)


def test_queued_atoms_that_a_server_reports_send_the_next_request_elsewhere(connect, make_server, reply):
    busy, idle = make_server(), make_server()
    busy.always = reply(headers={"X-Queue-Atoms": "1000000"})
    idle.always = reply(headers={"X-Queue-Atoms": "0"})
    client = connect([busy.url, idle.url])
    for _ in range(30):
        client.evaluate(PAIR)
    assert len(busy.evaluations) <= 1


def test_the_client_waits_for_a_file_of_addresses_and_follows_it(connect, make_server, tmp_path):
    one, other = make_server(), make_server()
    path = tmp_path / "addresses.txt"
    client = connect(path)
    assert not client.ready()
    with pytest.raises(ConnectionFailed, match=r"addresses\.txt"):
        client.evaluate(PAIR)
    path.write_text(one.url + "\n")
    client.wait_until_ready(10)
    client.evaluate(PAIR)
    path.write_text(other.url + "\n")
    one.stop()
    client.evaluate(PAIR)
    end = time.monotonic() + 10
    while not other.evaluations and time.monotonic() < end:
        client.evaluate(PAIR)
    assert other.evaluations


def test_one_that_returns_in_the_file_takes_work_again(connect, make_server, tmp_path):
    lost, stays = make_server(), make_server()
    path = tmp_path / "addresses.txt"
    path.write_text(f"{lost.url}\n{stays.url}\n")
    client = connect(path)
    for _ in range(20):
        client.evaluate(PAIR)
    lost.stop()
    path.write_text(f"{stays.url}\n")
    for _ in range(20):
        client.evaluate(PAIR)
    returned = make_server()
    path.write_text(f"{stays.url}\n{returned.url}\n")
    end = time.monotonic() + 20
    while len(returned.evaluations) < 10 and time.monotonic() < end:
        client.evaluate(PAIR)
    assert len(returned.evaluations) >= 10
    assert stays.evaluations
    assert {entry["url"] for entry in client.replicas()} == {stays.url, returned.url}


def test_ready_means_any_of_them(connect, make_server):
    gone, there = make_server(), make_server()
    gone.stop()
    client = connect(f"{gone.url},{there.url}")
    assert client.ready()
    client.wait_until_ready(5)
    there.stop()
    assert not client.ready()


def test_all_gone_is_an_error_that_names_one(connect, make_server):
    servers = [make_server(), make_server()]
    for server in servers:
        server.stop()
    with pytest.raises(ConnectionFailed) as caught:
        connect([s.url for s in servers], retries=Retry(first=0.01, longest=0.01)).evaluate(PAIR)
    assert caught.value.url in {s.url for s in servers}


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_client_of_several_is_pickled_with_its_addresses(kind, make_server):
    servers = [make_server(), make_server()]
    client = kind([s.url for s in servers])
    copied = pickle.loads(pickle.dumps(client))
    assert copied.url == client.url
    if kind is Client:
        copied.evaluate(PAIR)


def test_a_unix_socket_and_a_port_may_stand_together(connect, make_server, tmp_path):
    local, remote = make_server(socket_path=tmp_path / "s"), make_server()
    client = connect([local.url, remote.url])
    for _ in range(30):
        client.evaluate(PAIR)
    assert local.evaluations
    assert remote.evaluations


def test_the_ase_calculator_takes_several(make_server):
    build = pytest.importorskip("ase.build")
    from nepserve.client.ase import NEPCalculator

    gone, there = make_server(), make_server()
    gone.stop()
    atoms = build.molecule("H2O")
    atoms.calc = NEPCalculator([gone.url, there.url])
    assert np.isfinite(atoms.get_potential_energy())
    assert atoms.calc.todict()["url"] == f"{gone.url},{there.url}"
