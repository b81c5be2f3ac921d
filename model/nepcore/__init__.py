"""What a NEP (neuroevolution potential) is: its files, its physics, and the fastest ways to evaluate it.

    >>> import nepcore
    >>> calculator = nepcore.load("nep.txt")
    >>> result = calculator.evaluate([atoms], properties=["energy", "forces"])
    >>> result["energy"]

Importing this package does not import torch; :func:`load` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import InputFileError, ModelError, ModelFileError, NepError, StructureError
from .structures import Prediction, Predictions, Structure, Structures

if TYPE_CHECKING:
    from pathlib import Path

    from .calculator import Calculator

__version__ = "0.1.0"


def load(
    path: str | Path,
    *,
    device: str = "auto",
    dtype: str = "float32",
    backend: str = "auto",
    memory: float | None = None,
) -> Calculator:
    """Load a trained model and make it ready to evaluate.

    Args:
        path: A ``nep.txt`` file.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``, ``cuda:1`` ...
        dtype: ``float32`` or ``float64``: the arithmetic of descriptors, networks and forces. Differences of
            positions and sums of energies are float64 always.
        backend: ``auto``, or the name of one backend, for tests and bug reports.
        memory: Bytes that an evaluation may use for its intermediate arrays; left out, a share of what is free.

    Raises:
        ModelFileError: The file is not a model this program can evaluate.
        ModelError: No such device, dtype or backend.
    """
    from .calculator import Calculator

    return Calculator.load(path, device=device, dtype=dtype, backend=backend, memory=memory)


__all__ = [
    "InputFileError",
    "ModelError",
    "ModelFileError",
    "NepError",
    "Prediction",
    "Predictions",
    "Structure",
    "StructureError",
    "Structures",
    "__version__",
    "load",
]
