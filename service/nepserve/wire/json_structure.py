"""One structure of a JSON request: an object with our keys, or one that another program writes."""

from __future__ import annotations

from typing import Any

import numpy as np

from nepcore.errors import StructureError

from . import lists
from .json_foreign import reader as foreign_reader
from .json_item import Item, missing
from .request import describe, unknown_reason

KEYS = ("numbers", "symbols", "positions", "cell", "pbc", "temperature")
"""Keys of a structure."""

_KEY_SET = frozenset(KEYS)


def read(value: Any) -> Item:
    """A structure in our own keys or in those of pymatgen, OPTIMADE or QCSchema.

    Raises:
        StructureError: What is wrong with it, naming key and atom.
    """
    if not isinstance(value, dict):
        raise StructureError(
            "bad_value", f"a structure must be an object with the keys {', '.join(KEYS)}, not {describe(value)}"
        )
    if not value.keys() <= _KEY_SET:
        reader = foreign_reader(value)
        if reader is None:
            key = next(key for key in value if key not in _KEY_SET)
            raise StructureError("unknown_field", unknown_reason(key, KEYS, "a structure"), field=key[:60])
        item = reader(value)
    else:
        item = _own(value)
    n, found = len(item.numbers), len(item.positions)
    if n != found:
        raise StructureError(
            "bad_shape", f"there are {n} species but positions has shape ({found}, 3); wanted ({n}, 3), one row for "
            f"each atom", field="positions",
        )  # fmt: skip
    if n == 0:
        raise StructureError("empty", "a structure needs at least one atom", field="positions")
    if item.cell is None and item.pbc is not None and any(item.pbc):
        raise StructureError(
            "singular_cell", 'pbc is true but there is no cell; give "cell" (three vectors as rows, Å), or pbc false '
            "for a molecule", field="cell",
        )  # fmt: skip
    return item


def _own(value: dict[str, Any]) -> Item:
    species = value.get("numbers"), value.get("symbols")
    if species[0] is not None and species[1] is not None:
        raise StructureError("ambiguous", "numbers and symbols are both given; wanted one of them", field="symbols")
    if species[0] is None and species[1] is None:
        raise missing(value, "numbers", "atomic numbers (or symbols)")
    if value.get("positions") is None:
        raise missing(value, "positions", "one row [x, y, z] in Å for each atom")
    cell, pbc, heat = value.get("cell"), value.get("pbc"), value.get("temperature")
    return Item(
        lists.numbers(species[0]) if species[0] is not None else lists.symbols(species[1]),
        lists.positions(value["positions"]),
        None if cell is None else lists.cell(cell),
        None if pbc is None else lists.pbc(pbc),
        np.nan if heat is None else lists.temperature(heat),
    )
