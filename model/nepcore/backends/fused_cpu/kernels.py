"""Jobs: blocks of atoms, forces on their neighbours; sums over structures.

Several threads may be at a job. They share it through counters, without the interpreter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .bins import Bins
from .edges import gather, up
from .gradients import site_virial
from .inner import inner
from .model import Model
from .neighbors import Found, find
from .signals import fetch_add, relax
from .site import Present, Site, evaluate
from .words import at_address, first_of, unpack

if TYPE_CHECKING:
    from .model import Widths
    from .words import Doubles, Ints, Ints32, Reals


class Wanted(NamedTuple):
    """What to compute beside energies."""

    gradient: bool
    virial: bool
    virials: bool
    descriptors: bool


class Blocks(NamedTuple):
    """Pieces of work: atoms of one structure, consecutive in its bins, and where their pairs go."""

    structure: Ints  # (b,)
    begin: Ints  # first sorted place
    end: Ints
    start: Ints  # first pair, counted in its piece
    room: Ints  # pairs that fit
    found: Ints  # pairs found
    crowd: Ints  # room of one atom's search that would do; 0 if it did
    first: Ints  # two atoms at one place; the second counts from 1, 0 if there are none
    second: Ints


class Targets(NamedTuple):
    """Ranges of atoms that receive forces, and the sorted places of the centres they come from."""

    low: Ints
    high: Ints
    begin: Ints  # first centre
    end: Ints
    whole: Ints  # 1 if no centre has neighbours outside the range


class Results(NamedTuple):
    """Sums over the pairs of each atom. Arrays not wanted are empty.

    What one hand writes for a block lies together, by sorted place, so that no cache line is written by two at a time.
    """

    energies: Doubles  # (N,), by sorted place
    own: Doubles  # (N, 3), by sorted place: force from the atom's own energy
    pushed: Doubles  # (N, 3), by atom: force, with the opposite sign, from its neighbours' energies
    virial: Doubles  # (N, 9), by sorted place: −Σ_j r_ij ⊗ ∂U_i/∂r_ij, booked on the centre
    virials: Doubles  # (N, 9), by atom: booked on the neighbour
    pair_start: Ints  # (N,), by sorted place
    pair_count: Ints  # (N,), by sorted place


class Pairs(NamedTuple):
    """What is noted of each pair, and descriptors. Arrays not wanted are empty."""

    descriptors: Reals  # (N, D)
    neighbor: Ints32  # (pairs,)
    gradient: Reals  # (pairs, 3)
    edge: Reals  # (pairs, 3)


NEXT, DONE, MISFITS, COINCIDENCES, NEXT_RANGE, RANGES_DONE = range(0, 48, 8)
"""Counters of a job, a cache line each: the block to be done next, blocks done, those whose pairs or neighbours did not
fit, those with atoms at one place, the range of atoms to be pushed next, ranges done."""

FIRST, LAST, RANGES, TEMPERATURES, MODEL, DESKS = range(48, 54)
"""Numbers of a job: its blocks (the last exclusive), ranges; addresses of temperatures, of the model's words, and of
the desks' words, two for each hand."""

BLOCKS, BINS, PRESENT, RESULTS, WANTED, TARGETS, PAIRS = range(64, 176, 16)
"""Where the words of the named tuples begin."""

JOB = 176
"""Words of a job."""


@inner
def attend(job: Any, hand: int, like: Any, widths: Widths) -> None:
    """Do what is left of a job together with others who do the same; ``like`` is an array of the compute dtype.

    Whoever finds nothing left looks a little while at what the others do; the one who ends the last block need not
    wait, so that somebody adds up the forces in any case.
    """
    blocks = job[LAST] - job[FIRST]
    wanted = unpack(job, WANTED, Wanted, like)
    results = unpack(job, RESULTS, Results, like)
    notes = unpack(job, PAIRS, Pairs, like)
    evaluate_blocks(job, wanted, results, notes, hand, like, widths)
    if hand == 0 or job[RANGES] > 1:
        _linger(job, DONE, blocks)
    if wanted.gradient and fetch_add(job, DONE, 0) >= blocks and fetch_add(job, MISFITS, 0) == 0:
        push_neighbors(job, wanted, results, notes, like)
        if hand == 0:
            _linger(job, RANGES_DONE, job[RANGES])


@inner
def evaluate_blocks(
    job: Any, wanted: Wanted, results: Results, notes: Pairs, hand: int, like: Any, widths: Widths
) -> None:  # fmt: skip
    """Energies and edge gradients of the blocks that this hand gets hold of."""
    blocks = unpack(job, BLOCKS, Blocks, like)
    bins = unpack(job, BINS, Bins, like)
    present = unpack(job, PRESENT, Present, like)
    model = unpack(at_address(job[MODEL], job), 0, Model, like)
    temperatures = at_address(job[TEMPERATURES], like)
    desk = at_address(job[DESKS] + 16 * hand, job)
    found = unpack(at_address(desk[0], job), 0, Found, like)
    site = unpack(at_address(desk[1], job), 0, Site, like)
    align = max(len(widths.full), len(widths.functions))
    while True:
        b = fetch_add(job, NEXT, 1)
        if b >= job[LAST]:
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
                results.energies[place] = evaluate(
                    model, kind, temperatures[s], site, stride, n, angular, present, wanted.gradient, widths
                )
                if wanted.descriptors:
                    for d in range(model.dim):
                        notes.descriptors[i * model.dim + d] = site.q[d] * model.scaler[d]
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
                        notes.neighbor[at] = site.neighbor[j]
                        notes.gradient[3 * at] = gx
                        notes.gradient[3 * at + 1] = gy
                        notes.gradient[3 * at + 2] = gz
                        if wanted.virials:
                            r = site.geo[3 * stride + j]
                            notes.edge[3 * at] = site.geo[j] * r
                            notes.edge[3 * at + 1] = site.geo[stride + j] * r
                            notes.edge[3 * at + 2] = site.geo[2 * stride + j] * r
                        at += 1
                    results.own[3 * place] = x
                    results.own[3 * place + 1] = y
                    results.own[3 * place + 2] = z
                    results.pair_start[place] = at - n
                    results.pair_count[place] = n
                    pairs += n
                    if wanted.virial:
                        site_virial(site, stride, n, widths.full)
                        for k in range(9):
                            results.virial[9 * place + k] = site.virial[k]
        blocks.found[b] = pairs
        if blocks.crowd[b] != 0 or (wanted.gradient and pairs > room):
            fetch_add(job, MISFITS, 1)
        if blocks.second[b] != 0:
            fetch_add(job, COINCIDENCES, 1)
        fetch_add(job, DONE, 1)


_SEARCH = (0,) * 16

_LINGER = 10_000
"""Looks at the others' progress before going to sleep: some hundred microseconds."""


@inner
def push_neighbors(job: Any, wanted: Wanted, results: Results, notes: Pairs, like: Any) -> None:
    """Add what centres do to their neighbours, in the order of the centres in the bins, then of their pairs."""
    targets = unpack(job, TARGETS, Targets, like)
    while True:
        t = fetch_add(job, NEXT_RANGE, 1)
        if t >= job[RANGES]:
            break
        low = targets.low[t]
        high = targets.high[t]
        for place in range(targets.begin[t], targets.end[t]):
            p = results.pair_start[place]
            end = p + results.pair_count[place]
            if targets.whole[t] == 0:
                p = _lower_bound(notes.neighbor, p, end, low)
                end = _lower_bound(notes.neighbor, p, end, high)
            for q in range(p, end):
                j = 3 * np.int64(notes.neighbor[q])
                gx = np.float64(notes.gradient[3 * q])
                gy = np.float64(notes.gradient[3 * q + 1])
                gz = np.float64(notes.gradient[3 * q + 2])
                results.pushed[j] += gx
                results.pushed[j + 1] += gy
                results.pushed[j + 2] += gz
                if wanted.virials:
                    for row in range(3):
                        r = np.float64(notes.edge[3 * q + row])
                        results.virials[3 * j + 3 * row] -= r * gx
                        results.virials[3 * j + 3 * row + 1] -= r * gy
                        results.virials[3 * j + 3 * row + 2] -= r * gz
        fetch_add(job, RANGES_DONE, 1)


@inner
def _linger(job: Any, counter: int, number: int) -> None:
    """Wait a little for the others: to sleep and to be woken would take longer than their last blocks."""
    for _ in range(_LINGER):
        if fetch_add(job, counter, 0) >= number:
            break
        relax()


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
def sum_structures(
    job: Ints, counts: Any, energy: Any, virial: Any, energies: Any, forces: Any, virials: Any
) -> None:  # fmt: skip
    """Energies (B,), virials (B, 9); in the compute dtype energies (N,), forces (N, 3) and virials (N, 9)."""
    wanted = unpack(first_of(job), WANTED, Wanted, energies)
    results = unpack(first_of(job), RESULTS, Results, energies)
    bins = unpack(first_of(job), BINS, Bins, energies)
    i = 0
    for s in range(len(counts)):
        e = 0.0
        for k in range(9):
            virial[9 * s + k] = 0.0
        for a in range(i, i + counts[s]):
            place = bins.rank[a]
            e += results.energies[place]
            energies[a] = results.energies[place]
            if wanted.virial:
                for k in range(9):
                    virial[9 * s + k] += results.virial[9 * place + k]
            if wanted.gradient:
                for k in range(3):
                    forces[3 * a + k] = results.own[3 * place + k] - results.pushed[3 * a + k]
        energy[s] = e
        i += counts[s]
    if wanted.virials:
        for k in range(9 * i):
            virials[k] = results.virials[k]
