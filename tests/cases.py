"""The public fault reports beside the checkout: their files and the values that their ``expected.md`` state."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

import numpy as np

from locations import CASES

if TYPE_CHECKING:
    from pathlib import Path

TOY_SI = CASES / "models" / "toy-si.nep.txt"
TOY_NACL = CASES / "models" / "toy-nacl-zbl.nep.txt"

SI2 = -0.77743170
"""Energy of the two-atom silicon cell with the toy model, eV."""

PER_ATOM = {"float64": (1e-6, 1e-6, 1e-6), "float32": (2e-5, 2e-4, 2e-4)}
"""Tolerances that the cases state: energy (eV/atom), forces (eV/Å), virial (eV/atom)."""


def file(case: int, name: str) -> Path:
    """A file of a case."""
    return CASES / f"case-{case:03d}" / name


@functools.cache
def expected(case: int) -> str:
    """What a case expects, as text."""
    return file(case, "expected.md").read_text()


def energy(text: str) -> float:
    """The energy row of the text, eV."""
    found = re.search(r"^\| energy \| (\S+) eV", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def forces(text: str) -> np.ndarray:
    """The table of forces, (n, 3) eV/Å."""
    rows = re.findall(r"^ +\d+ +(-?\d+\.\d+) +(-?\d+\.\d+) +(-?\d+\.\d+)$", text, re.MULTILINE)
    return np.array(rows, dtype=float)


def six(tensor: np.ndarray) -> np.ndarray:
    """Components of a symmetric tensor (3, 3) in the order of the rows: xx yy zz yz xz xy."""
    return tensor[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]


def virial(text: str) -> np.ndarray:
    """The virial row, xx yy zz yz xz xy, eV."""
    found = re.search(r"virial W[^|]*\|([^|]*)\|", text)
    assert found is not None
    return np.array(found[1].split(), dtype=float)
