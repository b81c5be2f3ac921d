"""The extended XYZ form: frames in, the same frames with results out. Model and properties come by query string."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nepcore.errors import InputFileError
from nepcore.files import xyz
from nepcore.structures import Predictions

from . import arrays
from .request import Request, WireError, check_query, choose_model, choose_properties

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .outcome import Outcome
    from .request import Limits


def decode(body: bytes, *, limits: Limits, query: Mapping[str, str]) -> Request:
    """Read a request; a body of one frame is one structure.

    Raises:
        WireError: ``bad_xyz`` naming frame, line, column and token: a file is taken whole or not at all.
            ``too_many_structures``, ``too_large``.
    """
    check_query(query)
    model, properties = choose_model(None, query), choose_properties(None, query)
    try:
        frames = xyz.parse(body, "the body", max_frames=limits.max_structures, max_atoms=limits.max_atoms)
    except xyz.TooManyError as error:
        if error.frames > limits.max_structures:
            raise arrays.too_many_structures(error.frames, limits, more=True) from None
        raise arrays.too_many_atoms(error.atoms, limits, more=True) from None
    except InputFileError as error:
        raise WireError(None, "bad_xyz", str(error), structure=error.frame, line=error.line) from None
    block = frames.structures
    return Request(
        "xyz",
        model,
        properties,
        block,
        single=len(block) == 1,
        pbc_assumed=np.ones(len(block), bool),
        frames=frames,
    )


def encode(outcome: Outcome) -> bytes:
    """The frames with their results; one that failed has none, and an item ``error`` in its comment line."""
    stress = outcome.values.get("stress")
    known = np.zeros(len(outcome), bool) if stress is None else np.isfinite(stress).all(axis=1)
    predictions = Predictions(outcome.counts, outcome.values, known, outcome.errors)
    return xyz.dumps(outcome.structures, predictions, outcome.frames)
