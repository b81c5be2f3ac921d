"""What is in training data, looked at before anything is trained on it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from nepcore.elements import symbol_of
from nepcore.errors import InputFileError
from nepcore.files import xyz

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from nepcore.files.xyz import Frames

REACH = 8.0
"""Distances are looked at up to here, Å."""

SAMPLE = 4_000
"""Atoms whose neighbours are counted; shortest distances are looked for among all."""

NEAR = 2.5
"""Beyond the sample, distances are looked for up to here, Å."""

LARGE_FORCE = 100.0
"""Forces above this are reported, eV/Å: often a calculation that did not converge, or atoms on top of each other."""

LARGE_ENERGY = 100.0
"""Energies per atom beyond this are those of an absolute scale, eV."""

CLOSE = 0.5
"""Shorter distances are reported, Å."""


@dataclass(frozen=True, eq=False)
class Survey:
    """What was found in a file of frames.

    Attributes:
        path: The file.
        frames: Frames that can be trained on; ``skipped`` could not be read and were left out.
        atoms: Atoms in all.
        sizes: Atoms of the smallest, the median and the largest frame.
        types: Atoms of each element, by symbol, and frames that have it.
        energy: Smallest, mean and largest energy, eV/atom; None without any.
        largest_force: eV/Å, with the frame it is in (from 0); None without any.
        without: Frames that lack ``energy``, ``forces``, ``virial``.
        shortest: Shortest distance of two atoms, Å, None if none is within :data:`REACH`; ``shortest_frame`` its frame.
        neighbors: Mean number of neighbours within 0, 0.1, 0.2 … :data:`REACH` Å, of a sample.
        duplicates: Pairs of frames (from 0) with the same atoms at the same places: a later one and the first.
        groups: Frames of each ``config_type``.
        warnings: What looks wrong, naming frames.
    """

    path: str
    frames: int
    atoms: int
    sizes: tuple[int, int, int]
    types: dict[str, tuple[int, int]]
    energy: tuple[float, float, float] | None
    largest_force: tuple[float, int] | None
    without: dict[str, int]
    shortest: float | None
    shortest_frame: int
    neighbors: NDArray[np.float64]
    duplicates: tuple[tuple[int, int], ...]
    groups: dict[str, int]
    skipped: tuple[InputFileError, ...] = ()
    warnings: tuple[str, ...] = field(default=())

    @property
    def elements(self) -> tuple[str, ...]:
        """Symbols by falling number of atoms."""
        return tuple(sorted(self.types, key=lambda s: -self.types[s][0]))

    def within(self, radius: float) -> float:
        """Mean number of neighbours within a radius, Å."""
        return float(self.neighbors[min(round(10 * radius), len(self.neighbors) - 1)])

    def rows(self) -> list[tuple[str, str]]:
        """The table: a name and what was found, for people."""
        small, median, large = self.sizes
        rows = [("frames", f"{self.frames:,}" + (f" ({len(self.skipped)} left out)" if self.skipped else ""))]
        rows.append(("atoms", f"{self.atoms:,}; {small} to {large} a frame, median {median}"))
        rows.append(("types", ", ".join(f"{s} {n:,}" for s, (n, _) in self.types.items())))
        if self.energy is None:
            rows.append(("energy", "none"))
        else:
            low, mean, high = self.energy
            rows.append(("energy", f"{low:.4f} to {high:.4f} eV/atom, mean {mean:.4f}"))
        if self.largest_force is None:
            rows.append(("forces", "none"))
        else:
            size, frame = self.largest_force
            rows.append(("largest force", f"{size:.3g} eV/Å (frame {frame + 1})"))
        lacking = [f"{n} of {self.frames} without {name}" for name, n in self.without.items() if n]
        rows.append(("labels", ", ".join(lacking) or "energy, forces and virial in every frame"))
        if self.shortest is not None:
            rows.append(("shortest distance", f"{self.shortest:.3f} Å (frame {self.shortest_frame + 1})"))
        rows.append(("duplicates", str(len(self.duplicates)) if self.duplicates else "none"))
        if self.groups:
            most = sorted(self.groups.items(), key=lambda item: -item[1])[:8]
            rest = f" and {len(self.groups) - 8} more" if len(self.groups) > 8 else ""
            rows.append(("config types", ", ".join(f"{name} {n}" for name, n in most) + rest))
        return rows


def read(path: str | Path, *, skip_bad: bool = False) -> tuple[Frames, tuple[InputFileError, ...]]:
    """Read frames to train on; those that cannot be read are left out with ``skip_bad``, and named.

    Raises:
        InputFileError: A frame that cannot be read, without ``skip_bad``; or there are none.
    """
    frames = xyz.read(path, skip_bad=skip_bad)
    skipped = tuple(frames.errors[k] for k in sorted(frames.errors))
    if skipped:
        frames = frames.select([k for k in range(len(frames)) if k not in frames.errors])
    if not len(frames):
        raise InputFileError(path, None, None, "there are no frames to train on")
    return frames, skipped


def check(frames: Frames) -> None:
    """Refuse labels that contradict each other: a virial that is not −V times the stress beside it.

    Raises:
        InputFileError: Naming file and frame.
    """
    for text in frames.warnings:
        if "virial and -V stress differ" in text:
            where, _, reason = text.partition(": ")
            line = where.rpartition("line ")[2]
            frame = where.partition("frame ")[2].partition(",")[0]
            wanted = "one of them is wrong; training needs labels that agree (--allow-disagreement uses the virial)"
            raise InputFileError(frames.path, int(frame) - 1, int(line), f"{reason}; {wanted}")


def look(frames: Frames, skipped: tuple[InputFileError, ...] = ()) -> Survey:
    """Look through frames; structures that no model could take are left to the trainer to refuse."""
    s = frames.structures
    counts = s.counts
    system = np.repeat(np.arange(len(frames)), counts)
    types = {}
    for number in np.unique(s.numbers).tolist():
        mine = s.numbers == number
        types[symbol_of(number)] = (int(mine.sum()), len(np.unique(system[mine])))
    per_atom = frames.energy / np.maximum(counts, 1)
    known = per_atom[np.isfinite(per_atom)]
    sizes = np.linalg.norm(frames.forces, axis=1)
    has_forces = np.isfinite(sizes)
    largest = None
    if has_forces.any():
        at = int(np.nanargmax(sizes))
        largest = (float(sizes[at]), int(system[at]))
    lacking = np.bincount(system[~has_forces], minlength=len(frames)) > 0
    shortest, where, neighbors = _distances(frames)
    duplicates, contradicting = _duplicates(frames)
    groups = Counter(name for name in frames.config_type if name)
    ordered = np.sort(counts)
    found = Survey(
        frames.path, len(frames), int(counts.sum()),
        (int(ordered[0]), int(ordered[len(ordered) // 2]), int(ordered[-1])),
        types, (float(known.min()), float(known.mean()), float(known.max())) if len(known) else None, largest,
        {"energy": int(np.isnan(frames.energy).sum()), "forces": int(lacking.sum()),
         "virial": int(np.isnan(frames.virial).any(axis=(1, 2)).sum())},
        shortest, where, neighbors, duplicates, dict(groups), skipped,
    )  # fmt: skip
    return _with_warnings(found, frames, contradicting)


def _with_warnings(found: Survey, frames: Frames, contradicting: list[tuple[int, int]]) -> Survey:
    from dataclasses import replace

    def name(index: int) -> str:
        return f"frame {int(frames.indices[index]) + 1} (line {int(frames.lines[index])})"

    lines = list(frames.warnings[:20])
    if len(frames.warnings) > 20:
        lines.append(f"{len(frames.warnings) - 20} more warnings of this kind")
    if found.largest_force is not None and found.largest_force[0] > LARGE_FORCE:
        lines.append(f"{name(found.largest_force[1])}: a force of {found.largest_force[0]:.0f} eV/Å")
    if found.shortest is not None and found.shortest < CLOSE:
        lines.append(f"{name(found.shortest_frame)}: two atoms {found.shortest:.3f} Å apart")
    if found.energy is not None and max(-found.energy[0], found.energy[2]) > LARGE_ENERGY:
        lines.append(
            f"energies of {found.energy[1]:.1f} eV/atom: an offset of that size is taken off exactly and kept in the "
            "model, but GPUMD computes with single precision, which resolves "
            f"{np.spacing(np.float32(abs(found.energy[1]))):.1g} eV there; shift the energies if that is too coarse"
        )
    for later, first in contradicting[:5]:
        lines.append(f"{name(later)} is {name(first)} again, with other labels")
    open_ = ~frames.structures.pbc.all(axis=1)
    if open_.any():
        lines.append(
            f"{int(open_.sum())} frames are not periodic in all directions; GPUMD would take them as if they were"
        )
    return replace(found, warnings=tuple(lines))


def _distances(frames: Frames) -> tuple[float | None, int, NDArray[np.float64]]:
    """Shortest distance, its frame, and mean numbers of neighbours by radius."""
    import torch

    from nepcore.batch import Batch
    from nepcore.neighbors import Bins

    s = frames.structures
    types = np.zeros(256, np.int64)
    edges = np.linspace(0.0, REACH, round(10 * REACH) + 1)
    counted = np.zeros(len(edges) - 1)
    atoms = 0
    shortest, where = np.inf, 0
    # Large sets: the sample is spread over the file, since frames of a kind stand together.
    order = np.random.default_rng(0).permutation(len(frames))
    first = 0
    while first < len(order):
        reach = REACH if atoms < SAMPLE else NEAR
        last = first + 1
        while last < len(order) and s.counts[order[first : last + 1]].sum() <= 2000:
            last += 1
        chosen = np.sort(order[first:last])
        part = s.select(chosen)
        first = last
        usable = np.isfinite(part.positions).all() and np.isfinite(part.cells).all()
        if not usable or not part.n_atoms:
            continue
        batch = Batch.of(part, types, torch.device("cpu"))
        for pairs in Bins.of(batch, reach).pairs(2_000_000):
            r = pairs.distance.numpy()
            if not len(r):
                continue
            k = int(r.argmin())
            if r[k] < shortest:
                shortest = float(r[k])
                where = int(chosen[int(batch.structure[pairs.start + int(pairs.i[k])])])
            if reach == REACH:
                counted += np.histogram(r, edges)[0]
        atoms += part.n_atoms if reach == REACH else 0
    mean = np.concatenate([[0.0], np.cumsum(counted)]) / max(atoms, 1)
    return (shortest if np.isfinite(shortest) else None), where, mean


def _duplicates(frames: Frames) -> tuple[tuple[tuple[int, int], ...], list[tuple[int, int]]]:
    """Frames that are a former one again, and those of them whose labels differ."""
    s = frames.structures
    seen: dict[bytes, int] = {}
    found, contradicting = [], []
    for k, (a, b) in enumerate(zip(s.offsets[:-1].tolist(), s.offsets[1:].tolist(), strict=True)):
        key = b"".join(
            (s.numbers[a:b].tobytes(), np.round(s.positions[a:b], 6).tobytes(), np.round(s.cells[k], 6).tobytes())
        )
        first = seen.setdefault(key, k)
        if first != k:
            found.append((k, first))
            if abs(frames.energy[k] - frames.energy[first]) > 1e-3 * max(1, b - a):
                contradicting.append((k, first))
    return tuple(found), contradicting
