"""Sums over atoms in float64 and in one order: blocks of a fixed length from the first atom of a structure on."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_structures(
    energy, virials, offsets, total, virial, VIRIALS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Energy and, with VIRIALS, the nine components of the virial of each structure, one program each."""
    s = tl.program_id(0)
    first = tl.load(offsets + s)
    last = tl.load(offsets + s + 1)
    lane = tl.arange(0, BLOCK)
    column = tl.arange(0, 16)
    e = tl.zeros([BLOCK], tl.float64)
    w = tl.zeros([BLOCK, 16], tl.float64)
    start = first
    while start < last:
        i = start + lane
        e += tl.load(energy + i, mask=i < last, other=0.0)
        if VIRIALS:
            wanted = (i < last)[:, None] & (column < 9)[None, :]
            w += tl.load(virials + 9 * i.to(tl.int64)[:, None] + column[None, :], mask=wanted, other=0.0).to(tl.float64)
        start += BLOCK
    tl.store(total + s, tl.sum(e, 0))
    if VIRIALS:
        tl.store(virial + 9 * s + column, tl.sum(w, 0), mask=column < 9)


@triton.jit(do_not_specialize=["N"])
def sum_blocks(
    energy, virials, place, partial, N, VIRIALS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sums over BLOCK atoms in the caller's order, who stand at ``place``: (blocks, 16), the energy in column 9."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, 16)
    at = tl.load(place + i, mask=i < N, other=0)
    value = tl.load(energy + at, mask=i < N, other=0.0)[:, None] * (column == 9)[None, :].to(tl.float64)
    if VIRIALS:
        wanted = (i < N)[:, None] & (column < 9)[None, :]
        value += tl.load(virials + 9 * at.to(tl.int64)[:, None] + column[None, :], mask=wanted, other=0.0).to(
            tl.float64
        )
    tl.store(partial + 16 * tl.program_id(0) + column, tl.sum(value, 0))


@triton.jit(do_not_specialize=["blocks"])
def sum_partial(partial, total, blocks, BLOCK: tl.constexpr):
    """Sum of the rows of ``partial``, (16,), by a single program."""
    lane = tl.arange(0, BLOCK)
    column = tl.arange(0, 16)
    value = tl.zeros([BLOCK, 16], tl.float64)
    start = 0
    while start < blocks:
        row = start + lane
        value += tl.load(partial + 16 * row[:, None] + column[None, :], mask=(row < blocks)[:, None], other=0.0)
        start += BLOCK
    tl.store(total + column, tl.sum(value, 0))


@triton.jit(do_not_specialize=["N"])
def put_back(source, place, target, N, W: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of W numbers from the order of the bins into the caller's."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED)
    at = tl.load(place + i, mask=i < N, other=0).to(tl.int64)
    wanted = (i < N)[:, None] & (column < W)[None, :]
    value = tl.load(source + W * at[:, None] + column[None, :], mask=wanted)
    tl.store(target + W * i.to(tl.int64)[:, None] + column[None, :], value, mask=wanted)


@triton.jit(do_not_specialize=["N"])
def copy_words(source, target, N, BLOCK: tl.constexpr):
    """N numbers of 32 bits, from or to memory of the host that the device sees."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < N), mask=i < N)
