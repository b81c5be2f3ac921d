"""Extended XYZ out: results and labels as ASE and our own reader take them, numbers that come back exactly.

Per frame: ``energy`` and ``free_energy`` (eV), ``stress`` (nine numbers, eV/Å³, tension positive; only with three
periodic directions), ``virial`` (nine numbers, W = −∂E/∂ε, eV). Per atom: ``forces`` (eV/Å), ``energies`` (eV),
``virials`` (nine numbers, row by row, eV), ``descriptors``.
"""

from __future__ import annotations

import gzip
import io
import re
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

import numpy as np

from nepcore.elements import MAX_NUMBER, SYMBOLS

from .xyz_comment import Column, Fault, header, items

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from nepcore.structures import Predictions, Structures

    from .xyz_frames import Frames

_SYMBOL = [SYMBOLS[z] if z <= MAX_NUMBER else SYMBOLS[0] for z in range(256)]

_STRUCTURE = frozenset({"lattice", "pbc", "properties", "temperature"})
_RESULTS = frozenset({"energy", "free_energy", "stress", "virial", "error"})
_LABELS = frozenset({"energy", "stress", "virial"})
_RESULT_COLUMNS = frozenset({"force", "forces", "energies", "virials", "descriptors", "stresses"})

_PLAIN = re.compile(r"[\w:.+-]+")
_FROM_VOIGT = np.array([0, 5, 4, 5, 1, 3, 4, 3, 2])


def write(
    target: str | Path | BinaryIO | TextIO,
    structures: Structures,
    predictions: Predictions | None = None,
    frames: Frames | None = None,
) -> None:
    """Write structures with their results; see :func:`dumps`. A name that ends in ``.gz`` is packed.

    Raises:
        OSError: The file cannot be written.
        ValueError: The arguments are not of the same structures.
    """
    content = dumps(structures, predictions, frames)
    if isinstance(target, (str, Path)):
        path = Path(target)
        path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    elif isinstance(target, io.TextIOBase):
        target.write(content.decode("utf-8", "replace"))
    else:
        target.write(content)  # type: ignore[arg-type]


def dumps(
    structures: Structures,
    predictions: Predictions | None = None,
    frames: Frames | None = None,
    *,
    number_frames: bool = False,
) -> bytes:
    """Structures as extended XYZ.

    Args:
        structures: What is written.
        predictions: Their results. A structure that failed is written without results and with an item ``error``.
        frames: Where the structures were read: other items of the comment lines and other columns are written, too.
            With ``predictions`` its labels are not (nobody could tell one from the other), without they are.
        number_frames: Write an item ``source_frame``: the frame's number in the file it was read from, from 0.

    Raises:
        ValueError: The arguments are not of the same structures.
    """
    for other in (
        None if predictions is None else predictions.counts,
        None if frames is None else frames.structures.counts,
    ):
        if other is not None and not np.array_equal(other, structures.counts):
            raise ValueError("structures, predictions and frames must be of the same structures")
    per_atom = _atom_columns(predictions, frames)
    symbols = [_SYMBOL[z] for z in structures.numbers.tolist()]
    positions = structures.positions.T.tolist()
    out: list[str] = []
    offsets = structures.offsets.tolist()
    for i in range(len(structures)):
        a, b = offsets[i], offsets[i + 1]
        results = per_atom if _has_atom_values(i, predictions, frames) else []
        kept, tokens = _kept_columns(i, predictions, frames)
        properties = "species:S:1:pos:R:3"
        template = "%s %r %r %r"
        columns: list[Sequence[Any]] = [symbols[a:b], *[axis[a:b] for axis in positions]]
        for column, texts in zip(kept, tokens, strict=True):
            properties += f":{column.name}:{column.kind}:{column.count}"
            template += " %s" * column.count
            columns += texts
        for name, form, values in results:
            properties += f":{name}:R:{len(values)}"
            template += f" {form}" * len(values)
            columns += [axis[a:b] for axis in values]
        comment = _comment(i, structures, predictions, frames, properties, number_frames)
        out.append(f"{b - a}\n{comment}\n")
        out.extend(map((template + "\n").__mod__, zip(*columns, strict=True)))
    return "".join(out).encode("utf-8", "surrogateescape")


def _atom_columns(predictions: Predictions | None, frames: Frames | None) -> list[tuple[str, str, list[list[float]]]]:
    """Name, format and values (one list a column) of what stands behind the positions."""
    found: list[tuple[str, NDArray[Any]]] = []
    if predictions is not None:
        found = [
            (k, predictions.values[k])
            for k in ("forces", "energies", "virials", "descriptors")
            if k in predictions.values
        ]
    elif frames is not None:
        found = [("forces", frames.forces)]
    # Nine digits bring a float32 back exactly; repr is the shortest text that brings back a float64.
    return [
        (
            name,
            "%.9g" if array.dtype == np.float32 else "%r",
            array.reshape(len(array), prod(array.shape[1:])).T.tolist(),
        )
        for name, array in found
    ]


def _has_atom_values(i: int, predictions: Predictions | None, frames: Frames | None) -> bool:
    if predictions is not None:
        return i not in predictions.errors
    if frames is None:
        return False
    a, b = frames.structures.offsets[i : i + 2]
    return bool(np.isfinite(frames.forces[a:b]).all()) and b > a


def _kept_columns(
    i: int, predictions: Predictions | None, frames: Frames | None
) -> tuple[list[Column], list[list[list[str]]]]:
    """Columns of the file that are written again, and their tokens."""
    extras = None if frames is None else frames.extras[i]
    if frames is None or extras is None:
        return [], []
    kept: list[Column] = []
    tokens: list[list[list[str]]] = []
    at = 0
    for column in header(frames.comments[i]).layout.extras:
        if predictions is None or column.name.lower() not in _RESULT_COLUMNS:
            kept.append(column)
            tokens.append(
                [
                    [t.decode("utf-8", "surrogateescape") for t in extras[:, k].tolist()]
                    for k in range(at, at + column.count)
                ]
            )
        at += column.count
    return kept, tokens


def _comment(
    i: int,
    structures: Structures,
    predictions: Predictions | None,
    frames: Frames | None,
    properties: str,
    number_frames: bool,
) -> str:
    cell = structures.cells[i]
    parts: list[str] = []
    if cell.any():
        parts.append(f'Lattice="{_joined(cell)}"')
    parts.append(f"Properties={properties if _PLAIN.fullmatch(properties) else _escaped(properties)}")
    written = _STRUCTURE
    if predictions is not None:
        written |= _RESULTS
        parts += _results(i, predictions)
    elif frames is not None:
        written |= _LABELS
        parts += _labels(i, structures, frames)
    parts.append('pbc="{}"'.format(" ".join("T" if p else "F" for p in structures.pbc[i])))
    heat = float(structures.temperatures[i])
    if not np.isnan(heat):
        parts.append(f"temperature={heat!r}")
    if frames is not None:
        if number_frames:
            written |= {"source_frame"}
            parts.append(f"source_frame={frames.indices[i]}")
        parts += _kept_items(frames.comments[i], written)
    return " ".join(parts)


def _results(i: int, predictions: Predictions) -> list[str]:
    if i in predictions.errors:
        return [f"error={_escaped(predictions.errors[i].reason)}"]
    values = predictions.values
    parts: list[str] = []
    energy = values.get("energy", values.get("free_energy"))
    if energy is not None:
        parts.append(f"energy={float(energy[i])!r} free_energy={float(energy[i])!r}")
    if "stress" in values and predictions.stress_known[i]:
        parts.append(f'stress="{_joined(values["stress"][i][_FROM_VOIGT])}"')
    if "virial" in values:
        parts.append(f'virial="{_joined(values["virial"][i])}"')
    return parts


def _labels(i: int, structures: Structures, frames: Frames) -> list[str]:
    parts: list[str] = []
    if np.isfinite(frames.energy[i]):
        parts.append(f"energy={float(frames.energy[i])!r}")
    virial = frames.virial[i]
    if np.isfinite(virial).all():
        if structures.pbc[i].all() and structures.volumes[i] > 0:
            parts.append(f'stress="{_joined(-virial / structures.volumes[i])}"')
        parts.append(f'virial="{_joined(virial)}"')
    return parts


def _joined(values: NDArray[Any]) -> str:
    return " ".join(map(repr, values.ravel().tolist()))


def _escaped(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\r", " ") + '"'


def _kept_items(comment: str, without: frozenset[str]) -> list[str]:
    """Items of a comment line that are written as they were read; free text becomes an item ``comment``."""
    try:
        found = items(comment)
    except Fault:
        found = None
    if found is None or (found and all(item.value is None for item in found)):
        return [f"comment={_escaped(comment)}"] if comment else []
    # A carriage return inside a value would end the line for other readers.
    return [item.raw.replace("\r", " ") for item in found if item.key.lower() not in without]
