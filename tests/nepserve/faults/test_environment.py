"""Where the server is started: without a name, a home, anything it may write, or a device that can be seen."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from servers import running
from traffic import Link, blocks
from traffic import Request as Wanted

if TYPE_CHECKING:
    from pathlib import Path

REAL = {"loader": "nepcore:load", "backend": "loop", "threads": 1}


def serves(model: Path, **flags: object) -> str:
    """Start the product, let it answer once and end it; its log."""
    with running(models=[str(model)], **{"device": "cpu", **REAL, **flags}) as server:
        server.ready(300)
        outcome = Link(server).ask(Wanted.of(blocks(1)[0]))
        assert (outcome.status, outcome.fault) == (200, "")
        assert server.terminate() == 0
        assert "Traceback" not in server.log
        return server.log


@pytest.mark.parametrize(
    "home", ["file", *(pytest.param(home, marks=pytest.mark.slow) for home in (None, "/", "/nowhere"))], ids=str
)
def test_homes_that_are_none(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str | None) -> None:
    for name in ("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    if home == "file":
        (tmp_path / "file").write_text("a home that is a file cannot be written to, not even by root")
        home = str(tmp_path / "file")
    if home is not None:
        monkeypatch.setenv("HOME", home)
    serves(model)


_NAMELESS = """
import os, pwd
def nobody(*_):
    raise KeyError("getpwuid(): uid not found: 123456")
pwd.getpwuid = pwd.getpwnam = nobody
os.getuid = os.geteuid = lambda: 123456
"""


@pytest.mark.parametrize("backend", ["loop", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_user_id_without_a_name(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """As in a container that runs with a random user id: no passwd entry, no home, in the front and in the engine."""
    (tmp_path / "sitecustomize.py").write_text(_NAMELESS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    asked = "import getpass; getpass.getuser()"
    refused = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False, timeout=60)
    assert "uid not found" in refused.stderr, "the test does not do what it says"
    serves(model, backend=backend)


VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


@pytest.mark.parametrize(
    "values",
    [
        {VARIABLES[0]: "0", VARIABLES[1]: ""},
        *(
            pytest.param(values, marks=pytest.mark.slow)
            for values in ({VARIABLES[0]: "-1"}, {VARIABLES[2]: "GPU-1234"}, dict.fromkeys(VARIABLES, "1"))
        ),
    ],
    ids=str,
)
def test_a_device_that_is_hidden_is_asked_for(
    model: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, str]
) -> None:
    """One sentence that shows the variables, at the start, and never a CPU in place of what was asked for."""
    if has_gpu():
        pytest.skip("there is a GPU here")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with running(models=[str(model)], device="cuda", **REAL) as server:
        assert server.wait(60) == 2
    (line,) = [line for line in server.lines if "is not there" in line]
    assert all(f"{name}={value!r}" in line for name, value in values.items())
    assert "Traceback" not in server.log


def test_nothing_is_imported_that_wants_a_home(model: Path, tmp_path: Path) -> None:
    """No plotting library, in the front or in the engine; the front has no torch."""
    report = tmp_path / "modules"
    serves(model, report=report)
    front = set(report.read_text().split())
    assert not front & {"torch", "matplotlib", "triton", "numba"}
    asked = "import sys, nepcore; nepcore.load; import nepserve.engine.process; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True, timeout=120)
    assert not set(done.stdout.split()) & {"matplotlib", "IPython", "seaborn"}
