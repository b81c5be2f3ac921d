"""The engine while backends are measured: a compiler that takes long is no hang, and the table reaches the front."""

from __future__ import annotations

from typing import TYPE_CHECKING

import crystals
from engines import engine, run
from nepcore import synthetic
from nepcore.files import nep_txt
from nepcore.structures import Structures

if TYPE_CHECKING:
    from pathlib import Path

LOADER = """
import time

import nepcore
from nepcore.backends import candidates, measure

density, loop = candidates.get("density"), candidates.get("loop")


def slow(model, device, dtype, memory):
    time.sleep(2.0)  # as a compiler does: without a word
    return loop.make(model, device, dtype, memory)


among = (density, loop, candidates.Candidate("slow to compile", slow, rank=2))
candidates.every = lambda: among
batches = measure.representative
measure.representative = lambda model, device: batches(model, device)[:1]
load = nepcore.load
"""


def test_a_slow_compiler_is_no_hang(tmp_path: Path) -> None:
    model = synthetic.make_model(("Si",), n_max=(1, 1), basis_size=(2, 2), l_max=1, switches=(), hidden=(3,), seed=1)
    path, loader = tmp_path / "nep.txt", tmp_path / "loader.py"
    nep_txt.write(model, path)
    loader.write_text(LOADER)
    environment = {"NEPSERVE_CACHE_DIR": str(tmp_path / "cache"), "NEPSERVE_TUNE_SECONDS": "60"}
    said: list[str] = []

    async def main() -> None:
        async with engine(loader=f"{loader}:load", hang_seconds=0.7, environment=environment) as link:
            info = await link.load(
                "si", str(path), dtype="float64", backend="auto",
                progress=lambda step: said.append(str(step.get("what", ""))),
            )  # fmt: skip
            rows = {row["name"]: row for row in info["choice"]["rows"]}
            assert rows["slow to compile"]["prepared"] > 2.0
            assert rows["slow to compile"]["timings"]
            assert info["choice"]["how"] == "measured"
            block = Structures.pack([crystals.diamond((1, 1, 1))])
            answer = await link.evaluate("si", [block], frozenset({"energy"}))
            assert answer.predictions.errors == {}

    run(main)
    assert "slow to compile" in said
