"""A loader for engines of server tests: reads a real model file, and computes with the toy of ``toy.py``.

Options of the toy come as JSON from the variable ``STAND_IN``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from nepcore.files import nep_txt

_spec = importlib.util.spec_from_file_location("nepserve_toy", Path(__file__).parent / "nepserve" / "toy.py")
assert _spec is not None
assert _spec.loader is not None
toy = importlib.util.module_from_spec(_spec)
sys.modules["nepserve_toy"] = toy
_spec.loader.exec_module(toy)


def load(path: str, *, device: str = "auto", dtype: str = "float32", backend: str = "auto") -> Any:
    """A toy with the elements and the cutoff of a model file."""
    file = nep_txt.read(path)
    options = json.loads(os.environ.get("STAND_IN", "{}"))
    # Elements with a fault are kept out of the engine's own warm-up.
    sound = [symbol for symbol in file.elements if symbol not in options.get("faults", {})]
    options = {"elements": sound, "cutoff": file.cutoff, "temperature": file.temperature, **options}
    return toy.load(json.dumps(options), device=device, dtype=dtype, backend=backend)
