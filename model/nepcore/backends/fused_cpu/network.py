"""The network of one atom: site energy and its derivatives by the unscaled descriptors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .inner import inner
from .simd import add_exponent, fma, load, spread, store, total, where_less, zeros

if TYPE_CHECKING:
    from .vec import Width

_LOG2E = 1.4426950408889634
_LN2_HIGH = 0.693145751953125  # 16 bits: n times it is exact
_LN2_LOW = 1.4286068203094173e-06
_ROUND32 = 1.5 * 2.0**23
_ROUND64 = 1.5 * 2.0**52


@inner
def tanh(x: Any, single: bool) -> Any:
    """tanh to a few units of the last place of 1, as 1 − 2/(e²ˣ + 1)."""
    limit = 10.0 if single else 20.0
    y = where_less(x, limit, x, limit)
    y = where_less(-limit, y, y, where_less(x, limit, -limit, y))
    y = y + y
    magic = _ROUND32 if single else _ROUND64
    shifted = fma(y, _LOG2E, magic)
    n = shifted - magic
    r = fma(n, -_LN2_LOW, fma(n, -_LN2_HIGH, y))
    # e^r for |r| ≤ ln 2 / 2 by its series.
    if single:
        p = fma(r, 1.0 / 5040.0, 1.0 / 720.0)
    else:
        p = fma(r, 1.0 / 6227020800.0, 1.0 / 479001600.0)
        p = fma(p, r, 1.0 / 39916800.0)
        p = fma(p, r, 1.0 / 3628800.0)
        p = fma(p, r, 1.0 / 362880.0)
        p = fma(p, r, 1.0 / 40320.0)
        p = fma(p, r, 1.0 / 5040.0)
        p = fma(p, r, 1.0 / 720.0)
    p = fma(p, r, 1.0 / 120.0)
    p = fma(p, r, 1.0 / 24.0)
    p = fma(p, r, 1.0 / 6.0)
    p = fma(p, r, 0.5)
    p = fma(p, r, 1.0)
    p = fma(p, r, 1.0)
    return fma(-2.0, 1.0 / (add_exponent(p, shifted) + 1.0), 1.0)


@inner
def _times(matrix: Any, start: int, row: int, rows: int, x: Any, out: Any, width: Width) -> None:
    """``out[c] += Σ_r x[r] matrix[start + r · row + c]`` for c < row, a multiple of the width."""
    w = len(width)
    c = 0
    while c + 4 * w <= row:
        a0 = load(out, c, width)
        a1 = load(out, c + w, width)
        a2 = load(out, c + 2 * w, width)
        a3 = load(out, c + 3 * w, width)
        at = start + c
        for r in range(rows):
            f = spread(x, r, width)
            a0 = fma(f, load(matrix, at, width), a0)
            a1 = fma(f, load(matrix, at + w, width), a1)
            a2 = fma(f, load(matrix, at + 2 * w, width), a2)
            a3 = fma(f, load(matrix, at + 3 * w, width), a3)
            at += row
        store(out, c, a0)
        store(out, c + w, a1)
        store(out, c + 2 * w, a2)
        store(out, c + 3 * w, a3)
        c += 4 * w
    while c < row:
        a0 = load(out, c, width)
        a1 = zeros(out, width)
        a2 = a1
        a3 = a1
        at = start + c
        r = 0
        while r + 4 <= rows:
            a0 = fma(spread(x, r, width), load(matrix, at, width), a0)
            a1 = fma(spread(x, r + 1, width), load(matrix, at + row, width), a1)
            a2 = fma(spread(x, r + 2, width), load(matrix, at + 2 * row, width), a2)
            a3 = fma(spread(x, r + 3, width), load(matrix, at + 3 * row, width), a3)
            at += 4 * row
            r += 4
        while r < rows:
            a0 = fma(spread(x, r, width), load(matrix, at, width), a0)
            at += row
            r += 1
        store(out, c, (a0 + a1) + (a2 + a3))
        c += w


@inner
def site_energy(model: Any, kind: int, q: Any, u: Any, work: Any, single: bool, width: Width) -> float:
    """U of one atom without its output bias.

    Args:
        model: The packed model.
        kind: The atom's type.
        q: Unscaled descriptor, (D,).
        u: Receives ∂U/∂q, (D padded,).
        work: Has ``hidden``, ``back`` (H padded), ``hidden2``, ``back2`` (H2 padded).
        single: Whether the compute dtype is float32.
        width: Lanes.
    """
    w = len(width)
    m = kind if model.n_networks > 1 else 0
    H = model.hidden_row
    h = work.hidden
    back = work.back
    for c in range(0, H, w):
        store(h, c, -load(model.b0, m * H + c, width))
    _times(model.w0_t, m * model.dim * H, H, model.dim, q, h, width)
    for c in range(0, H, w):
        store(h, c, tanh(load(h, c, width), single))
    energy = zeros(q, width)
    if model.hidden2 == 0:
        for c in range(0, H, w):
            t = load(h, c, width)
            v = load(model.w1, m * H + c, width)
            energy = fma(v, t, energy)
            store(back, c, fma(v, -(t * t), v))
    else:
        H2 = model.hidden2_row
        h2 = work.hidden2
        back2 = work.back2
        for c in range(0, H2, w):
            store(h2, c, -load(model.b1, m * H2 + c, width))
        _times(model.w1_t, m * model.hidden * H2, H2, model.hidden, h, h2, width)
        for c in range(0, H2, w):
            t = tanh(load(h2, c, width), single)
            v = load(model.w2, m * H2 + c, width)
            energy = fma(v, t, energy)
            store(back2, c, fma(v, -(t * t), v))
        for c in range(0, H, w):
            store(back, c, zeros(q, width))
        _times(model.w1, m * model.hidden2 * H, H, model.hidden2, back2, back, width)
        for c in range(0, H, w):
            t = load(h, c, width)
            v = load(back, c, width)
            store(back, c, fma(v, -(t * t), v))
    D = model.dim_row
    for c in range(0, D, w):
        store(u, c, zeros(q, width))
    _times(model.w0, m * model.hidden * D, D, model.hidden, back, u, width)
    return total(energy)
