"""Real engine processes, doing what they should."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

from engines import TOY, USUAL, assert_same_bits, block, cloud, directly, engine, file, run, structure
from nepcore.errors import ModelError, ModelFileError
from nepcore.structures import PROPERTIES, Structures
from nepserve.engine import EngineDown, EngineLink, ProbeError, arenas, messages

if TYPE_CHECKING:
    from pathlib import Path

ORDER = ("energy", "forces", "stress")
loops = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
ways = pytest.mark.parametrize(
    "shared",
    [
        pytest.param(True, marks=pytest.mark.skipif(not arenas.available(), reason="no memfd"), id="arenas"),
        pytest.param(False, id="plain"),
    ],
)


@loops
@ways
def test_round_trips(loop: str, shared: bool) -> None:
    blocks = {
        "nothing": Structures.empty(),
        "one atom": block(1),
        "no cell": Structures.pack([structure(5, periodic=False)]),
        "empty structure": Structures.from_arrays([3, 0, 2], [14] * 5, np.arange(15.0).reshape(5, 3), None, None),
        "64 structures": block(*range(1, 33), *range(32, 0, -1)),
    }

    async def main() -> None:
        async with engine(file(), arenas=shared) as link:
            for what, structures in blocks.items():
                for properties in (("energy",), ORDER, PROPERTIES):
                    found = await link.evaluate("toy", [structures], frozenset(properties))
                    if len(structures):
                        assert_same_bits(found.predictions, directly(structures, properties))
                    assert found.predictions.errors == {}, what
                    assert set(found.predictions.values) == set(properties)
                    assert found.batch_atoms == structures.n_atoms
                    assert min(found.pack_seconds, found.device_seconds, found.unpack_seconds) >= 0

    run(main, loop)


@loops
@ways
def test_sizes_round_the_thresholds(loop: str, shared: bool) -> None:
    per_atom = 25  # bytes of a position and a number
    sizes = {1, 2000, 200_000}
    for edge in (messages.INLINE_BYTES, 2 * messages.INLINE_BYTES, arenas.SMALLEST, messages.BUFFER_BYTES):
        sizes |= {edge // per_atom + extra for extra in (-40, -5, -4, -3, 0, 3)}
        sizes |= {edge // 24, edge // 24 + 1}

    async def main() -> None:
        async with engine(file(nothing=1), arenas=shared) as link:
            for size in sorted(sizes):
                structures = cloud(size)
                found = await link.evaluate("toy", [structures], frozenset({"energy", "forces"}))
                assert np.array_equal(found.predictions["forces"], -structures.positions)

    run(main, loop)


@ways
def test_blocks_are_one_batch_in_their_order(shared: bool) -> None:
    blocks = [block(3, 5), Structures.empty(), block(1, seed=7), block(20, 4, 9, seed=3)]

    async def main() -> None:
        async with engine(file(), arenas=shared) as link:
            found = await link.evaluate("toy", blocks, USUAL)
            assert_same_bits(found.predictions, directly(Structures.concatenate(blocks), ORDER))

    run(main)


@loops
@ways
def test_many_under_way_are_answered_in_their_order(loop: str, shared: bool) -> None:
    blocks = [cloud(1 + 3000 * (i % 7)) for i in range(40)]
    done: list[int] = []

    async def main() -> None:
        async with engine(file(nothing=1), arenas=shared) as link:

            async def one(i: int) -> None:
                found = await link.evaluate("toy", [blocks[i]], frozenset({"energy", "forces"}))
                assert np.array_equal(found.predictions["forces"], -blocks[i].positions)
                done.append(i)

            await asyncio.gather(*(one(i) for i in range(len(blocks))))

    run(main, loop)
    assert done == list(range(len(blocks)))


def test_results_are_the_callers_own() -> None:
    structures = cloud(30_000)

    async def main() -> None:
        async with engine(file(nothing=1)) as link:
            held = []
            for i in range(6):
                found = await link.evaluate("toy", [structures], frozenset({"energy", "forces"}))
                found.predictions["forces"][0] = float(i)
                held.append(found.predictions)
            for i, predictions in enumerate(held):
                assert (predictions["forces"][0] == i).all()
                assert np.array_equal(predictions["forces"][1:], -structures.positions[1:])

    run(main)


def test_a_front_that_is_slow_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "BUFFER_BYTES", 8192)
    blocks = [cloud(n) for n in (4000, 150_000, 10, 90_000)]

    async def main() -> None:
        async with engine(file(nothing=1), arenas=False) as link:
            answers = asyncio.gather(
                *(link.evaluate("toy", [b], frozenset({"energy", "forces"})) for b in blocks for _ in range(3))
            )
            for _ in range(5):
                await asyncio.sleep(0.01)
                # The loop does nothing else meanwhile, as when it encodes a large answer.
                keep_busy()
            for i, found in enumerate(await answers):
                assert np.array_equal(found.predictions["forces"], -blocks[i // 3].positions)

    run(main)


def keep_busy() -> None:
    np.sort(np.random.default_rng(0).random(300_000))


def test_errors_in_band() -> None:
    structures = Structures.pack([structure(4), structure(3, 1, ["Ge"]), structure(5, 2)])

    async def main() -> None:
        async with engine(file(faults={"Ge": "refuse"})) as link:
            found = (await link.evaluate("toy", [structures], USUAL)).predictions
            assert list(found.errors) == [1]
            error = found.errors[1]
            assert (error.code, error.reason, error.field, error.atoms) == (
                "unknown_element", "the toy refuses it", "numbers", (0,),
            )  # fmt: skip
            assert_same_bits(found, directly(structures, ORDER), [0, 2])
            assert np.isnan(found.values["forces"][4:7]).all()

    run(main)


def test_poison_and_its_batch_mates() -> None:
    clean = [structure(3 + i % 5, i) for i in range(30)]
    mixed = [*clean[:11], structure(6, 99, ["Ge", "Si"]), *clean[11:], structure(2, 98, ["C"])]

    async def main() -> None:
        async with engine(file(faults={"Ge": "raise", "C": "nan"})) as link:
            found = (await link.evaluate("toy", [Structures.pack(mixed)], USUAL)).predictions
            assert {i: e.code for i, e in found.errors.items()} == {11: "internal", 31: "non_finite_result"}
            alone = directly(Structures.pack(clean), ORDER)
            assert_same_bits(found.slice(0, 11), alone.slice(0, 11))
            assert_same_bits(found.slice(12, 31), alone.slice(11, 30))
            again = await link.evaluate("toy", [Structures.pack(clean)], USUAL)
            assert_same_bits(again.predictions, alone)

    run(main)


@pytest.mark.parametrize("memory", [100, 300, 1000])
def test_out_of_memory(memory: int) -> None:
    structures = block(*[8] * 160)

    async def main() -> None:
        async with engine(file(memory=memory)) as link:
            assert (await link.ping())["models"]["toy"] == {"limit_atoms": None, "oom_splits": 0}
            found = await link.evaluate("toy", [structures], USUAL)
            assert found.predictions.errors == {}
            assert_same_bits(found.predictions, directly(structures, ORDER))
            state = (await link.ping())["models"]["toy"]
            assert state["oom_splits"] == found.splits >= 1
            assert memory / 4 < state["limit_atoms"] <= 640
            # What was learned is used, and bits do not depend on how a batch is cut.
            again = await link.evaluate("toy", [structures], USUAL)
            assert again.splits <= 1
            assert_same_bits(again.predictions, found.predictions)

    run(main)


def test_memory_that_is_short_at_the_warm_up() -> None:
    async def main() -> None:
        async with engine() as link:
            info = await link.load("toy", file(memory=64), dtype="float64", backend="auto")
            assert info["limit_atoms"] < 64
            assert_same_bits((await link.evaluate("toy", [block(9)], USUAL)).predictions, directly(block(9), ORDER))

    run(main)


def test_urgent_work_between_tiles() -> None:
    long, short = Structures.pack([structure(16, i, ["Ge"]) for i in range(20)]), block(5, 9)
    done: list[str] = []

    async def main() -> None:
        async with engine(file(tile=16, faults={"Ge": "slow"})) as link:
            await link.load("other", file(elements=["Si"]), dtype="float64", backend="auto")

            async def one(name: str, model: str, structures: Structures, *, urgent: bool) -> None:
                found = await link.evaluate(model, [structures], USUAL, urgent=urgent)
                assert_same_bits(found.predictions, directly(structures, ORDER))
                done.append(name)

            running = asyncio.create_task(one("long", "toy", long, urgent=False))
            waiting = asyncio.create_task(one("next", "toy", short, urgent=False))
            await asyncio.sleep(0.1)
            await one("urgent", "toy", short, urgent=True)
            await one("urgent, other model", "other", short, urgent=True)
            state = await link.ping()
            assert state["running"] == ["evaluate"]
            assert state["waiting"] == 1
            await link.probe("other")
            done.append("probe")
            await asyncio.gather(running, waiting)

    run(main)
    assert done == ["urgent", "urgent, other model", "probe", "long", "next"]


def test_a_cancelled_evaluation_makes_room() -> None:
    async def main() -> None:
        async with engine(file(tile=1, faults={"Ge": "slow"})) as link:
            slow = Structures.pack([structure(8, i, ["Ge"]) for i in range(100)])
            endless = [asyncio.create_task(link.evaluate("toy", [slow], USUAL)) for _ in range(3)]
            await asyncio.sleep(0.1)
            for task in endless:
                task.cancel()
            found = await link.evaluate("toy", [block(2)], USUAL)
            assert_same_bits(found.predictions, directly(block(2), ORDER))
            state = await link.ping()
            assert (state["running"], state["waiting"]) == ([], 0)
            assert all(
                isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*endless, return_exceptions=True)
            )

    run(main)


def test_what_a_load_tells(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(file(elements=["Si", "O"], cutoff=4.5))
    stages: list[dict[str, Any]] = []

    async def main() -> None:
        async with engine() as link:
            info = await link.load("m", str(path), dtype="float64", backend="toy", progress=stages.append)
            assert (info["name"], info["path"]) == ("m", str(path))
            assert (info["device"], info["dtype"], info["backend"]) == ("cpu", "float64", "toy")
            assert info["model"]["elements"] == ["Si", "O"]
            assert info["known_answer"]["atoms"] == 8
            assert np.isfinite(info["known_answer"]["energy"])
            assert all(step["seconds"] >= 0 for step in info["warmup"])
            assert info["limit_atoms"] is None
            assert await link.probe("m") >= 0
            assert link.hardware == {"device": "cpu"}
            assert link.hello["pid"] == link.pid

    run(main)
    assert [s["stage"] for s in stages if s["stage"] != "warmup"] == ["import", "load", "known_answer"]
    warmup = [s for s in stages if s["stage"] == "warmup"]
    assert [s["done"] for s in warmup] == list(range(warmup[0]["total"]))


def test_a_listener_that_fails_does_no_harm() -> None:
    def fail(_: dict[str, Any]) -> None:
        raise KeyError("stage")

    async def main() -> None:
        async with engine() as link:
            await link.load("m", file(), dtype="float64", backend="auto", progress=fail)
            await link.evaluate("m", [block(1)], USUAL)

    run(main)


def test_models_for_a_temperature_are_warmed_up_with_one() -> None:
    async def main() -> None:
        async with engine() as link:
            info = await link.load("t", file(temperature=True), dtype="float64", backend="auto")
            assert info["model"]["temperature"] is True

    run(main)


def test_loads_that_fail_leave_the_old_model_serving(tmp_path: Path) -> None:
    structures = block(4, 6)

    async def main() -> None:
        async with engine(file()) as link:

            async def load(path: str, backend: str = "auto") -> None:
                await link.load("toy", path, dtype="float64", backend=backend)

            with pytest.raises(ModelFileError) as bad:
                await load(file(load_error="file"))
            assert (bad.value.line, bad.value.reason) == (3, "found cutoff, wanted zbl")
            missing = tmp_path / "missing.txt"
            with pytest.raises(ModelFileError, match=r"missing\.txt: No such file") as absent:
                await load(str(missing))
            assert absent.value.path == missing
            with pytest.raises(ModelError, match="no such backend"):
                await load(file(load_error="model"))
            with pytest.raises(ModelError, match="no backend 'fast'"):
                await load(file(), "fast")
            with pytest.raises(ModelError, match="RuntimeError: the toy does not load"):
                await load(file(load_error="raise"))
            with pytest.raises(ModelError, match="an isolated atom: the model gave a force of nan for atom 1"):
                await load(file(elements=["Si"], faults={"Si": "nan"}))
            with pytest.raises(ModelError, match="small crystal: not enough memory for its 8 atoms"):
                await load(file(memory=4))
            found = await link.evaluate("toy", [structures], USUAL)
            assert_same_bits(found.predictions, directly(structures, ORDER))

    run(main)


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        pytest.param("no.such.module:load", "ModuleNotFoundError", id="module"),
        pytest.param("json:no_such_name", "AttributeError", id="name"),
        pytest.param("/no/such/file.py:load", "No such file", id="file"),
        pytest.param("load", "cannot be used", id="spelling"),
    ],
)
def test_a_loader_that_is_not_there(loader: str, text: str) -> None:
    async def main() -> None:
        async with engine(loader=loader) as link:
            with pytest.raises(ModelError, match=text):
                await link.load("m", file(), dtype="float64", backend="auto")
            assert link.state == "ready"

    run(main)


def test_a_model_is_replaced_when_the_new_one_is_ready() -> None:
    structures = Structures.pack([structure(4, 0, ["Si", "Ge"])])

    async def main() -> None:
        async with engine(file(faults={"Ge": "refuse"})) as link:
            assert (await link.evaluate("toy", [structures], USUAL)).predictions.errors
            loading = asyncio.create_task(
                link.load("toy", file(load_seconds=0.2, tile=8, seconds=0.01), dtype="float64", backend="auto")
            )
            codes = []
            while not loading.done():
                found = (await link.evaluate("toy", [structures], USUAL)).predictions
                codes.append(bool(found.errors))
            await loading
            assert not (await link.evaluate("toy", [structures], USUAL)).predictions.errors
            # Evaluations passed between the steps of the warm-up, with the old model.
            assert codes.count(True) > 3
            assert codes == sorted(codes, reverse=True)

    run(main)


def test_unloaded_and_unknown_models() -> None:
    async def main() -> None:
        async with engine(file()) as link:
            await link.unload("toy")
            for call in (
                lambda: link.evaluate("toy", [block(1)], USUAL),
                lambda: link.probe("toy"),
                lambda: link.unload("toy"),
            ):
                with pytest.raises(ModelError, match="model 'toy' is not loaded"):
                    await call()
            assert (await link.ping())["models"] == {}

    run(main)


def test_an_unknown_property_is_refused() -> None:
    async def main() -> None:
        async with engine(file()) as link:
            with pytest.raises(ModelError, match="unknown properties: charge"):
                await link.evaluate("toy", [block(1)], frozenset({"energy", "charge"}))

    run(main)


def test_a_model_that_changes_its_mind_is_found_out() -> None:
    async def main() -> None:
        async with engine(file(drift=0.1)) as link:
            await link.probe("toy")
            for _ in range(20):
                await link.evaluate("toy", [block(1)], USUAL)
            with pytest.raises(ProbeError, match="energy of the known structure is off"):
                await link.probe("toy")

    run(main)


def test_nothing_piles_up_over_many_evaluations() -> None:
    blocks = [block(3), cloud(2000), cloud(20_000), cloud(60_000)]

    async def main() -> None:
        async with engine(file(nothing=1)) as link:
            assert link.pid is not None

            async def rounds(n: int) -> tuple[int, int]:
                for i in range(n):
                    await asyncio.gather(
                        *(link.evaluate("toy", [blocks[(i + k) % 4]], frozenset({"energy", "forces"})) for k in (0, 1))
                    )
                gc.collect()
                return len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{link.pid}/fd"))

            first = await rounds(12)
            assert await rounds(100) == first

    run(main)


def test_links_leave_nothing_behind() -> None:
    async def main() -> None:
        async with engine(file(nothing=1)) as link:
            await link.evaluate("toy", [cloud(60_000)], frozenset({"energy", "forces"}))

    run(main)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run(main)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert psutil.Process().children() == []


def test_threads_and_environment_reach_the_engine() -> None:
    async def main() -> None:
        async with engine(threads=3, environment={"SPECIAL": "yes"}) as link:
            found = psutil.Process(link.pid).environ()
            assert found["SPECIAL"] == "yes"
            assert found["OMP_NUM_THREADS"] == found["MKL_NUM_THREADS"] == "3"
            assert found["OMP_WAIT_POLICY"] == "PASSIVE"

    run(main)


def test_the_front_and_the_toys_engine_import_no_torch() -> None:
    code = (
        "import sys, nepserve.engine.link, nepserve.engine.process;"
        "assert not {'torch', 'fastapi', 'pydantic', 'ase'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_link_lives_once() -> None:
    async def main() -> None:
        link = EngineLink(device="cpu", loader=TOY)
        with pytest.raises(EngineDown, match="is starting"):
            await link.ping()
        assert await link.stop(1.0) == 0
        async with engine() as link:
            with pytest.raises(RuntimeError, match="starts once"):
                await link.start()

    run(main)
