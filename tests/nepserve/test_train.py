"""``nepserve train`` from the command line: run directories of GPUMD, faults, resuming, the split."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import trainings
from locations import SHARED, needs_shared
from nepcore.files import nep_in, nep_txt, xyz
from nepserve import cli, models

if TYPE_CHECKING:
    from pathlib import Path

NEP_IN = """type 2 Si C
cutoff 4.5 3.5
n_max 2 2
basis_size 3 3
l_max 2 0
neuron 4
epoch 3
batch 4
"""


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main([str(w) for w in words])
    return int(end.value.code or 0)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory: nep.in, train.xyz, test.xyz; the current one."""
    (tmp_path / "nep.in").write_text(NEP_IN)
    frames = trainings.frames(12)
    xyz.write(tmp_path / "train.xyz", frames.structures, frames=_readable(frames))
    xyz.write(tmp_path / "test.xyz", frames.structures.slice(0, 3), frames=_readable(frames.select(range(3))))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _readable(frames: xyz.Frames) -> xyz.Frames:
    """The frames as a file would have them, with forces in the atom lines."""
    parts = []
    s = frames.structures
    for k, (a, b) in enumerate(zip(s.offsets[:-1].tolist(), s.offsets[1:].tolist(), strict=True)):
        cell, virial = (" ".join(map(repr, m.ravel().tolist())) for m in (s.cells[k], frames.virial[k]))
        pbc = " ".join("T" if p else "F" for p in s.pbc[k])
        parts.append(f'{b - a}\nLattice="{cell}" pbc="{pbc}" Properties=species:S:1:pos:R:3:forces:R:3 '
                     f'energy={float(frames.energy[k])!r} virial="{virial}" config_type=made')  # fmt: skip
        for symbol, row in zip(s.view(k).symbols, np.hstack([s.positions[a:b], frames.forces[a:b]]), strict=True):
            parts.append(f"{symbol} " + " ".join(map(repr, row.tolist())))
    return xyz.parse("\n".join(parts) + "\n")


def test_a_run_directory_trains_as_it_is(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", ".", "-o", "out", "--device", "cpu") == 0
    out = place / "out"
    names = {p.name for p in out.iterdir()}
    assert {f"{q}_{k}.out" for q in ("energy", "force", "virial", "stress") for k in ("train", "test")} <= names
    assert {"nep_best.txt", "nep_final.txt", "loss.out", "progress.jsonl", "report.html", "run.json"} <= names
    assert not any(name.endswith(".partial") for name in names)
    assert np.loadtxt(out / "loss.out").shape == (3, 10)
    said = capsys.readouterr().err
    for wanted in ("frames             12", "epoch 1/3", "epoch 3/3", "best model, test frames, RMSE: E "):
        assert wanted in said
    facts = json.loads((out / "run.json").read_text())
    assert facts["finished"]
    assert facts["errors"]["test"]["energy"]["labels"] == 3
    # What the server would take.
    assert models.locate(out) == out / "nep_best.txt"
    assert nep_txt.read(out / "nep_best.txt").elements == ("Si", "C")


def test_the_order_of_the_rows_is_that_of_the_file(place: Path) -> None:
    assert run("train", "-o", "out", "-q", "--device", "cpu") == 0
    frames = xyz.read(place / "train.xyz")
    found = np.loadtxt(place / "out" / "energy_train.out")[:, 1]
    np.testing.assert_allclose(found, frames.energy / frames.structures.counts, rtol=1e-5)


def test_resumed_is_uninterrupted(place: Path) -> None:
    words = ("--device", "cpu", "--dtype", "float64", "-q", "--run-seed", 4)
    assert run("train", "-o", "whole", *words, "--epochs", 6) == 0
    assert run("train", "-o", "half", *words, "--epochs", 3) == 0
    assert run("train", "-o", "half", *words, "--epochs", 6, "--resume") == 0
    whole, half = ((place / name / "loss.out").read_text() for name in ("whole", "half"))
    assert np.loadtxt(place / "half" / "loss.out")[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert whole == half
    assert (place / "whole/nep_final.txt").read_bytes() == (place / "half/nep_final.txt").read_bytes()


def test_a_folder_that_holds_a_run_is_not_overwritten(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("train", "-o", "out", "--device", "cpu", "-q")
    assert run(*words, "--resume") == 2
    assert "no checkpoint to resume from" in capsys.readouterr().err
    assert run(*words) == 0
    assert run(*words) == 2
    assert "--resume goes on with it, --overwrite begins anew" in capsys.readouterr().err
    assert run(*words, "--overwrite") == 0
    assert len((place / "out/loss.out").read_text().splitlines()) == 3


def test_the_split_can_be_given_to_gpumd(place: Path) -> None:
    (place / "test.xyz").unlink()
    assert run("train", "-o", "out", "--device", "cpu", "-q", "--valid-ratio", 0.25, "--run-seed", 5) == 0
    assert run("export-split", "out", "-o", "for-gpumd") == 0
    whole = xyz.read(place / "train.xyz")
    train, test = (xyz.read(place / "for-gpumd" / f"{name}.xyz") for name in ("train", "test"))
    assert (len(train), len(test)) == (9, 3)
    facts = json.loads((place / "out/run.json").read_text())
    np.testing.assert_array_equal(train.energy, whole.energy[facts["train_frames"]])
    np.testing.assert_array_equal(test.forces, whole.select(facts["valid_frames"]).forces)
    np.testing.assert_array_equal(test.virial, whole.virial[facts["valid_frames"]])
    kept = nep_in.read(place / "for-gpumd/nep.in")
    assert "epoch" not in kept
    assert kept.elements == ("Si", "C")
    assert run("export-split", "nowhere", "-o", "x") == 2
    assert run("export-split", "out", "-o", ".") == 2


def test_fine_tuning_from_a_model(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nep_txt.write(trainings.teacher(), place / "start.txt")
    assert run("train", "-o", "out", "--device", "cpu", "--fine-tune", "start.txt", "--epochs", 1) == 0
    best = nep_txt.read(place / "out/nep_best.txt")
    assert best.l_max == trainings.teacher().l_max
    assert json.loads((place / "out/run.json").read_text())["errors"]["train"]["force"]["rmse"] < 1.0
    assert "epoch 1/1" in capsys.readouterr().err


FAULTS: dict[str, tuple[str, str, str]] = {
    "keyword": ("nep.in", NEP_IN + "lamda_e 1\n", "nep.in, line 9: unknown keyword 'lamda_e'; did you mean lambda_e?"),
    "element": ("nep.in", NEP_IN.replace("type 2 Si C", "type 1 Si"), "element C is not in the model, which knows: Si"),
    "no frames": ("train.xyz", "", "train.xyz: there are no frames to train on"),
    "not a frame": ("train.xyz", "hello\n", "train.xyz, frame 1, line 1"),
}


@pytest.mark.parametrize(("name", "content", "said"), FAULTS.values(), ids=FAULTS)
def test_faults_end_before_anything_is_written(
    place: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, said: str
) -> None:
    (place / name).write_text(content)
    assert run("train", "-o", "out", "--device", "cpu", "-q") == 2
    assert said in capsys.readouterr().err
    assert not (place / "out").exists()


def test_bad_frames_are_left_out_and_counted(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (place / "train.xyz").read_text().splitlines()
    lines[3] = lines[3].replace(lines[3].split()[1], "nan", 1)
    (place / "train.xyz").write_text("\n".join(lines) + "\n")
    assert run("train", "-o", "out", "--device", "cpu") == 2
    assert "train.xyz, frame 1, line 4" in capsys.readouterr().err
    assert run("train", "-o", "out", "--device", "cpu", "--skip-bad") == 0
    said = capsys.readouterr().err
    assert "11 (1 left out)" in said
    assert "left out: train.xyz, frame 1, line 4" in said


def test_what_is_proposed_is_printed_and_trains(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--init", "train.xyz") == 0
    text = capsys.readouterr().out
    (place / "nep.in").write_text(text)
    assert run("train", "-o", "out", "--epochs", 2, "--device", "cpu", "-q") == 0


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_saves_and_ends(place: Path, how: signal.Signals) -> None:
    command = [sys.executable, "-m", "nepserve", "train", "-o", "out", "--epochs", "100000", "--device", "cpu"]
    with subprocess.Popen(command, cwd=place, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("epoch 1/"):
                break
        process.send_signal(how)
        rest = process.stderr.read()
    assert process.returncode == 130, rest
    assert "stopped after epoch" in rest
    assert "Traceback" not in rest
    assert (place / "out/checkpoint.pt").is_file()
    done = int(np.atleast_2d(np.loadtxt(place / "out/loss.out"))[-1, 0])
    command[command.index("100000")] = str(done + 2)
    again = subprocess.run([*command, "--resume"], cwd=place, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert "going on from" in again.stderr
    epochs = np.loadtxt(place / "out/loss.out")[:, 0]
    assert (np.diff(epochs) == 1).all()


def test_several_processes_make_one_run(place: Path) -> None:
    """As `torchrun` starts them; one of them writes, and the numbers are those of one process."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    words = ["train", "--device", "cpu", "--dtype", "float64", "-q", "--run-seed", "1"]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "nepserve", *words, "-o", "two"],
            cwd=place,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=200)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    assert "best model" in told[0]
    assert "best model" not in told[1]
    assert run(*words, "-o", "one") == 0
    one, two = (np.loadtxt(place / name / "loss.out") for name in ("one", "two"))
    np.testing.assert_allclose(two, one, rtol=1e-5)
    assert (place / "two/report.html").is_file()


CASES = SHARED / "cases"


def case(place: Path, number: str, name: str = "train.xyz", **more: Any) -> int:
    (place / "nep.in").write_text(NEP_IN.replace("type 2 Si C", "type 1 Si"))
    (place / "test.xyz").unlink(missing_ok=True)
    return run(
        "train", "--train", CASES / f"case-{number}" / name, "-o", "out", "--device", "cpu", *more.get("also", ())
    )


@needs_shared
def test_large_absolute_energies(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert case(place, "082") == 0
    both = np.loadtxt(place / "out/energy_train.out")
    assert json.loads((place / "out/run.json").read_text())["element_offsets"]["Si"] == pytest.approx(
        -2000.03, abs=0.05
    )
    assert abs(both[:, 0] - both[:, 1]).max() < 1.0
    assert "offset of that size is taken off exactly" in capsys.readouterr().err
    references = xyz.read(CASES / "case-082/train.xyz")
    np.testing.assert_allclose(np.diff(references.energy / 4), [0.003075, -0.00615], atol=1e-9)


@needs_shared
def test_no_virial_at_all(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert case(place, "083") == 0
    rows = [line.split() for line in (place / "out/loss.out").read_text().splitlines()]
    assert all(np.isfinite(float(value)) for row in rows for value in row[:6])
    assert {row[6] for row in rows} == {"nan"}
    frames = len(xyz.read(CASES / "case-083/train.xyz"))
    assert f"{frames} of {frames} without virial" in capsys.readouterr().err
    assert np.isfinite(nep_txt.read(place / "out/nep_best.txt").w0).all()


@needs_shared
def test_a_placeholder_is_no_label(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert case(place, "085", "placeholder-as-label.xyz") == 0
    assert "marks a missing value; the label is not used" in capsys.readouterr().err
    assert "virial" not in json.loads((place / "out/run.json").read_text())["errors"]["train"]


@needs_shared
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_frames_without_neighbours(place: Path, batch: int) -> None:
    assert case(place, "097", also=("--batch", batch, "--epochs", 1)) == 0
    assert np.isfinite(nep_txt.read(place / "out/nep_best.txt").q_scaler).all()


@needs_shared
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_precision_of_training_and_of_evaluation(place: Path, dtype: str) -> None:
    (place / "start.txt").write_bytes((CASES / "models/toy-si.nep.txt").read_bytes())
    other = "float64" if dtype == "float32" else "float32"
    (place / "labelled.xyz").write_text(
        (CASES / "case-093/input.extxyz").read_text().replace("pbc=", "energy=-0.7774317 pbc=", 1)
    )
    (place / "nep.in").write_text(NEP_IN.replace("type 2 Si C", "type 1 Si"))
    assert run("train", "--train", "labelled.xyz", "-o", "out", "--device", "cpu", "--dtype", dtype, "--fine-tune",
               "start.txt", "--epochs", 1, "-q") == 0  # fmt: skip
    assert run("predict", CASES / "case-093/input.extxyz", "-m", "out", "-o", "p.xyz", "--dtype", other, "-q") == 0
    assert xyz.read(place / "p.xyz").energy[0] == pytest.approx(-0.7774317, abs=0.05)
