"""Small model files as texts."""

from __future__ import annotations

from nepcore.files import nep_txt
from nepcore.synthetic import make_model

SMALL = {"cutoff": (5.0, 4.0), "n_max": (2, 1), "basis_size": (3, 2), "l_max": 2, "hidden": (3,)}


def text_of(*elements: str, **changes: object) -> str:
    """A model of random numbers, of silicon if no element is named; ``changes`` are arguments of ``make_model``."""
    return nep_txt.dumps(make_model(elements or ("Si",), **{**SMALL, **changes}))


SI = text_of("Si")
TWO = text_of("Te", "Pb")
FLEXIBLE = text_of("Al", "Cu", "O", zbl="flexible")
