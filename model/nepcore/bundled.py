"""The model that comes with the package: seven metals after ASE's EMT potential, a demonstration. Needs no torch.

It is what ``examples/emt`` makes, trained with ``nepserve train``. It shows how models are served and how good a small
one is against the potential it was trained on; it is no better than that potential, which is a rough one.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from .files import nep_txt

NAME = "demo-emt"
"""The name that it is served under."""

_DATA = files(__package__) / "data"


def content() -> bytes:
    """The bytes of its ``nep.txt``."""
    return (_DATA / f"{NAME}.txt").read_bytes()


@cache
def about() -> dict[str, Any]:
    """What is known of it, JSON-able: ``purpose``, ``origin``, ``data``, and ``errors`` on frames it has not seen."""
    return dict(json.loads((_DATA / f"{NAME}.json").read_text(encoding="utf-8")))


def model() -> nep_txt.NepFile:
    """The model."""
    return nep_txt.loads(content().decode("ascii"), f"{NAME}.txt")
