"""The ``fused`` backend: which structures go together, where they are computed, and what comes of it."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nepcore.backends.pairwise import stress_of
from nepcore.errors import ModelError
from nepcore.structures import PER_ATOM, PROPERTIES, Predictions

from . import large, small
from .branches import Branches
from .lists import Tables
from .model import prepare, unfit

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray

    from nepcore.backends.protocol import Backend
    from nepcore.errors import StructureError
    from nepcore.files.nep_txt import NepFile
    from nepcore.structures import Structures

logger = logging.getLogger("nepcore")

SMALL = 8192
"""Atoms of the largest structure in which every atom looks at every other one."""

CHUNK = 32768
"""Atoms of small structures that are evaluated at a time, while the next ones are packed."""

ALL_TYPES = 4
"""Up to this many types, the tables hold all of them, whichever occur."""

_MOST_PRESENTS = 32
_MOST_LARGE = 2
_SLOT_SHARE = 0.5
_ATOM_BYTES = 1500.0
_NEIGHBOR_BYTES = 48.0


class Fused:
    """NEP on a GPU, one chain of Triton kernels from host arrays to host arrays.

    A structure's bits depend neither on its batch nor on what was evaluated before. What the kernels cannot do (cells
    with too many images, extents of thousands of Å, structures beyond the memory) goes to a torch backend, and so does
    everything where Triton cannot compile.

    Args:
        model: The model.
        device: A GPU; a CPU only in Triton's interpreter.
        memory: Bytes for intermediate arrays.
        fallback: Makes the backend that takes what is left.

    Attributes:
        fault: Why nothing is evaluated here; empty while all is well.
    """

    name = "fused"

    def __init__(self, model: NepFile, device: torch.device, memory: float, fallback: Callable[[], Backend]) -> None:
        if reason := unfit(model):
            raise ModelError(f"the backend fused cannot be used: {reason}")
        self.device = device
        self.fault = ""
        self.file = model
        self.admission = model.admission
        self.memory = memory
        self._angular_share = float(model.cutoff_angular.max() / model.cutoff_radial.max()) ** 3
        self._make_fallback = fallback
        self._fallback: Backend | None = None
        self._models: OrderedDict[tuple[int, ...], Tables] = OrderedDict()
        self._last: tuple[bytes, Any] = (b"", None)
        self._slots: OrderedDict[tuple[Any, ...], list[small.Slot]] = OrderedDict()
        self._slot_bytes = 0
        self._corrected: dict[tuple[int, int], tuple[int, int]] = {}
        self._capacity = (-1.0, (0, 0))
        self._large: list[large.Large] = []
        self._pool: Any = None
        interpreted = device.type != "cuda"
        self.small_blocks = small.INTERPRETED if interpreted else small.Blocks()
        self.large_blocks = large.INTERPRETED if interpreted else large.Blocks()
        self.branches = Branches(device)

    @property
    def block(self) -> Fused:
        """What carries ``fault``, as in the torch backends."""
        return self

    def run(self, structures: Structures, properties: frozenset[str]) -> Generator[int, None, Predictions]:
        """Evaluate structures that the model's admission let in; see :class:`nepcore.backends.protocol.Backend`."""
        task = Task(self, structures, properties)
        if not self.fault:
            try:
                yield from task.run()
            except Exception as error:  # compilers fail in many ways, none of which is worth an answer
                if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
                    self._make_room()
                    raise
                if _is_device_error(error):
                    raise
                self.fault = _reason(error)
                logger.warning("Triton cannot be used here, the model is evaluated by torch: %s", self.fault)
                logger.debug("the whole error:", exc_info=error)
        yield from task.finish()
        return task.predictions()

    @property
    def reach(self) -> float:
        """Cutoff and skin of the lists of large structures, Å."""
        return float(self.file.cutoff_radial.max()) + large.SKIN

    @property
    def fallback(self) -> Backend:
        """The backend for what is left."""
        if self._fallback is None:
            self._fallback = self._make_fallback()
        return self._fallback

    def tensors(self, numbers: NDArray[np.uint8]) -> Tables:
        """What the kernels read of the model, for the elements of these atoms."""
        if len(numbers) <= SMALL:
            # The step of a simulation has the atoms of the one before.
            atoms = numbers.tobytes()
            if atoms != self._last[0]:
                self._last = atoms, self._tensors(numbers)
            return self._last[1]
        return self._tensors(numbers)

    def _tensors(self, numbers: NDArray[np.uint8]) -> Tables:
        count = len(self.file.elements)
        if count <= ALL_TYPES:
            present = tuple(range(count))
        else:
            occurring = np.flatnonzero(np.bincount(numbers, minlength=256))
            present = tuple(np.sort(self.admission.types[occurring]).tolist())
        found = self._models.get(present)
        if found is None:
            if len(self._models) >= _MOST_PRESENTS:
                gone, _ = self._models.popitem(last=False)
                for key in [key for key in self._slots if key[0] == gone]:
                    self._slot_bytes -= sum(slot.bytes for slot in self._slots.pop(key))
            place = np.zeros(256, np.int32)
            for at, t in enumerate(present):
                place[self.admission.types == t] = at
            found = Tables(
                prepare(self.file, present, self.device), torch.from_numpy(place).to(self.device),
                float(self.file.cutoff_radial.max()), float(self.file.cutoff_angular.max()),
            )  # fmt: skip
            self._models[present] = found
        self._models.move_to_end(present)
        return found

    def rows(self, count: int, width: tuple[int, ...]) -> NDArray[np.float32]:
        """An array for results of so many atoms: where it is large, the device writes into it."""
        if count <= SMALL or self.device.type != "cuda":
            return np.empty((count, *width), np.float32)
        pinned: NDArray[np.float32] = torch.empty((count, *width), dtype=torch.float32, pin_memory=True).numpy()
        return pinned

    def take(self, tables: Tables, size: small.Size) -> small.Slot:
        """A slot of that size that nobody uses; to be given back by :meth:`give`."""
        key = (tables.model.present, size)
        free = self._slots.get(key)
        if free:
            self._slots.move_to_end(key)
            return free.pop()
        slot = small.Slot(tables, size, self.small_blocks, self.branches)
        self._slot_bytes += slot.bytes
        while self._slot_bytes > _SLOT_SHARE * self.memory and self._slots:
            _, unused = self._slots.popitem(last=False)
            self._slot_bytes -= sum(old.bytes for old in unused)
        return slot

    def give(self, slot: small.Slot) -> None:
        """Give a slot back."""
        key = (slot.tables.model.present, slot.size)
        self._slots.setdefault(key, []).append(slot)
        self._slots.move_to_end(key)

    def launch(self, slot: small.Slot) -> None:
        """Start what a slot holds."""
        if slot.uses == 1 and self.device.type == "cuda":
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            slot.capture(self._pool)
        slot.uses += 1
        slot.launch()

    def capacity(self, expected: float) -> tuple[int, int]:
        """Slots for radial and angular neighbours, from the largest number expected by density."""
        if expected != self._capacity[0]:
            self._capacity = expected, self._guess(expected)
        return self._capacity[1]

    def _guess(self, expected: float) -> tuple[int, int]:
        guess = room(1.2 * expected + 6.0), room(1.3 * expected * self._angular_share + 6.0)
        return self._corrected.get(guess, guess)

    def correct(self, size: small.Size, most: NDArray[np.int32]) -> small.Size:
        """The size that holds the ``most`` neighbours that occurred; remembered."""
        radial = max(size.radial, room(float(most[0])))
        angular = max(size.angular, room(float(most[1])))
        for guess, found in list(self._corrected.items()):
            if found == (size.radial, size.angular):
                self._corrected[guess] = (radial, angular)
        self._corrected[size.radial, size.angular] = (radial, angular)
        self._capacity = (-1.0, (0, 0))
        return size._replace(radial=radial, angular=angular)

    def follow(self, structures: Structures) -> large.Large | None:
        """The state that a large structure follows, or a new one; None if the kernels cannot evaluate it."""
        for state in self._large:
            if state.follows(structures):
                self._large.remove(state)
                self._large.append(state)
                return state
        n, tables = structures.n_atoms, self.tensors(structures.numbers)
        if n > large.MOST_ATOMS or n * large.bytes_of(tables, self.admission.neighbors(structures)[0]) > self.memory:
            return None
        while len(self._large) >= _MOST_LARGE or (
            self._large and sum(s.bytes for s in self._large) > 0.5 * self.memory
        ):
            del self._large[0]
        state = large.Large(tables, structures, self.large_blocks, self.branches)
        self._large.append(state)
        return state

    def _make_room(self) -> None:
        """Drop all buffers that are kept, so that a smaller batch has the memory."""
        self._large.clear()
        self._slots.clear()
        self._slot_bytes = 0
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def forget(self, state: large.Large) -> None:
        """Drop a state."""
        if state in self._large:
            self._large.remove(state)


def room(count: float) -> int:
    """Slots in use: multiples of 16 to 128, from there on steps of about a quarter."""
    size = 16
    while size < count:
        size += max(16, 1 << (size.bit_length() - 3))
    return size


def atoms_of(count: int) -> int:
    """Atoms that buffers are made for: 64, 96, 128, 192, 256 ..."""
    size = 64
    while size < count:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size


def structures_of(count: int) -> int:
    """Structures that buffers are made for: 1, 4, 16 ..."""
    size = 1
    while size < count:
        size *= 4
    return size


class Task:
    """One evaluation: what was asked for, and what has come out so far."""

    def __init__(self, backend: Fused, structures: Structures, properties: frozenset[str]) -> None:
        self.backend, self.structures, self.properties = backend, structures, properties
        self.virials = bool(properties & {"stress", "virial", "virials"})
        B, N = len(structures), structures.n_atoms
        self.total = np.zeros(B)
        self.virial = np.zeros((B, 9)) if self.virials else None
        self.rows: dict[str, NDArray[np.float32]] = {}
        widths = {"energies": (), "forces": (3,), "virials": (9,), "descriptors": (backend.file.dim,)}
        for name, width in widths.items():
            if name in properties:
                self.rows[name] = backend.rows(N, width)
        self.errors: dict[int, StructureError] = {}
        self.longest = 0  # atoms of the largest structure
        self.done = np.zeros(B, bool)
        self.left = B

    def run(self) -> Generator[int, None, None]:
        """Evaluate what the kernels can."""
        counts = self.structures.counts
        if not len(counts):
            return
        self.longest = int(counts.max()) if len(counts) > 1 else self.structures.n_atoms
        if self.longest <= SMALL:
            yield from self._small(self.structures, None)
            return
        chosen = np.flatnonzero(counts <= SMALL)
        if len(chosen):
            yield from self._small(self.structures.select(chosen), chosen)
        for i in np.flatnonzero(counts > SMALL).tolist():
            yield from self._large(i)

    def _small(self, block: Structures, chosen: NDArray[np.int64] | None) -> Generator[int, None, None]:
        backend = self.backend
        tables = backend.tensors(block.numbers)
        expected = backend.admission.neighbors(block)
        start, B = 0, len(block)
        most = float(expected.max()) if B > 1 else float(expected[0])
        limit = block.n_atoms if B == 1 else self._piece(block.n_atoms, most)
        flying: deque[tuple[small.Slot, int, int]] = deque()
        offsets = block.offsets
        try:
            while start < B:
                stop, part, densest, longest = B, block, most, self.longest
                if block.n_atoms - int(offsets[start]) > limit or start:
                    stop = max(start + 1, int(np.searchsorted(offsets, offsets[start] + limit, side="right")) - 1)
                    part = block.slice(start, stop)
                    densest, longest = float(expected[start:stop].max()), int(part.counts.max())
                mr, ma = backend.capacity(densest)
                size = small.Size(
                    atoms_of(part.n_atoms), structures_of(stop - start), mr, ma, self.virials,
                    "descriptors" in self.properties, longest > small.MANY,
                )  # fmt: skip
                slot = backend.take(tables, size)
                flying.append((slot, start, stop))
                slot.fill(part)
                backend.launch(slot)
                if len(flying) > 1:
                    yield self._land(flying, block, chosen)
                start = stop
            while flying:
                yield self._land(flying, block, chosen)
        finally:
            for slot, _, _ in flying:
                slot.wait()
                backend.give(slot)

    def _piece(self, atoms: int, expected: float) -> int:
        """Atoms that are evaluated at a time."""
        backend = self.backend
        limit = min(CHUNK, int(0.1 * backend.memory / (_ATOM_BYTES + _NEIGHBOR_BYTES * backend.capacity(expected)[0])))
        # Pieces of about one length: the last one is not to wait for a large one before it.
        return min(limit, -(-atoms // max(1, -(-atoms // max(1, limit)))))

    def _land(
        self, flying: deque[tuple[small.Slot, int, int]], block: Structures, chosen: NDArray[np.int64] | None
    ) -> int:
        """Read the results of the slot that was launched first; atoms finished."""
        slot, start, stop = flying[0]
        slot.wait()
        most = slot.host_out["most"]
        if most[0] > slot.size.radial or most[1] > slot.size.angular:
            size = self.backend.correct(slot.size, most)
            self.backend.give(slot)
            flying.popleft()
            slot = self.backend.take(slot.tables, size)
            flying.appendleft((slot, start, stop))
            slot.fill(block.slice(start, stop))
            self.backend.launch(slot)
            slot.wait()
        out = slot.host_out
        S = stop - start
        first, last = int(block.offsets[start]), int(block.offsets[stop])
        n = last - first
        where: Any = slice(start, stop) if chosen is None else chosen[start:stop]
        atoms: Any = slice(first, last) if chosen is None else self._atoms(where)
        self.total[where] = out["total"][:S]
        if self.virial is not None:
            self.virial[where] = out["virial"][:S]
        for name, target in self.rows.items():
            target[atoms] = out["energy" if name == "energies" else name][:n]
        done = out["state"][:S] == 0
        self.done[where] = done
        flying.popleft()
        self.backend.give(slot)
        well = int(np.count_nonzero(done))
        self.left -= well
        return n if well == S else int(block.counts[start:stop][done].sum())

    def _atoms(self, where: NDArray[np.int64]) -> NDArray[np.int64]:
        from nepcore.structures import ragged_arange

        return ragged_arange(self.structures.offsets[where], self.structures.counts[where])

    def _large(self, i: int) -> Generator[int, None, None]:
        backend = self.backend
        one = self.structures if len(self.structures) == 1 else self.structures.slice(i, i + 1)
        state = backend.follow(one)
        if state is None:
            return
        state.put(one.positions)
        # Cell vectors of periodic directions are those of the state.
        box = state.box
        if box is None or not one.pbc.all():
            box = large.box_of(one, backend.reach)
            if box is None:
                backend.forget(state)
                return
        if not (box.same(state.box) and state.update()) and not state.update(box):
            backend.forget(state)
            return
        state.compute(large.Wanted(self.virials, "descriptors" in self.properties))
        atoms = slice(int(self.structures.offsets[i]), int(self.structures.offsets[i + 1]))
        total, well = state.get({name: target[atoms] for name, target in self.rows.items()})
        self.total[i] = total[9]
        if self.virial is not None:
            self.virial[i] = total[:9]
        self.done[i] = well
        self.left -= well
        yield one.n_atoms if well else 0

    def finish(self) -> Generator[int, None, None]:
        """Evaluate what is left by the torch backend, which also finds the words for what is wrong."""
        if not self.left:
            return
        left = np.flatnonzero(~self.done)
        rest = self.structures.select(left)
        wanted = self.properties | {"energy"} | ({"virial"} if self.virials else set())
        part = yield from self.backend.fallback.run(rest, frozenset(wanted))
        atoms = self._atoms(left)
        self.total[left] = part.values["energy"]
        if self.virial is not None:
            self.virial[left] = part.values["virial"].reshape(-1, 9)
        for name, target in self.rows.items():
            target[atoms] = part.values[name].reshape(len(atoms), *target.shape[1:])
        self.errors.update({int(left[k]): error for k, error in part.errors.items()})

    def predictions(self) -> Predictions:
        """What was asked for; rows of structures that failed are NaN."""
        structures = self.structures
        values: dict[str, NDArray[Any]] = {}
        for name in PROPERTIES:
            if name not in self.properties:
                continue
            if name in self.rows:
                values[name] = self.rows[name].reshape(-1, 3, 3) if name == "virials" else self.rows[name]
            elif name in {"energy", "free_energy"}:
                values[name] = self.total
            else:
                assert self.virial is not None
                virial = self.virial.reshape(-1, 3, 3)
                values[name] = virial if name == "virial" else stress_of(virial, structures)
        for i in self.errors:
            for name, array in values.items():
                rows = slice(structures.offsets[i], structures.offsets[i + 1]) if name in PER_ATOM else slice(i, i + 1)
                array[rows] = np.nan
        return Predictions(structures.counts, values, structures.fully_periodic, self.errors)


def _is_device_error(error: Exception) -> bool:
    return any(word in str(error) for word in ("CUDA error", "HIP error"))


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause that says something."""
    while error.__cause__ is not None and str(error.__cause__):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
