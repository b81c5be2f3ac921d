"""Blocks on a GPU, captured once for each size as a graph and replayed: a thousand launches become one.

Rows are padded to a few sizes, so that a few graphs serve every batch. All graphs share one pool of memory; its size
is bounded, and what does not fit is evaluated operation by operation.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .rows import Results, Rows, Tables

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from .pairwise import Block

logger = logging.getLogger("nepcore")

SMALLEST = 16
SMALL = 8192
LARGEST = 131072
"""Rows of the smallest block that is captured, of the largest with coarse steps between sizes, and of the largest."""

SLOT_BYTES = 400.0
"""What a capture of a large block keeps for each slot in float32, about."""

SEEN = 2
"""A size is captured when it occurs for this time: one that never comes again is not worth it."""

MOST_GRAPHS = 64

MOST_BYTES = 4e9
"""Memory that all captures may take; a share of what a backend has for its arrays where that is less."""


def bucket(n: int) -> int:
    """Rows that a block of ``n`` gets: 16, 24, 32, 48, 64, 96 ... up to :data:`SMALL`, then in steps of a sixteenth."""
    if n > LARGEST:
        return n
    if n > SMALL:
        step = 1 << (n - 1).bit_length() - 5
        return -(-n // step) * step
    size = SMALLEST
    while size < n:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size


Key = tuple[int, ...]


class Ledger:
    """Which sizes are captured, and whether there is room for more.

    Args:
        most_bytes: Bound on the memory of all captures.
    """

    def __init__(self, most_bytes: float) -> None:
        self.most_bytes = most_bytes
        self.bytes = 0
        self.graphs = 0
        self._seen: Counter[Key] = Counter()

    def wants(self, key: Key, size: float = 0.0) -> bool:
        """Note that a size, of about ``size`` bytes if it is large, occurred; says whether it is to be captured now."""
        if len(self._seen) > 10_000:
            self._seen.clear()
        self._seen[key] += 1
        return self._seen[key] >= SEEN and self.graphs < MOST_GRAPHS and self.bytes + size < self.most_bytes

    def captured(self, size: int) -> None:
        """Note a capture that took ``size`` bytes."""
        self.graphs += 1
        self.bytes += max(0, size)


@dataclass(frozen=True, eq=False)
class _Captured:
    graph: Any
    tables: Tables  # kept, as the graph reads them where they are
    rows: Rows
    results: Results


class GraphBlock:
    """A block whose sizes are replayed when they come again; see :class:`nepcore.backends.pairwise.Block`.

    Args:
        inner: What evaluates a block; it must not wait for the device.
        memory: Bytes for intermediate arrays, of which captures may keep a quarter.
    """

    def __init__(self, inner: Block, memory: float) -> None:
        self.inner = inner
        self.ledger = Ledger(min(MOST_BYTES, 0.25 * memory))
        self._captured: dict[Key, _Captured] = {}
        self._pool: Any = None
        self._side: Any = None
        self._broken = ""

    @property
    def fault(self) -> str:
        """Why it does less than it should; empty while nothing went wrong."""
        return self._broken or str(getattr(self.inner, "fault", ""))

    def types(self, present: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """See :class:`nepcore.backends.pairwise.Block`."""
        return self.inner.types(present, count)

    def rows(self, n: int) -> int:
        """See :class:`nepcore.backends.pairwise.Block`."""
        return self.inner.rows(bucket(n))

    def __call__(self, tables: Tables, rows: Rows) -> Results:
        """See :class:`nepcore.backends.pairwise.Block`."""
        key = (id(tables), *rows.r_radial.shape, rows.r_angular.shape[1])
        found = self._captured.get(key)
        if found is None:
            if self._broken or len(rows.types) > LARGEST or not self.ledger.wants(key, _size(tables, rows)):
                return self.inner(tables, rows)
            try:
                found = self._captured[key] = self._capture(tables, rows)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self._broken = str(error).strip().splitlines()[0]
                logger.warning("blocks cannot be captured as graphs: %s", self._broken)
                return self.inner(tables, rows)
        for ours, theirs in zip(found.rows, rows, strict=True):
            ours.copy_(theirs)
        found.graph.replay()
        return found.results

    def _capture(self, tables: Tables, rows: Rows) -> _Captured:
        device = rows.types.device
        before = torch.cuda.memory_reserved(device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        static = Rows(*(_own(tensor) for tensor in rows))
        # Libraries set themselves up at their first call, which must not be part of a capture.
        if self._side is None:
            self._side = torch.cuda.Stream(device)  # always the same one: memory is kept for each stream
        side = self._side
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self.inner(tables, static)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results = self.inner(tables, static)
        if fault := getattr(self.inner, "fault", ""):
            raise RuntimeError(fault)
        self.ledger.captured(torch.cuda.memory_reserved(device) - before)
        return _Captured(graph, tables, static, results)

    def report(self) -> dict[str, Any]:
        """Graphs held and bytes they take, JSON-able."""
        return {"graphs": self.ledger.graphs, "bytes": self.ledger.bytes, "most_bytes": int(self.ledger.most_bytes)}


def _size(tables: Tables, rows: Rows) -> float:
    """Bytes that a capture keeps, about; 0 for a small block."""
    if len(rows.types) <= SMALL:
        return 0.0
    slots = rows.r_radial.numel() + rows.r_angular.numel()
    k, T = tables.c_angular.shape[1:3]
    by_type = 2.0 * k * (T - 1) * rows.r_angular.numel()  # basis functions set apart by type
    return (SLOT_BYTES * slots + 4.0 * by_type) * rows.r_radial.element_size() / 4.0


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)
