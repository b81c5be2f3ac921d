"""What a real device says when it has no memory left, or is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engines import USUAL, assert_same_bits, block, directly, engine, file, run, structure
from nepcore.structures import Structures
from nepserve.engine import EngineDown
from nepserve.engine.process import EXIT_DEVICE_LOST

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or HIP device")]

ORDER = ("energy", "forces", "stress")

LOADER = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("nepserve_toy", {str(Path(__file__).parents[1] / "toy.py")!r})
toy = sys.modules["nepserve_toy"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(toy)
import torch

class Calculator(toy.ToyCalculator):
    def run(self, structures, properties):
        x = torch.as_tensor(structures.positions, device=self.device)
        numbers = set(structures.numbers.tolist())
        if 32 in numbers and len(structures) > 1:      # Ge: too much for a batch, not for a structure
            torch.empty(2 * torch.cuda.mem_get_info()[1], dtype=torch.uint8, device=self.device)
        if 6 in numbers:                               # C: an index out of range
            x[torch.tensor([10**6], device=self.device)].sum().item()
        if 8 in numbers:                               # O: any other mistake
            x @ torch.zeros(7, 7, device=self.device, dtype=x.dtype)
        assert torch.isfinite(x.sum()).item()
        return (yield from super().run(structures, properties))

def load(path, *, device, dtype, backend):
    made = toy.load(path, device=device, dtype=dtype, backend=backend)
    return Calculator(made.options, "cuda:0", dtype)
"""


@pytest.fixture
def loader(tmp_path: Path) -> str:
    path = tmp_path / "on_gpu.py"
    path.write_text(LOADER)
    return f"{path}:load"


def test_out_of_memory_on_a_device(loader: str) -> None:
    structures = Structures.pack([structure(3 + i, i, ["Ge", "Si"] if i == 5 else ["Si"]) for i in range(8)])

    async def main() -> None:
        async with engine(file(elements=["Si"]), loader=loader, device="cuda") as link:
            found = await link.evaluate("toy", [structures], USUAL)
            assert found.predictions.errors == {}
            assert found.splits >= 1
            assert_same_bits(found.predictions, directly(structures, ORDER))
            state = await link.ping()
            assert state["models"]["toy"]["limit_atoms"] > 1
            assert 0 < state["memory"]["device_free"] <= state["memory"]["device_total"]
            assert "name" in link.hardware

    run(main)


def test_a_mistake_on_a_device_is_no_loss_of_it(loader: str) -> None:
    structures = Structures.pack([structure(3), structure(3, 1, ["O"]), structure(4, 2)])

    async def main() -> None:
        async with engine(file(elements=["Si"]), loader=loader, device="cuda") as link:
            found = await link.evaluate("toy", [structures], USUAL)
            assert {i: e.code for i, e in found.predictions.errors.items()} == {1: "internal"}
            assert_same_bits(found.predictions, directly(structures, ORDER), [0, 2])

    run(main)


def test_a_lost_device_ends_the_engine_and_the_next_one_works(loader: str) -> None:
    poison = Structures.pack([structure(3, 0, ["C"])])

    async def main() -> None:
        async with engine(file(elements=["Si"]), loader=loader, device="cuda") as link:
            calls = [link.evaluate("toy", [poison], USUAL), link.evaluate("toy", [block(4)], USUAL)]
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, EngineDown)
                assert "the device is lost" in error.reason
            await link.exited.wait()
            assert link.exit is not None
            assert link.exit.code == EXIT_DEVICE_LOST
        async with engine(file(elements=["Si"]), loader=loader, device="cuda") as link:
            found = await link.evaluate("toy", [block(4)], USUAL)
            assert_same_bits(found.predictions, directly(block(4), ORDER))
            await link.probe("toy")

    run(main)
