"""Threads and compiled code of the compiled CPU backend: who works, where the code is kept, what damages do."""

from __future__ import annotations

import dataclasses
import gc
import logging
import multiprocessing
import os
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("numba")

from nepcore import Structure, Structures, synthetic
from nepcore.backends import fused_cpu
from nepcore.backends.fused_cpu import FusedCPU, compiled, crew, is_compiled
from nepcore.backends.fused_cpu.kernels import DONE, FIRST, LAST, Wanted
from nepcore.backends.fused_cpu.mailbox import MAILBOX
from nepcore.backends.fused_cpu.words import words

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from numpy.typing import NDArray

    from nepcore.structures import Predictions


def crystal(cells: int) -> Structures:
    """A rattled simple cubic crystal."""
    side = np.arange(cells) * 2.7
    positions = np.stack(np.meshgrid(side, side, side), -1).reshape(-1, 3)
    positions = positions + np.random.default_rng(1).normal(0, 0.05, positions.shape)
    return Structures.pack([Structure.make(["Si"] * len(positions), positions, np.eye(3) * 2.7 * cells)])


def forces(backend: FusedCPU, structures: Structures) -> NDArray[Any]:
    out: list[Predictions] = []

    def whole() -> Generator[int, None, None]:
        out.append((yield from backend.run(structures, frozenset(("energy", "forces")))))

    assert sum(whole()) == structures.n_atoms
    return out[0]["forces"]


@pytest.fixture
def backend() -> FusedCPU:
    return FusedCPU(synthetic.make_model(("Si",), seed=1), "float32", 3)


class Hands:
    """The compiled functions, and which hand was sent to work when."""

    def __init__(self, backend: FusedCPU, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[int] = []
        self.functions = backend.functions
        self.before: Callable[[int], None] = lambda _: None
        kept = dataclasses.replace(backend._compiled, functions=SimpleNamespace(**vars(self.functions)))
        kept.functions.work = self.work
        monkeypatch.setattr(backend, "_compiled", kept)

    def work(self, mails: Any, job: Any, hand: int, *rest: Any) -> None:
        self.seen.append(hand)
        self.before(hand)
        self.functions.work(mails, job, hand, *rest)


def helpers() -> int:
    return sum(thread.name == "nepcore-cpu" for thread in threading.enumerate())


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether it becomes true within half a minute."""
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_helpers_take_part_and_end_with_their_crew(monkeypatch: pytest.MonkeyPatch) -> None:
    structures = crystal(8)
    alone = forces(FusedCPU(synthetic.make_model(("Si",), seed=1), "float32", 1), structures)
    before = helpers()
    backend = FusedCPU(synthetic.make_model(("Si",), seed=1), "float32", 3)
    backend.warm_up()
    assert helpers() == before
    hands = Hands(backend, monkeypatch)
    helped = threading.Event()
    taken = []

    def hold(hand: int) -> None:
        if hand == 0:
            # Until a helper has done it all.
            job = kept["job"]
            if eventually(lambda: job[DONE] >= job[LAST] - job[FIRST]):
                helped.set()
            taken.append(int(job[DONE]))

    kept: dict[str, Any] = {}

    class Spy(crew.Crew):
        def share(self, functions: SimpleNamespace, job: NDArray[np.int64], hands: int) -> None:
            kept.update(job=job)
            super().share(functions, job, hands)

    monkeypatch.setattr(backend.crew, "__class__", Spy)
    hands.before = hold
    np.testing.assert_array_equal(forces(backend, structures), alone)
    assert helped.is_set()
    assert taken[0] > 1
    assert helpers() == before + 2
    monkeypatch.undo()
    kept.clear()
    del backend, hands
    gc.collect()
    assert eventually(lambda: helpers() == before)


def test_small_structures_wake_nobody(monkeypatch: pytest.MonkeyPatch, backend: FusedCPU) -> None:
    before = helpers()
    forces(backend, crystal(3))
    assert helpers() == before


@pytest.mark.parametrize("late", [False, True])
def test_an_interrupt_comes_when_nobody_is_at_it(
    late: bool, monkeypatch: pytest.MonkeyPatch, backend: FusedCPU
) -> None:
    structures = crystal(8)
    wanted = forces(backend, structures)
    hands = Hands(backend, monkeypatch)

    def interrupt(hand: int) -> None:
        if hand == 0:
            raise KeyboardInterrupt

    def interrupt_later(*arguments: Any) -> None:
        hands.functions.work(*arguments)
        interrupt(arguments[2])

    if late:
        backend.functions.work = interrupt_later
    else:
        hands.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        forces(backend, structures)
    inside = [word for hand in range(2) for word in backend.crew._mails[MAILBOX * hand + 8 : MAILBOX * hand + 11 : 2]]
    assert inside == [0, 0, 0, 0]
    monkeypatch.undo()
    np.testing.assert_array_equal(forces(backend, structures), wanted)


def test_helpers_that_sleep_elsewhere(monkeypatch: pytest.MonkeyPatch, backend: FusedCPU) -> None:
    """Where there are no semaphores in memory they sleep in the interpreter."""
    structures = crystal(8)
    wanted = forces(backend, structures)
    before = helpers()
    monkeypatch.setattr(crew, "SEMAPHORES", False)
    other = FusedCPU(synthetic.make_model(("Si",), seed=1), "float32", 3)
    for _ in range(20):
        np.testing.assert_array_equal(forces(other, structures), wanted)
    assert helpers() == before + 2
    del other
    gc.collect()
    assert eventually(lambda: helpers() == before)


def _child(backend: FusedCPU, wanted: NDArray[Any]) -> None:
    same = np.array_equal(forces(backend, crystal(8)), wanted)
    os._exit(7 if same and helpers() >= 2 else 1)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_gets_a_crew_of_its_own(backend: FusedCPU) -> None:
    wanted = forces(backend, crystal(8))
    child = multiprocessing.get_context("fork").Process(target=_child, args=(backend, wanted))
    child.start()
    child.join(60)
    assert child.exitcode == 7


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({"NEPSERVE_CACHE_DIR": "/a"}, ["/a/numba"]),
        ({"NEPSERVE_CACHE_DIR": ""}, []),
        ({"XDG_CACHE_HOME": "/b"}, ["/b/nepserve/numba", "TMP"]),
        ({"XDG_CACHE_HOME": "relative"}, ["TMP"]),
        ({"HOME": "/c"}, ["/c/.cache/nepserve/numba", "TMP"]),
    ],
    ids=str,
)
def test_where_code_is_kept(
    environment: dict[str, str], wanted: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiled.config, "CACHE_DIR", "")
    monkeypatch.setattr(compiled.tempfile, "gettempdir", lambda: str(tmp_path))
    for name in ("NEPSERVE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    own = str(tmp_path / f"nepserve-{os.getuid()}" / "numba")
    assert [str(d) for d in compiled._directories()] == [own if d == "TMP" else d for d in wanted]


def test_code_of_others_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled.config, "CACHE_DIR", "")
    monkeypatch.setattr(compiled.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("NEPSERVE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    shared = tmp_path / f"nepserve-{os.getuid()}"
    shared.mkdir(mode=0o700)
    assert len(list(compiled._directories())) == 1
    shared.chmod(0o777)
    assert list(compiled._directories()) == []


def test_no_folder_can_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(compiled.config, "CACHE_DIR", str(tmp_path / "file" / "below"))
    monkeypatch.setenv("NEPSERVE_CACHE_DIR", "/somewhere")
    with caplog.at_level(logging.WARNING, "nepcore"):
        made = compiled._with_cache()
    assert made.folder is None
    assert len(caplog.records) == 1
    assert "each start compiles anew" in caplog.text


def test_whether_it_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = synthetic.make_model(("Si",), seed=1)
    backend = FusedCPU(model, "float32", 1)
    kept = compiled.Compiled(backend.functions, tmp_path)
    monkeypatch.setattr(fused_cpu.backend, "compiled", lambda: kept)
    backend._compiled = kept
    assert not is_compiled(model, "float32")
    backend.warm_up()
    assert is_compiled(model, "float32")
    assert not is_compiled(model, "float64")


@pytest.mark.parametrize("error", [OSError(28, "full"), EOFError("short"), ValueError("no")], ids=repr)
def test_a_damaged_disk_is_no_reason_not_to_start(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = FusedCPU(synthetic.make_model(("Si",), seed=1), "float32", 1)
    real = backend._compiled

    class Damaged:
        @property
        def functions(self) -> Any:
            raise error

    backend._compiled = Damaged()  # type: ignore[assignment]
    monkeypatch.setattr(fused_cpu.backend, "compiled", lambda **_: real)
    with caplog.at_level(logging.WARNING, "nepcore"):
        backend.warm_up()
    assert "each start compiles anew" in caplog.text


def test_other_faults_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FusedCPU(synthetic.make_model(("Si",), seed=1), "float32", 1)
    monkeypatch.setattr(fused_cpu.backend, "compiled", lambda **_: backend._compiled)

    def fault(_: object) -> None:
        raise RuntimeError("not the disk")

    monkeypatch.setattr(backend, "_try", fault)
    with pytest.raises(RuntimeError, match="not the disk"):
        backend.warm_up()


def test_words_are_checked() -> None:
    assert words(Wanted(True, False, True, False), "float32").tolist() == [1, 0, 1, 0]
    backend = FusedCPU(synthetic.make_model(("Si",), seed=1), "float32", 1)
    with pytest.raises(TypeError, match="squared_radial"):
        words(backend.model._replace(squared_radial=backend.model.c_radial), "float32")
    with pytest.raises(TypeError, match="inverse_radial"):
        words(backend.model, "float64")
