"""Threads and compiled code of the compiled CPU backend: who works, where the code is kept, what damages do."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("numba")

from nepcore import synthetic
from nepcore.backends import fused_cpu
from nepcore.backends.fused_cpu import FusedCPU, compiled, crew, is_compiled
from nepcore.backends.fused_cpu.kernels import Wanted
from nepcore.backends.fused_cpu.words import words

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def all_at_once(hands: int) -> Callable[[int], object]:
    """Work that ends only when every hand is at it."""
    barrier = threading.Barrier(hands, timeout=30)
    return lambda _: barrier.wait()


@pytest.mark.parametrize("hands", [1, 2, 5])
def test_a_crew_works_at_the_same_time(hands: int) -> None:
    team = crew.Crew(hands)
    seen: list[int] = []
    together = all_at_once(hands)
    for _ in range(3):
        seen.clear()
        team.share(lambda k: (together(k), seen.append(k)), hands)
        assert sorted(seen) == list(range(hands))


def test_a_crew_is_no_larger_than_said() -> None:
    seen: list[int] = []
    crew.Crew(2).share(seen.append, 10)
    assert set(seen) <= {0, 1}


@pytest.mark.parametrize("culprit", [0, 1])
def test_what_one_of_a_crew_raises_is_raised(culprit: int) -> None:
    team = crew.Crew(2)
    together = all_at_once(2)

    def work(k: int) -> None:
        together(k)
        if k == culprit:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        team.share(work, 2)
    team.share(all_at_once(2), 2)


def _child(team: crew.Crew) -> None:
    team.share(all_at_once(2), 2)
    os._exit(7)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_gets_a_crew_of_its_own() -> None:
    team = crew.Crew(2)
    team.share(all_at_once(2), 2)
    child = multiprocessing.get_context("fork").Process(target=_child, args=(team,))
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
