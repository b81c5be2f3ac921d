"""Two processes on one machine: the same steps as one process, and nothing that waits for ever."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainings
from nepcore.training import Training

HERE = Path(__file__).resolve()
TESTS = HERE.parents[2]


def made(case: str) -> dict[str, Any]:
    """Settings and frames of a case."""
    changes: dict[str, Any] = {"epochs": 4, "batch": 4, "neuron": (4,)}
    frames = trainings.frames(11)
    if case == "rmse":
        changes |= {"loss": "rmse", "lambda_2": 0.05}
    if case == "missing labels":
        frames = trainings.without(frames, virial=range(11), energy=range(8), forces=range(3, 11))
    if case == "fewer frames than processes":
        frames = trainings.frames(1)
    if case == "one frame a batch":
        changes["batch"] = 1
    return {"settings": trainings.settings(**changes), "train": frames, "valid": trainings.frames(3, seed=50)}


def work(case: str, directory: str) -> None:
    """What each process does."""
    training = Training(**made(case), device="cpu", directory=directory)
    vectors, records = [], []
    real = training._stepper.step

    def step(*arguments: Any) -> None:
        real(*arguments)
        if len(vectors) < 10:
            vectors.append(training._state.vector.tolist())

    training._stepper.step = step  # type: ignore[method-assign]
    for record in training.run():
        values = record.as_dict()
        records.append([values["train"], values["valid"], values["loss"], values["step"]])
    out = {"vectors": vectors, "records": records, "frames": len(training._data), "rank": training.group.rank}
    Path(directory, f"rank{training.group.rank}.json").write_text(json.dumps(out))
    training.group.leave()


def started(case: str, directory: Path, size: int) -> list[dict[str, Any]]:
    """What the processes of a case say. Another program may take the free port first: then once more."""
    for _ in range(3):
        errors = together(case, directory, size)
        if not any("EADDRINUSE" in error or "address already in use" in error.lower() for error in errors):
            break
    assert not any(errors), "\n".join(errors)
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(size)]


def together(case: str, directory: Path, size: int) -> list[str]:
    """Run the processes of a case; the last words of each that failed, else nothing."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size),
        "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, str(HERE), case, str(directory)]
    processes = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    try:
        said = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return ["" if p.returncode == 0 else error[-3000:] or "failed" for p, error in zip(processes, said, strict=True)]


@pytest.mark.parametrize("case", ["mse", "rmse", "missing labels", "fewer frames than processes", "one frame a batch"])
def test_two_processes_make_the_steps_of_one(case: str, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    work(case, str(tmp_path / "one"))
    one = json.loads((tmp_path / "one" / "rank0.json").read_text())
    (tmp_path / "two").mkdir()
    first, second = started(case, tmp_path / "two", 2)
    assert first["vectors"] == second["vectors"]
    assert len(one["vectors"]) == len(first["vectors"]) >= 4
    np.testing.assert_allclose(first["vectors"], one["vectors"], rtol=1e-6, atol=1e-9)
    assert first["frames"] + second["frames"] == one["frames"]
    if case != "one frame a batch":
        assert abs(first["frames"] - second["frames"]) <= 4
    for ours, theirs in zip(first["records"], one["records"], strict=True):
        assert ours[3] == theirs[3]
        for a, b in zip(ours[:2], theirs[:2], strict=True):
            for name, value in b.items():
                assert a[name] == (None if value is None else pytest.approx(value, rel=1e-6, abs=1e-9))
    assert (tmp_path / "two" / "nep_best.txt").exists()


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2])
