"""Small data sets and models for tests of the training, made by a model with random parameters: no shared data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from crystals import random_structure
from nepcore import Structures
from nepcore.calculator import Calculator
from nepcore.files.xyz import Frames
from nepcore.synthetic import make_model
from nepcore.training import Settings

if TYPE_CHECKING:
    from nepcore.files.nep_txt import NepFile

ELEMENTS = ("Si", "C")

SMALL: dict[str, Any] = {
    "cutoff": ((4.5, 3.5), (4.0, 3.0)), "n_max": (2, 2), "basis_size": (3, 3), "l_max": 3, "neuron": (4,), "batch": 3,
    "dtype": "float64", "epochs": 4,
}  # fmt: skip
"""Sizes of a model that trains in a moment."""


def settings(**changes: Any) -> Settings:
    """Settings of a small model."""
    return Settings(ELEMENTS, **(SMALL | changes))


def teacher(**changes: Any) -> NepFile:
    """The model that makes the labels."""
    sizes = {"cutoff": SMALL["cutoff"], "n_max": (2, 2), "basis_size": (3, 3), "l_max": 3, "hidden": (4,)}
    return make_model(ELEMENTS, **(sizes | changes))


def frames(
    count: int = 7, *, sizes: tuple[int, ...] = (3, 5, 8), seed: int = 0, model: NepFile | None = None
) -> Frames:
    """Frames of a few atoms with all labels, those of the teacher."""
    structures = Structures.pack([random_structure(seed + i, ELEMENTS, n=sizes[i % len(sizes)]) for i in range(count)])
    calculator = Calculator.of(model or teacher(), device="cpu", dtype="float64", backend="density")
    found = calculator.evaluate(structures, ["energy", "forces", "virial"])
    assert not found.errors
    return of(structures, found["energy"], found["forces"], found["virial"])


def of(structures: Structures, energy: np.ndarray, forces: np.ndarray, virial: np.ndarray) -> Frames:
    """Frames of structures and labels."""
    n = len(structures)
    one = np.ones(n)
    return Frames(
        structures, energy.copy(), forces.copy(), virial.copy(), one, one.copy(), ("",) * n, ("",) * n, (None,) * n,
        np.arange(n), 1 + np.concatenate([[0], np.cumsum(structures.counts + 2)])[:-1], structures.counts.copy(),
        path="made.xyz",
    )  # fmt: skip


def without(given: Frames, *, energy: object = (), forces: object = (), virial: object = ()) -> Frames:
    """The frames with labels of some of them, by number, taken away."""
    labels = {name: getattr(given, name).copy() for name in ("energy", "forces", "virial")}
    labels["energy"][list(energy)] = np.nan  # type: ignore[call-overload]
    labels["virial"][list(virial)] = np.nan  # type: ignore[call-overload]
    for i in forces:  # type: ignore[attr-defined]
        labels["forces"][given.structures.offsets[i] : given.structures.offsets[i + 1]] = np.nan
    return replace(given, **labels)
