"""Every kernel of the physics compiles ahead of time for the GPUs that are to be served."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TARGETS = ("cuda:80:32", "cuda:90:32", "hip:gfx90a:64", "hip:gfx942:64", "hip:gfx1100:32")


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile(target: str) -> None:
    """In a process of its own: here the kernels may belong to the interpreter."""
    script = Path(__file__).parents[2] / "fused_compile.py"
    environment = {"TRITON_INTERPRET": "0", "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script), target], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = done.stdout.split()
    assert len(set(compiled)) == 13
