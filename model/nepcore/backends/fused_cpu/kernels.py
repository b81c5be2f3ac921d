"""The compiled entry points: blocks of atoms, forces on neighbours, sums over structures.

Each of them may be called by several threads at once; they share the work through a counter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .edges import gather, up
from .gradients import site_virial
from .inner import inner
from .model import Model
from .neighbors import Found, find
from .simd import bare, fetch_add
from .site import Site, evaluate
from .words import unpack

if TYPE_CHECKING:
    from .bins import Bins
    from .model import Widths
    from .site import Present
    from .words import Doubles, Ints, Ints32, Reals


class Wanted(NamedTuple):
    """What to compute beside energies."""

    gradient: bool
    virial: bool
    virials: bool
    descriptors: bool


class Blocks(NamedTuple):
    """Pieces of work: atoms of one structure, consecutive in its bins, and where their pairs go."""

    number: int
    counter: Ints  # (2,): the block to be done next, blocks done
    structure: Ints  # (b,)
    begin: Ints  # first sorted place
    end: Ints
    start: Ints  # first pair
    room: Ints  # pairs that fit
    found: Ints  # pairs found
    crowd: Ints  # room of one atom's search that would do; 0 if it did
    first: Ints  # two atoms at one place; the second counts from 1, 0 if there are none
    second: Ints

    def done(self) -> bool:
        """Whether nothing is left, nor being worked on."""
        return bool(self.counter[1] >= self.number)


class Results(NamedTuple):
    """What comes out, by atom of the block of structures. Arrays not wanted are empty."""

    energies: Doubles  # (N,)
    own: Doubles  # (N, 3): force from the atom's own energy
    pushed: Doubles  # (N, 3): force, with the opposite sign, from its neighbours' energies
    virial: Doubles  # (N, 9): −Σ_j r_ij ⊗ ∂U_i/∂r_ij, booked on the centre
    virials: Doubles  # (N, 9): booked on the neighbour
    descriptors: Reals  # (N, D)
    pair_start: Ints  # (N,), by sorted place
    pair_count: Ints  # (N,)
    neighbor: Ints32  # (pairs,)
    gradient: Reals  # (pairs, 3)
    edge: Reals  # (pairs, 3)


@inner
def evaluate_blocks(
    arrays: Blocks, atoms: Bins, model_words: Ints, temperatures: Reals, types: Present, found_words: Ints,
    site_words: Ints, out: Results, wanted: Wanted, widths: Widths, first: bool,
) -> None:  # fmt: skip
    """Energies and edge gradients of the blocks that this call gets hold of; the ``first`` waits for the others."""
    blocks = bare(arrays)
    bins = bare(atoms)
    model = unpack(model_words, Model, temperatures)
    present = bare(types)
    found = unpack(found_words, Found, temperatures)
    site = unpack(site_words, Site, temperatures)
    results = bare(out)
    align = max(len(widths.full), len(widths.functions))
    while True:
        b = fetch_add(blocks.counter, 0, 1)
        if b >= blocks.number:
            break
        s = blocks.structure[b]
        at = blocks.start[b]
        room = blocks.room[b]
        pairs = 0
        blocks.crowd[b] = 0
        blocks.second[b] = 0
        # Atoms of one type after the other: their coefficients and weights stay in the cache.
        for t in range(present.number):
            kind = present.types[t]
            for place in range(blocks.begin[b], blocks.end[b]):
                i = np.int64(bins.order[place])
                if bins.types[i] != kind:
                    continue
                count = find(bins, s, i, model.cutoff, found, _SEARCH)
                if count > found.size:
                    blocks.crowd[b] = max(blocks.crowd[b], count)
                    pairs += count
                    continue
                if wanted.gradient and pairs + count > room:
                    pairs += count
                    continue
                stride = up(count, align)
                n, angular, coincident = gather(model, bins, i, count, found, present, site, stride, align)
                if coincident >= 0 and (blocks.second[b] == 0 or i < blocks.first[b]):
                    blocks.first[b] = i
                    blocks.second[b] = coincident + 1
                results.energies[i] = evaluate(
                    model, kind, temperatures[s], site, stride, n, angular, present, wanted.gradient, widths
                )
                if wanted.descriptors:
                    for d in range(model.dim):
                        results.descriptors[i * model.dim + d] = site.q[d] * model.scaler[d]
                if wanted.gradient:
                    x = 0.0
                    y = 0.0
                    z = 0.0
                    for j in range(n):
                        gx = site.gradient[j]
                        gy = site.gradient[stride + j]
                        gz = site.gradient[2 * stride + j]
                        x += gx
                        y += gy
                        z += gz
                        results.neighbor[at] = site.neighbor[j]
                        results.gradient[3 * at] = gx
                        results.gradient[3 * at + 1] = gy
                        results.gradient[3 * at + 2] = gz
                        if wanted.virials:
                            r = site.geo[3 * stride + j]
                            results.edge[3 * at] = site.geo[j] * r
                            results.edge[3 * at + 1] = site.geo[stride + j] * r
                            results.edge[3 * at + 2] = site.geo[2 * stride + j] * r
                        at += 1
                    results.own[3 * i] = x
                    results.own[3 * i + 1] = y
                    results.own[3 * i + 2] = z
                    results.pair_start[place] = at - n
                    results.pair_count[place] = n
                    pairs += n
                    if wanted.virial:
                        site_virial(site, stride, n, widths.full)
                        for k in range(9):
                            results.virial[9 * i + k] = site.virial[k]
        blocks.found[b] = pairs
        fetch_add(blocks.counter, 1, 1)
    if first:
        _linger(blocks.counter, blocks.number)


_SEARCH = (0,) * 16

_LINGER = 10_000
"""Looks at the others' progress before going to sleep: some hundred microseconds."""


class Targets(NamedTuple):
    """Ranges of atoms that receive forces, and the sorted places of the centres they come from."""

    number: int
    counter: Ints  # (2,): the range to be done next, ranges done
    low: Ints
    high: Ints
    begin: Ints  # first centre
    end: Ints
    whole: Ints  # 1 if no centre has neighbours outside the range

    def done(self) -> bool:
        """Whether nothing is left, nor being worked on."""
        return bool(self.counter[1] >= self.number)


@inner
def push_neighbors(arrays: Targets, out: Results, wanted: Wanted, first: bool) -> None:
    """Add what centres do to their neighbours, in the order of the centres in the bins, then of their pairs."""
    targets = bare(arrays)
    results = bare(out)
    while True:
        t = fetch_add(targets.counter, 0, 1)
        if t >= targets.number:
            break
        low = targets.low[t]
        high = targets.high[t]
        for place in range(targets.begin[t], targets.end[t]):
            p = results.pair_start[place]
            end = p + results.pair_count[place]
            if targets.whole[t] == 0:
                p = _lower_bound(results.neighbor, p, end, low)
                end = _lower_bound(results.neighbor, p, end, high)
            for q in range(p, end):
                j = 3 * np.int64(results.neighbor[q])
                gx = np.float64(results.gradient[3 * q])
                gy = np.float64(results.gradient[3 * q + 1])
                gz = np.float64(results.gradient[3 * q + 2])
                results.pushed[j] += gx
                results.pushed[j + 1] += gy
                results.pushed[j + 2] += gz
                if wanted.virials:
                    for row in range(3):
                        r = np.float64(results.edge[3 * q + row])
                        results.virials[3 * j + 3 * row] -= r * gx
                        results.virials[3 * j + 3 * row + 1] -= r * gy
                        results.virials[3 * j + 3 * row + 2] -= r * gz
        fetch_add(targets.counter, 1, 1)
    if first:
        _linger(targets.counter, targets.number)


@inner
def _linger(counter: Any, number: int) -> None:
    """Wait a little for the others: to sleep and to be woken would take longer than their last blocks."""
    for _ in range(_LINGER):
        if fetch_add(counter, 1, 0) >= number:
            break


@inner
def _lower_bound(values: Any, low: int, high: int, wanted: int) -> int:
    """First place in the ascending stretch ``low`` to ``high`` whose value is not less than ``wanted``."""
    while low < high:
        middle = (low + high) // 2
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@inner
def sum_structures(counts: Any, results: Results, wanted: Wanted, energy: Any, virial: Any, forces: Any) -> None:
    """Energies (B,), virials (B, 9) and forces (N, 3), the latter in the compute dtype."""
    i = 0
    for s in range(len(counts)):
        e = 0.0
        for k in range(9):
            virial[9 * s + k] = 0.0
        for a in range(i, i + counts[s]):
            e += results.energies[a]
            if wanted.virial:
                for k in range(9):
                    virial[9 * s + k] += results.virial[9 * a + k]
        energy[s] = e
        i += counts[s]
    if wanted.gradient:
        for k in range(3 * i):
            forces[k] = results.own[k] - results.pushed[k]
