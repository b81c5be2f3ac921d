"""Make a trained model the one that comes with the package, with its errors on frames that it has not seen.

python bundle.py finished/nep_best.txt test.xyz
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np

from nepcore import bundled
from nepcore.files import nep_txt, xyz
from nepcore.training import outputs

UNITS = {"energy": "eV/atom", "force": "eV/Å", "virial": "eV/atom"}


def main(model: Path, test: Path) -> None:
    """Copy the model into the package, and write what is known of it beside it."""
    frames = xyz.read(test)
    found = outputs.evaluate(nep_txt.read(model), frames, "test", device="cpu", dtype="float64")
    kinds = {}
    for kind in sorted(set(frames.config_type)):
        mine = np.array([name == kind for name in frames.config_type])
        atoms = np.repeat(mine, frames.structures.counts)
        kinds[kind] = {
            "frames": int(mine.sum()),
            "energy_rmse": rmse(found.energy[mine]),
            "force_rmse": rmse(found.forces[atoms]),
        }
    about = {
        "purpose": "A demonstration: it shows how models are served. It is no better than EMT, and not for research.",
        "origin": "nepserve train on frames of examples/emt, labelled by ASE's EMT calculator",
        "reference": "EMT as in ASE: K. W. Jacobsen, P. Stoltze, J. K. Nørskov, Surf. Sci. 366, 394 (1996)",
        "test_frames": len(frames),
        "errors": {
            name: {"unit": UNITS[name], "rmse": round(e["rmse"], 5), "mae": round(e["mae"], 5)}
            for name, e in found.errors().items()
        },
        "kinds": kinds,
    }
    data = Path(bundled.__file__).parent / "data"
    data.mkdir(exist_ok=True)
    shutil.copy(model, data / f"{bundled.NAME}.txt")
    text = json.dumps(about, indent=2, ensure_ascii=False) + "\n"
    (data / f"{bundled.NAME}.json").write_text(text, encoding="utf-8")
    print(text)


def rmse(both: np.ndarray) -> float:
    """Root mean square of prediction less reference."""
    return round(float(np.sqrt(np.mean((both[..., 0] - both[..., 1]) ** 2))), 5)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
