"""The table of ``nepserve tune``, and what stays of it."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

import nepcore
from nepcore import synthetic
from nepcore.backends import candidates, measure
from nepcore.files import nep_txt
from nepserve import tune

if TYPE_CHECKING:
    from pathlib import Path


def test_table_and_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEPSERVE_CACHE_DIR", str(tmp_path / "cache"))
    model = synthetic.make_model(("Si",), n_max=(1, 1), basis_size=(2, 2), l_max=1, switches=(), hidden=(3,), seed=1)
    path = tmp_path / "nep.txt"
    nep_txt.write(model, path)
    absent = candidates.Candidate("absent", lambda *_: pytest.fail("it is not fit"), lambda *_: "it is Sunday")
    among = (candidates.get("density"), candidates.get("loop"), absent)
    monkeypatch.setattr(candidates, "every", lambda: among)
    short = measure.representative(model, "cpu")[:1]
    monkeypatch.setattr(measure, "representative", lambda *_: short)
    said: list[str] = []
    text = tune.tune(path, device="cpu", say=said.append)
    assert said[0] == "measuring on cpu, as long as it takes; Ctrl-C ends it and keeps what was measured"
    assert said[1] == "[1/3] reference values"
    lines = text.splitlines()
    assert lines[0].split() == ["backend", "batch", "ms", "µs/atom", "peak", "MiB", "error/allowed", "verdict"]
    assert [line.split()[0] for line in lines[1:4]] == ["density", "loop", "absent"]
    assert sum("chosen for small and large structures" in line for line in lines) == 1
    assert lines[3].split(None, 1)[1] == "not here: it is Sunday"
    assert lines[-1].startswith("chosen: ")
    assert nepcore.load(path, device="cpu").choice["how"] == "cached"


def test_nothing_could_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "nep.txt"
    nep_txt.write(synthetic.make_model(("Si",), seed=1), path)
    monkeypatch.setattr(measure, "representative", lambda *_: [])
    loop = candidates.get("loop")
    monkeypatch.setattr(candidates, "every", lambda: (loop,))
    with pytest.raises(nepcore.ModelError, match="no backend was measured"):
        tune.tune(path, device="cpu")


def test_ctrl_c_prints_what_was_measured_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEPSERVE_CACHE_DIR", str(tmp_path / "cache"))
    model = synthetic.make_model(("Si",), n_max=(1, 1), basis_size=(2, 2), l_max=1, switches=(), hidden=(3,), seed=1)
    path = tmp_path / "nep.txt"
    nep_txt.write(model, path)

    def interrupted(*_: object) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60.0)
        pytest.fail("the signal did not come")

    slow = candidates.Candidate("slow to compile", interrupted, rank=1)  # type: ignore[arg-type]
    among = (candidates.get("density"), slow, dataclasses.replace(candidates.get("loop"), rank=2))
    monkeypatch.setattr(candidates, "every", lambda: among)
    short = measure.representative(model, "cpu")[:1]
    monkeypatch.setattr(measure, "representative", lambda *_: short)
    lines = tune.tune(path, device="cpu").splitlines()
    assert "chosen for small and large structures" in lines[1]
    assert lines[2].endswith("stopped by an interrupt")
    assert lines[3].endswith("not tried: stopped by an interrupt")
    assert lines[-1].startswith("stopped by an interrupt; chosen: density for small")
    assert nepcore.load(path, device="cpu").backend == "density"
