"""Predictions beside labels in GPUMD's files: ``energy_train.out``, ``force_train.out``, ``virial_train.out`` and
``stress_train.out``.

As GPUMD's ``nep`` writes them in prediction mode: predicted columns first, then reference columns, one row a
structure (forces: one row an atom), in the order of the input. Energies and virials are per atom, eV; virials and
stresses are xx yy zz xy yz zx; the stress is +W/V in GPa, positive in compression (the opposite of ASE's sign). A
missing reference is −1e6. What could not be predicted (a structure that failed, the stress of one that is not fully
periodic) is ``nan``: every structure has its row, so row k is always structure k.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

import numpy as np

from . import durable
from .xyz_frames import GPA, MISSING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from numpy.typing import NDArray
    from typing_extensions import Self

    from nepcore.structures import Predictions, Structures

    from .xyz_frames import Frames

NAMES = ("energy_train.out", "force_train.out", "virial_train.out", "stress_train.out")
"""The files that :class:`Writer` writes, for the set ``train``."""


def names_of(kind: str) -> tuple[str, ...]:
    """Names of the four files of a set, ``train`` or ``test``."""
    return tuple(name.replace("train", kind) for name in NAMES)


PROPERTIES = ("energy", "forces", "virial")
"""The properties that they need."""

# GPUMD takes the lower triangle of a virial that is not symmetric: yx for xy, zy for yz, zx.
_SIX = (np.array([0, 1, 2, 1, 2, 2]), np.array([0, 1, 2, 0, 1, 0]))


class Writer:
    """Writes the four files as blocks of results come, and gives them their names at the end.

    Until :meth:`close` the files end in ``.partial``. As a context manager it closes on success; after an exception
    the partial files stay.

    Args:
        directory: Where the files go; made if it is not there.
        kind: ``train`` or ``test``: what the files' names say.
        kept: Bytes of each partial file that stay, in the order of the names, as :meth:`settle` told them; what is
            behind is cut off. None begins new files.

    Raises:
        OSError: The directory or the files cannot be made, or one holds fewer bytes than are to stay.
    """

    def __init__(self, directory: str | Path, kind: str = "train", kept: Sequence[int] | None = None) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.names = names_of(kind)
        self.partial = tuple(self.directory / f"{name}.partial" for name in self.names)
        self._files: list[TextIO] = []
        with ExitStack() as opened:
            for path in self.partial:
                mode: Literal["w", "r+"] = "w" if kept is None else "r+"
                self._files.append(opened.enter_context(path.open(mode, encoding="ascii", newline="\n")))
            if kept is not None:
                for file, size in zip(self._files, kept, strict=True):
                    durable.cut(file, size)
            opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def add(self, structures: Structures, predictions: Predictions, frames: Frames | None = None) -> None:
        """Write the rows of a block.

        Args:
            structures: B structures; their cells give the volumes.
            predictions: Their ``energy``, ``forces`` and ``virial``.
            frames: Their labels, if they have any.

        Raises:
            ValueError: A property is missing, or the arguments are not of the same structures.
        """
        missing = [name for name in PROPERTIES if name not in predictions.values]
        if missing:
            raise ValueError(f"predictions lack {', '.join(missing)}")
        B, N = len(structures), structures.n_atoms
        if len(predictions) != B or (frames is not None and len(frames) != B):
            raise ValueError("structures, predictions and frames must be of the same structures")
        unknown = (np.full(B, np.nan), np.full((N, 3), np.nan), np.full((B, 3, 3), np.nan))
        energy, forces, virial = unknown if frames is None else (frames.energy, frames.forces, frames.virial)
        with np.errstate(divide="ignore", invalid="ignore"):
            atoms = structures.counts.astype(np.float64)
            # A stress belongs to a crystal; what a slab or a molecule would get here is the choice of its box.
            volume = np.where(structures.pbc.all(axis=1), structures.volumes, np.nan)
            predicted_six, reference_six = _six(predictions.values["virial"]), _six(virial)
            blocks = (
                _beside(predictions.values["energy"][:, None] / atoms[:, None], energy[:, None] / atoms[:, None]),
                _beside(predictions.values["forces"], forces),
                _beside(predicted_six / atoms[:, None], reference_six / atoms[:, None]),
                _beside(predicted_six * (GPA / volume[:, None]), reference_six * (GPA / volume[:, None])),
            )
        for file, rows in zip(self._files, blocks, strict=True):
            file.write(_text(rows))

    def skip(self, atoms: int) -> None:
        """Write the rows of one structure of which nothing is known: a frame that could not be read."""
        for file, (rows, width) in zip(self._files, ((1, 1), (atoms, 3), (1, 6), (1, 6)), strict=True):
            file.write(_text(_beside(np.full((rows, width), np.nan), np.full((rows, width), np.nan))))

    def settle(self) -> list[int]:
        """Have the disk hold what was written; the sizes of the files in bytes.

        Raises:
            OSError: It cannot.
        """
        return [durable.settle(file) for file in self._files]

    def close(self) -> None:
        """Finish the files and give them their names."""
        for file in self._files:
            file.close()
        for path, name in zip(self.partial, self.names, strict=True):
            path.replace(self.directory / name)

    def abandon(self) -> None:
        """Close the files and leave them as they are, ``.partial``."""
        for file in self._files:
            # One that cannot be written to its end stays as it is.
            with suppress(OSError):
                file.close()


def _six(virial: NDArray[np.float64]) -> NDArray[np.float64]:
    """xx yy zz xy yz zx, (B, 6)."""
    return virial[:, _SIX[0], _SIX[1]]


def _beside(predicted: NDArray[np.float64], reference: NDArray[np.float64]) -> NDArray[np.float64]:
    """Predicted columns and reference columns, what is not known of the latter marked."""
    known = np.isfinite(reference).all(axis=1, keepdims=True)
    return np.concatenate([predicted.astype(np.float64), np.where(known, reference, MISSING)], axis=1)


def _text(rows: NDArray[np.float64]) -> str:
    if not rows.size:
        return ""
    template = " ".join(["%g"] * rows.shape[1]) + "\n"
    return (template * len(rows)) % tuple(rows.ravel().tolist())
