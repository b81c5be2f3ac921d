"""What a run leaves: rows of ``loss.out``, predictions beside references, the report."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

import trainings
from nepcore.training import Errors, Progress, RunDirectory, outputs, report

if TYPE_CHECKING:
    from pathlib import Path


def record(epoch: int, kind: str = "epoch", **changes: object) -> Progress:
    made = Progress(
        kind, epoch, 10, 5 * epoch, 1, 0.01, 1.0 / epoch, 0.0, 0.25, Errors(0.1, 0.2, None), Errors(0.3, None, 0.5),
        0.7, True, 100.0, 1.0, 2.0,
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def test_rows_are_those_of_gpumd() -> None:
    words = outputs.row(record(4)).split()
    assert words == ["4", "0.25", "0", "0.25", "0.1", "0.2", "nan", "0.3", "nan", "0.5"]
    assert outputs.row(record(4, valid=None)).split()[7:] == ["0", "0", "0"]


def test_a_resumed_run_has_one_column_of_epochs(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "out")
    with outputs.Journal(directory) as journal:
        for epoch in (1, 2, 3):
            journal.add(record(epoch))
    # A run that was killed: the last line is torn, and epoch 3 comes after the checkpoint.
    with directory.log.open("a") as file:
        file.write('{"epoch": 4, "lo')
    with outputs.Journal(directory, after=2) as journal:
        journal.add(record(3, "step"))
        journal.add(record(3))
        journal.add(record(4))
        journal.add(record(4, "finished"))
    assert np.loadtxt(directory.loss)[:, 0].tolist() == [1, 2, 3, 4]
    assert [r["epoch"] for r in outputs.records(directory)] == [1, 2, 3, 4]
    with outputs.Journal(directory):
        pass
    assert directory.loss.read_text() == ""


def test_rows_at_intervals_and_at_the_end(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with outputs.Journal(directory, interval=4) as journal:
        for epoch in range(1, 8):
            journal.add(record(epoch))
        journal.add(record(7, "stopped"))
    assert np.loadtxt(directory.loss)[:, 0].tolist() == [4, 7]
    assert len(outputs.records(directory)) == 7


@pytest.mark.parametrize("kind", ["train", "test"])
def test_predictions_beside_references(tmp_path: Path, kind: str) -> None:
    frames = trainings.without(trainings.frames(5), virial=[1, 2], energy=[4], forces=[0])
    found = outputs.evaluate(trainings.teacher(), frames, kind, tmp_path, device="cpu", dtype="float64")
    assert found.failed == 0
    for name, error in found.errors().items():
        assert error["rmse"] < 1e-9, name
    assert found.errors()["virial"]["labels"] == 18
    assert found.errors()["energy"]["labels"] == 4
    virial = np.loadtxt(tmp_path / f"virial_{kind}.out")
    assert virial.shape == (5, 12)
    assert (virial[[1, 2], 6:] == -1e6).all()
    assert (virial[[0, 3, 4], 6:] > -1e5).all()
    energy = np.loadtxt(tmp_path / f"energy_{kind}.out")
    np.testing.assert_allclose(energy[:4, 0], energy[:4, 1], rtol=1e-5)
    assert np.loadtxt(tmp_path / f"force_{kind}.out").shape == (frames.structures.n_atoms, 6)
    assert np.loadtxt(tmp_path / f"stress_{kind}.out").shape == (5, 12)


def test_the_report_is_one_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    directory = RunDirectory(tmp_path)
    frames = trainings.without(trainings.frames(5), virial=range(5))
    evaluated = [outputs.evaluate(trainings.teacher(), frames, "train", device="cpu")]
    records = [record(k, stage=1 + k // 3).as_dict() for k in range(1, 6)]
    tables = [("Data <1>", [("frames", "5 & more")])]
    assert report.write(directory, "A <run>", tables, records, evaluated, ["said"])
    text = directory.report.read_text()
    assert "Data &lt;1&gt;" in text
    assert "5 &amp; more" in text
    assert text.count("data:image/png;base64,") == 3
    assert "http" not in text.replace("http-equiv", "")
    assert sorted(p.name for p in (tmp_path / "figures").iterdir()) == ["errors.png", "learning.png", "parity.png"]


def test_without_matplotlib_there_are_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    directory = RunDirectory(tmp_path)
    assert not report.write(directory, "run", [("Run", [("epochs", "3")])], [record(1).as_dict()], [])
    assert "<th>epochs</th><td>3</td>" in directory.report.read_text()


def test_the_summary_is_json(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    outputs.summary(directory, {"epochs": 3})
    assert json.loads(directory.summary.read_text()) == {"epochs": 3}
