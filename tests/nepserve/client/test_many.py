from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nepcore.errors import StructureError
from nepcore.structures import Structure, Structures
from nepserve.client import (
    Client,
    ConnectionFailed,
    InvalidAnswer,
    Overloaded,
    Retry,
    ServerError,
    StructureRejected,
    Timeout,
)
from nepserve.client.bodies import FIRST_ATOMS, Pace, gather

SOON = Retry(limit=5, first=0.0, longest=0.0)


@pytest.fixture
def client(server):
    return Client(server.url, retries=SOON)


def molecules(count, seed=0):
    """Molecules and, every fifth, a crystal."""
    rng = np.random.default_rng(seed)
    found = []
    for k in range(count):
        n = 1 + k % 4
        cell = np.diag([5.0, 6.0, 7.0]) if k % 5 == 0 else None
        found.append(Structure.make(rng.choice([1, 8, 13, 14], n), rng.uniform(0, 2.5, (n, 3)), cell))
    return found


def test_results_come_packed_and_in_order_whatever_the_bodies(client, server, toy_results):
    items = molecules(57)
    names = ["energy", "free_energy", "energies", "forces", "stress", "virial", "virials", "descriptors"]
    shown = []
    found = client.evaluate_many(items, names, chunk_atoms=10, progress=lambda done, of: shown.append((done, of)))
    assert len(found) == 57
    assert list(found.values) == names
    assert found.counts.tolist() == [len(item) for item in items]
    assert found.stress_known.tolist() == [k % 5 == 0 for k in range(57)]
    for i, item in enumerate(items):
        result, wanted = found.view(i), toy_results(item)
        assert result.unavailable == (() if i % 5 == 0 else ("stress",))
        for name, value in result.values.items():
            np.testing.assert_allclose(value, wanted["energy" if name == "free_energy" else name], atol=1e-13)
    assert np.isnan(found["stress"][1:5]).all()
    assert all(sum(seen.counts) <= 10 for seen in server.evaluations)
    assert shown == sorted(shown)
    assert shown[-1] == (57, 57)
    assert len(shown) == len(server.evaluations) > 5


def test_bits_do_not_depend_on_the_bodies(client):
    items = molecules(40)
    whole = client.evaluate_many(items)
    for chunk in (1, 3, 17):
        parts = client.evaluate_many(items, chunk_atoms=chunk)
        np.testing.assert_array_equal(parts["forces"], whole["forces"])
        np.testing.assert_array_equal(parts["energy"], whole["energy"])


def test_several_bodies_are_under_way_together(client, server, reply):
    first = threading.Event()
    server.plan.append(reply(wait=first))
    # The first body is answered only once a second one has arrived, over a second connection.
    arrived = server.reply_to

    def reply_to(path):
        if len(server.evaluations) >= 1:
            first.set()
        return arrived(path)

    server.reply_to = reply_to
    assert len(client.evaluate_many(molecules(30), chunk_atoms=8)) == 30
    assert 1 < server.connections <= 3


def test_connections_are_used_again(client, server):
    client.evaluate_many(molecules(60), chunk_atoms=6)
    client.evaluate_many(molecules(60), chunk_atoms=6)
    assert server.connections <= 3


def test_a_packed_block_a_generator_and_mappings_are_taken(client):
    items = molecules(7)
    wanted = client.evaluate_many(items)["forces"]
    mapping = [{"numbers": s.numbers, "positions": s.positions, "cell": s.cell, "pbc": s.pbc} for s in items]
    for form in (Structures.pack(items), (s for s in items), mapping, tuple(items)):
        np.testing.assert_array_equal(client.evaluate_many(form)["forces"], wanted)


def test_nothing_asks_nothing(client, server):
    found = client.evaluate_many([], ["energy", "forces", "stress", "descriptors"])
    assert len(found) == 0
    assert {name: array.shape for name, array in found.values.items()} == {
        "energy": (0,), "forces": (0, 3), "stress": (0, 6), "descriptors": (0, 0),
    }  # fmt: skip
    assert server.seen == []


def test_one_structure_where_many_are_wanted_is_a_mistake(client):
    with pytest.raises(TypeError, match="sequence"):
        client.evaluate_many(molecules(1)[0])
    with pytest.raises(TypeError, match="sequence"):
        client.evaluate_many({"numbers": [1], "positions": [[0, 0, 0]]})


@pytest.mark.parametrize(("option", "value"), [("chunk_atoms", 0), ("on_error", "ignore"), ("timeout", -1)])
def test_arguments_are_checked_first(client, server, option, value):
    with pytest.raises(ValueError, match=option):
        client.evaluate_many(molecules(3), **{option: value})
    assert server.seen == []


def with_faults():
    """Ten structures of which 2 is no structure, 5 has an element that the model lacks, 7 a NaN."""
    items = molecules(10)
    items[2] = {"symbols": ["Q"], "positions": [[0, 0, 0]]}
    items[5] = Structure.make(["Si", "Ge"], [[0, 0, 0], [0, 0, 2]])
    items[7] = Structure.make(["Si"], [[0, np.nan, 0]])
    return items


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_failures_are_returned_in_their_places(client, toy_results, chunk):
    items = with_faults()
    names = ["energy", "forces", "stress", "descriptors"]
    found = client.evaluate_many(items, names, chunk_atoms=chunk, on_error="return")
    assert sorted(found.errors) == [2, 5, 7]
    assert [found.errors[i].code for i in (2, 5, 7)] == ["bad_value", "unknown_element", "non_finite"]
    assert found.errors[5].atoms == (1,)
    assert found.counts.tolist() == [1, 2, 0, 4, 1, 2, 3, 1, 1, 2]
    for i in (0, 1, 3, 4, 6, 8, 9):
        wanted = toy_results(items[i])
        result = found.view(i)
        assert result["energy"] == pytest.approx(wanted["energy"])
        np.testing.assert_allclose(result["forces"], wanted["forces"], atol=1e-13)
        np.testing.assert_allclose(result["descriptors"], wanted["descriptors"], atol=1e-13)
    for i in (2, 5, 7):
        a, b = found.offsets[i], found.offsets[i + 1]
        assert np.isnan(found.values["energy"][i])
        assert np.isnan(found.values["forces"][a:b]).all()
        with pytest.raises(StructureError):
            found.view(i)
    assert found.stress_known.tolist() == [i == 0 for i in range(10)]


@pytest.mark.parametrize("chunk", [1, 1000])
def test_the_first_failure_is_raised_with_its_index(client, server, chunk):
    items = with_faults()
    with pytest.raises(StructureRejected, match="structure 3: ") as caught:
        client.evaluate_many(items, chunk_atoms=chunk)
    assert caught.value.index == 2
    assert server.seen == []
    items[2] = items[0]
    with pytest.raises(StructureRejected, match=r"structure 6: atom 2: .* \(unknown_element\)") as caught:
        client.evaluate_many(items, chunk_atoms=chunk)
    assert (caught.value.index, caught.value.code, caught.value.atoms) == (5, "unknown_element", (1,))
    assert client.evaluate(items[0])["energy"]


def test_all_structures_may_fail(client):
    bad = [Structure.make(["Ge"], [[0, 0, 0]])] * 3
    found = client.evaluate_many(bad, ["energy", "descriptors"], on_error="return", chunk_atoms=1)
    assert sorted(found.errors) == [0, 1, 2]
    assert np.isnan(found.values["energy"]).all()
    worse = client.evaluate_many(["x", None], on_error="return")
    assert sorted(worse.errors) == [0, 1]


def test_a_body_too_large_for_the_server_is_halved(client, server, fault):
    items = molecules(16)
    limit = 10
    answer = server.right

    def right(seen):
        if seen.path == "/v1/evaluate" and sum(seen.counts) > limit:
            document = fault(413, "too_large", "too many atoms", max_atoms=limit)
            return 413, document.kind, document.body
        return answer(seen)

    wanted = client.evaluate_many(items)["forces"]
    server.right = right
    np.testing.assert_array_equal(client.evaluate_many(items)["forces"], wanted)


def test_a_structure_too_large_for_the_server_fails_alone(client, server, fault):
    items = molecules(12)
    items[6] = Structure.make([1] * 11, np.arange(33.0).reshape(11, 3))
    answer = server.right

    def right(seen):
        if seen.path == "/v1/evaluate" and max(seen.counts) > 10:
            document = fault(413, "too_large", "11 atoms", max_atoms=10)
            return 413, document.kind, document.body
        return answer(seen)

    server.right = right
    found = client.evaluate_many(items, on_error="return")
    assert list(found.errors) == [6]
    assert found.errors[6].code == "too_large"
    assert np.isfinite(np.delete(found.values["energy"], 6)).all()
    with pytest.raises(StructureRejected, match="structure 7: 11 atoms") as caught:
        client.evaluate_many(items)
    assert caught.value.index == 6
    assert caught.value.problem["max_atoms"] == 10


@pytest.mark.parametrize("on_error", ["raise", "return"])
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"status": 500, "body": b"{}", "kind": "application/problem+json"}, ServerError),
        ({"status": 429, "body": b"{}", "kind": "application/problem+json"}, Overloaded),
        ({"keep": 30}, ConnectionFailed),
        ({"change": lambda message: message.pop("forces") and None}, InvalidAnswer),
    ],
    ids=["500", "429", "truncated", "no forces"],
)
def test_what_is_not_a_structures_fault_is_raised_and_says_where(client, server, reply, on_error, options, error):
    items = molecules(20)
    client.evaluate_many(items[:3], chunk_atoms=4)
    server.always = reply(**options)
    with pytest.raises(error, match=r"structures? \d+") as caught:
        client.evaluate_many(items, chunk_atoms=6, on_error=on_error)
    assert caught.value.structures.start == 0
    server.always = None
    assert len(client.evaluate_many(items, chunk_atoms=6)) == 20


def test_a_fault_in_the_middle_is_repaired(client, server, reply, fault):
    items = molecules(40)
    wanted = client.evaluate_many(items)["forces"]
    server.plan.extend([
        reply(), fault(429, "queue_full"), reply(keep=40), reply(), reply(mute=True), fault(503, "engine_down"),
        reply(cut=True),
    ])  # fmt: skip
    np.testing.assert_array_equal(client.evaluate_many(items, chunk_atoms=7)["forces"], wanted)


def test_a_body_that_is_late_is_a_timeout_that_says_where(server, reply):
    never = threading.Event()
    items = molecules(9)
    server.plan.extend([reply(), reply(wait=never)])
    with pytest.raises(Timeout) as caught:
        Client(server.url).evaluate_many(items, chunk_atoms=4, timeout=0.3)
    never.set()
    assert caught.value.structures.start > 0


def test_idle_connections_that_were_closed_are_no_fault(server):
    client = Client(server.url, retries=0)
    items = molecules(40)
    client.evaluate_many(items, chunk_atoms=5)
    server.drop()
    assert len(client.evaluate_many(items, chunk_atoms=5)) == 40


def test_an_interrupt_ends_it_and_the_client_goes_on(client, server):
    def interrupt(done, _):
        if done > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.evaluate_many(molecules(60), chunk_atoms=5, progress=interrupt)
    assert len(client.evaluate_many(molecules(5))) == 5


def test_calls_that_take_several_bodies_let_others_pass(server):
    items = molecules(20)
    Client(server.url).evaluate_many(items)
    assert "x-priority" not in server.evaluations[-1].headers
    Client(server.url).evaluate_many(items, chunk_atoms=5)
    assert server.evaluations[-1].headers["x-priority"] == "bulk"
    Client(server.url, priority="interactive").evaluate_many(items, chunk_atoms=5)
    assert server.evaluations[-1].headers["x-priority"] == "interactive"


def test_many_threads_share_a_client(server):
    client = Client(server.url)
    sets = [molecules(12, seed=k) for k in range(6)]
    wanted = [client.evaluate_many(items)["forces"] for items in sets]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda items: client.evaluate_many(items, chunk_atoms=5)["forces"], sets))
    for got, right in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got, right)


def test_arrays_are_the_callers_own(client):
    found = client.evaluate_many(molecules(3))
    for array in found.values.values():
        array[:] = 0.0


def test_ase_atoms(client):
    ase = pytest.importorskip("ase")
    atoms = [ase.Atoms("OH", positions=[[0, 0, 0], [0, 0, 1 + 0.1 * k]]) for k in range(3)]
    atoms[1].info["temperature"] = 100.0
    found = client.evaluate_many(atoms, ["energy"])
    assert found["energy"][1] - client.evaluate({"symbols": ["O", "H"], "positions": atoms[1].positions}, ["energy"])[
        "energy"
    ] == pytest.approx(0.2)


# --- Pace ------------------------------------------------------------------------------------------------------------


def test_bodies_grow_while_the_server_is_quick_and_shrink_when_it_is_not():
    pace = Pace(largest=50_000, timeout=60.0)
    assert pace.atoms == FIRST_ATOMS
    sizes = []
    for _ in range(6):
        pace.note(pace.atoms, 0.01)
        sizes.append(pace.atoms)
    assert sizes == [8192, 16384, 32768, 50_000, 50_000, 50_000]
    pace.note(50_000, 1.0)
    assert pace.atoms == 50_000
    for _ in range(30):
        pace.note(pace.atoms, 100.0)
    assert pace.atoms == 1


def test_a_small_body_says_nothing_about_large_ones():
    pace = Pace(largest=50_000, timeout=60.0)
    pace.note(10, 0.001)
    assert pace.atoms == FIRST_ATOMS


def test_a_structure_larger_than_a_body_travels_alone():
    offsets = np.cumsum([0, 5, 5000, 5, 5])
    pace = Pace(largest=100, timeout=60.0)
    assert [pace.stop(offsets, start) for start in range(4)] == [1, 2, 4, 4]


def test_empty_structures_do_not_hold_up_the_rest():
    offsets = np.cumsum([0, 0, 0, 3, 0])
    pace = Pace(largest=1, timeout=60.0)
    start, stops = 0, []
    while start < 4:
        start = pace.stop(offsets, start)
        stops.append(start)
    assert stops[-1] == 4


def test_gathering_keeps_the_order_and_sets_the_rest_apart():
    work = gather([*molecules(2), "no", molecules(1)[0]])
    assert work.counts.tolist() == [1, 2, 0, 1]
    assert work.places.tolist() == [0, 1, 3]
    assert list(work.rejected) == [2]
    assert work.span(1, 3) == range(1, 4)
