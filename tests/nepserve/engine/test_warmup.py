"""What a model is warmed up with."""

from __future__ import annotations

import pytest

from nepcore import synthetic
from nepserve.engine import served

pytest.importorskip("triton")

from nepcore.backends.fused.backend import SMALL


@pytest.mark.parametrize("temperature", [False, True])
def test_on_a_gpu_also_a_structure_that_is_large(temperature: bool) -> None:
    model = synthetic.make_model(("Si", "C"), temperature=temperature, seed=1)
    few, all_of_them = (served._warmup_blocks(model.admission, large=large) for large in (False, True))
    assert max(block.n_atoms for _, block, _ in few) < 200
    assert all(model.admission.problems(block) == {} for _, block, _ in all_of_them)
    added = all_of_them[len(few) :]
    assert [set(properties) for _, _, properties in added] == [{"energy", "forces", "stress"}, {"energy", "forces"}]
    for what, block, _ in added:
        assert what == "a crystal of 9,261 atoms"
        assert len(block) == 1
        assert block.n_atoms > SMALL
