"""The ``fused-cpu`` backend: everything of one atom in one pass that stays in the cache."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nepcore.elements import NUMBERS
from nepcore.structures import PROPERTIES, Structures

from . import neighbors, site
from .compiled import compiled
from .crew import Crew, cores
from .kernels import Pairs
from .model import pack, widths
from .task import Task
from .words import words

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import SimpleNamespace

    from numpy.typing import NDArray

    from nepcore.files.nep_txt import NepFile
    from nepcore.structures import Predictions

    from .kernels import Wanted
    from .neighbors import Found
    from .site import Site


_log = logging.getLogger("nepcore")


@dataclass(frozen=True, eq=False)
class Desk:
    """What one thread writes on."""

    runs: int
    found: Found
    site: Site
    found_words: NDArray[np.int64]
    site_words: NDArray[np.int64]


class FusedCPU:
    """NEP on CPU cores, compiled by numba for this machine.

    Differences of positions and sums over atoms are float64, everything between is of the compute dtype. Results do
    not depend on the number of threads, nor on what else is evaluated.

    Args:
        model: The model.
        dtype: ``float32`` or ``float64``.
        threads: Threads to use; None for all cores this process may run on.
    """

    name = "fused-cpu"

    def __init__(self, model: NepFile, dtype: str = "float32", threads: int | None = None) -> None:
        self.dtype = dtype
        self.threads = max(1, cores() if threads is None else threads)
        self.types = model.admission.types
        self._number = NUMBERS[model.elements[0]]
        self.widths = widths(model.n_max_angular + 1, dtype)
        self.model = pack(model, dtype, self.widths)
        self.model_words = words(self.model, dtype)
        self._compiled = compiled()
        self._ready = False
        self.crew = Crew(self.threads, dtype, self.widths)
        # Pieces of different runs may alternate, but not overlap: they share desks and pair arrays.
        self.lock = threading.Lock()
        self.crowd = 128
        self._desks: list[Desk] = []
        self._desk_words = np.zeros(2 * self.threads, np.int64)
        self._neighbor = np.zeros(0, np.int32)
        self._gradient: Any = np.zeros(0, dtype)
        self._edge: Any = np.zeros(0, dtype)

    def warm_up(self) -> None:
        """Compile what is not compiled yet (seconds, or well under one where the disk has it), and try it."""
        pair = Structures.from_arrays([2], [self._number, self._number], [[0.0, 0.0, 0.0], [0.0, 0.0, 2.5]],
                                      temperatures=[300.0])  # fmt: skip
        try:
            self._try(pair)
            self._compiled.remember(self.dtype, self.widths)
        except Exception as error:
            # A full disk, a file cut short: unpickling may raise anything. What is not the disk's fault comes again.
            _log.warning("compiled code on disk cannot be used (%r); each start compiles anew", error)
            self._compiled = compiled(cached=False)
            self._try(pair)
        self._ready = True

    def _try(self, structures: Structures) -> None:
        self.crew.try_out(self.functions)
        for _ in Task(self, structures, frozenset(PROPERTIES)).run():
            pass

    @property
    def functions(self) -> SimpleNamespace:
        """The compiled functions by name."""
        return self._compiled.functions

    def run(self, structures: Structures, properties: frozenset[str]) -> Generator[int, None, Predictions]:
        """Evaluate structures that the model's admission let in; see :class:`nepcore.backends.protocol.Backend`."""
        if not self._ready:
            self.warm_up()
        task = Task(self, structures, properties)
        yield from task.run()
        return task.predictions()

    def desks(self, hands: int, runs: int) -> NDArray[np.int64]:
        """Addresses of the words of desks for so many hands, two each.

        Every desk has room for ``runs`` stretches of bins and the most neighbours met so far.
        """
        for k in range(hands):
            if k == len(self._desks):
                self._desks.append(self._furnish(runs))
            elif self._desks[k].found.size < self.crowd or self._desks[k].runs < runs:
                self._desks[k] = self._furnish(max(runs, self._desks[k].runs))
            else:
                continue
            desk = self._desks[k]
            self._desk_words[2 * k] = desk.found_words.ctypes.data
            self._desk_words[2 * k + 1] = desk.site_words.ctypes.data
        return self._desk_words

    def _furnish(self, runs: int) -> Desk:
        found = neighbors.room(self.crowd, runs)
        arrays = site.room(self.model, self.widths, self.crowd, self.dtype)
        return Desk(runs, found, arrays, words(found, self.dtype), words(arrays, self.dtype))

    def pairs(self, number: int, wanted: Wanted, descriptors: NDArray[Any]) -> Pairs:
        """Room for so many pairs, beside descriptors."""
        if len(self._neighbor) < number:
            self._neighbor = np.empty(number + number // 4, np.int32)
            self._gradient = np.empty(3 * len(self._neighbor), self.dtype)
        if wanted.virials and len(self._edge) < 3 * number:
            self._edge = np.empty(3 * len(self._neighbor), self.dtype)
        return Pairs(descriptors, self._neighbor, self._gradient, self._edge)


def is_compiled(model: NepFile, dtype: str) -> bool:
    """Whether the code for models of this shape is on disk, so that the first evaluation starts at once."""
    return compiled().known(dtype, widths(model.n_max_angular + 1, dtype))
