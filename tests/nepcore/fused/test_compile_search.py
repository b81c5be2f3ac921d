"""Every kernel of the search and of the sums compiles ahead of time for the GPUs that are to be served."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "hip:gfx90a", "hip:gfx942", "hip:gfx1100"])
def test_kernels_compile(target: str) -> None:
    """In a process of its own: here the kernels may belong to the interpreter."""
    script = Path(__file__).parent / "compile_search.py"
    environment = {"TRITON_INTERPRET": "0", "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script), target], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 14
