"""A million atoms on a CPU, in bounded memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nepcore.backends import candidates

PROGRAM = """
import resource, sys
import numpy as np
sys.path.insert(0, sys.argv[2])
import crystals
from nepcore import Structures, synthetic
from nepcore.calculator import Calculator

model = synthetic.make_model(("Si",), n_max=(10, 10), switches=("q222", "q1111"), hidden=(50,), seed=1)
calculator = Calculator.of(model, device="cpu", backend=sys.argv[1])
unit = calculator.evaluate(crystals.diamond(rattle=0.0))
large = Structures.pack([crystals.diamond((50, 50, 50), rattle=0.0)])
result = calculator.evaluate(large)
assert large.n_atoms == 1_000_000
assert abs(result["energy"][0] / 1e6 - unit["energy"][0] / 8) < 1e-5
assert np.abs(result["forces"]).max() < 1e-3
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", ["loop", candidates.FUSED_CPU])
def test_a_million_atoms_within_8_gb(backend: str, request: pytest.FixtureRequest) -> None:
    tests = str(request.config.rootpath / "tests")
    out = subprocess.run([sys.executable, "-c", PROGRAM, backend, tests], check=True, capture_output=True, text=True)
    assert int(out.stdout) < 8e9
