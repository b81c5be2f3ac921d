"""Reference values of the shared fixtures, as packed structures and arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from locations import MODELS, REFERENCES
from nepcore import Structure, Structures

if TYPE_CHECKING:
    from pathlib import Path

REFUSED = ("charge", "qnep", "dipole", "vdw", "tnep", "polarizability")
"""Fixtures of kinds that are not potentials of this program."""


def names() -> list[str]:
    """Names of the fixture models that are supported; empty where the fixtures are not at hand."""
    if not MODELS.is_dir():
        return []
    return sorted(p.stem for p in MODELS.glob("*.txt") if not any(word in p.stem for word in REFUSED))


@dataclass(frozen=True)
class Reference:
    """One fixture model with its structures and float64 results."""

    path: Path
    structures: Structures
    labels: list[str]
    results: list[dict[str, np.ndarray]]


def load(name: str) -> Reference:
    """The fixture of that name."""
    data = np.load(REFERENCES / f"{name}.npz")
    labels = [str(n) for n in data["names"]]
    items, results = [], []
    for label in labels:
        temperature = float(data[f"{label}/temperature"]) if f"{label}/temperature" in data else None
        items.append(
            Structure.make(
                [str(s) for s in data[f"{label}/symbols"]],
                data[f"{label}/positions"],
                data[f"{label}/cell"],
                data[f"{label}/pbc"],
                temperature,
            )
        )
        keys = ("energy", "energies", "forces", "virials", "stress", "descriptors")
        found = {key: data[f"{label}/{key}"] for key in keys if f"{label}/{key}" in data}
        if "virials" in found:
            found["virials"] = found["virials"].reshape(-1, 3, 3)
        results.append(found)
    return Reference(MODELS / f"{name}.txt", Structures.pack(items), labels, results)


def compare(predictions: object, reference: Reference, dtype: str) -> list[str]:
    """Deviations beyond the bounds of the dtype, as lines that say where; empty if all is well.

    float64: 1e-10 × max(1, max|ref|). float32: 1e-5 per atom for the energy, 1e-4 for forces and stress, 2e-5 for
    site energies, each scaled with the largest reference value above 1.
    """
    bounds32 = {"energies": 2e-5, "forces": 1e-4, "stress": 1e-4, "virials": 1e-4, "descriptors": 1e-4}
    lines = []
    for i, (label, wanted) in enumerate(zip(reference.labels, reference.results, strict=True)):
        view = predictions.view(i)  # type: ignore[attr-defined]
        n = int(reference.structures.counts[i])
        for key, value in wanted.items():
            found = np.asarray(view[key], dtype=np.float64)
            assert found.shape == value.shape, (label, key, found.shape, value.shape)
            if not value.size:
                continue
            scale = max(1.0, float(np.abs(value).max()))
            bound = 1e-10 if dtype == "float64" else bounds32.get(key, 0.0)
            if dtype == "float32" and key == "energy":
                bound, scale = 1e-5 * n, max(1.0, abs(float(value)) / n)
            error = float(np.abs(found - value).max())
            if not error <= bound * scale:
                lines.append(f"{label} {key}: off by {error:.3g}, allowed {bound * scale:.3g}")
        if "stress" not in wanted:
            assert "stress" in view.unavailable, label
    return lines
