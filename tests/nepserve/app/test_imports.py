"""The front has no PyTorch: the engine is a process of its own."""

from __future__ import annotations

import subprocess
import sys


def test_the_front_imports_no_torch() -> None:
    code = (
        "import sys, nepserve.server, nepserve.app.factory, nepserve.app.connection, nepserve.supervision\n"
        "from nepserve import wire\n"
        "for name in ('json', 'msgpack', 'xyz', 'npz'):\n"
        "    wire._format(name)\n"
        "print(sorted({'torch', 'triton', 'numba', 'ase', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
