"""Vectors of several numbers inside compiled loops: what the kernels of this package are written in.

numba compiles scalar loops and leaves it to LLVM to find vectors in them, which fails for most loops here: sums that
stay in registers over the neighbours while the lanes run over radial functions, transposed tiles. A ``Vec`` is an LLVM
vector, so that the machine code is what the source says; where the machine's registers are narrower, LLVM splits them.

A width travels as a tuple, ``(0,) * 16``: its length is part of its type, so that the compiler knows it. A number
beside a vector stands for a vector of it.

Arrays come into the kernels as pointers (words.py). A pointer is one word, where an array is seven that every call
would copy, and counts no references: an array's count is shared by all threads. Indices into pointers are neither
checked nor wrapped.
"""

# ruff: noqa: ARG001 — the compiler calls these functions by position
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from llvmlite import ir
from numba.core import types

from .inner import intrinsic
from .vec import I32, SCALARS, Vec, as_vec, call, fill_lanes, ir_type, vec_of


@intrinsic
def zeros(typingctx, array, width):
    """``len(width)`` zeros of the array's dtype."""
    vec = Vec(array.dtype, width.count)

    def codegen(context, builder, sig, args):
        return ir.Constant(ir_type(vec), [0] * vec.lanes)

    return vec(array, width), codegen


@intrinsic
def load(typingctx, array, index, width):
    """``array[index : index + len(width)]``."""
    vec = Vec(array.dtype, width.count)

    def codegen(context, builder, sig, args):
        pointer = builder.gep(args[0], [args[1]])
        typed = builder.bitcast(pointer, ir_type(vec).as_pointer())
        return builder.load(typed, align=SCALARS[vec.dtype][2])

    return vec(array, types.intp, width), codegen


@intrinsic
def spread(typingctx, array, index, width):
    """``array[index]`` in every lane."""
    vec = Vec(array.dtype, width.count)

    def codegen(context, builder, sig, args):
        return fill_lanes(builder, builder.load(builder.gep(args[0], [args[1]])), vec)

    return vec(array, types.intp, width), codegen


@intrinsic
def store(typingctx, array, index, value):
    """``array[index : index + lanes] = value``."""

    def codegen(context, builder, sig, args):
        pointer = builder.gep(args[0], [args[1]])
        typed = builder.bitcast(pointer, ir_type(value).as_pointer())
        builder.store(args[2], typed, align=SCALARS[value.dtype][2])
        return context.get_dummy_value()

    return types.void(array, types.intp, value), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """``a * b + c``, rounded once where the machine can."""
    vec = vec_of(a, b, c)
    if vec is None:
        return None

    def codegen(context, builder, sig, args):
        return call(
            builder, "fmuladd", vec,
            [as_vec(context, builder, v, t, vec) for v, t in zip(args, sig.args, strict=True)],
        )  # fmt: skip

    return vec(a, b, c), codegen


@intrinsic
def root(typingctx, a):
    """Square root of each lane."""

    def codegen(context, builder, sig, args):
        return call(builder, "sqrt", a, args)

    return a(a), codegen


@intrinsic
def where_less(typingctx, a, b, yes, no):
    """``yes`` in the lanes where a < b, else ``no``; where a or b is NaN, ``no``."""
    vec = vec_of(a, b)
    out = vec_of(yes, no)
    if vec is None or out is None:
        return None

    def codegen(context, builder, sig, args):
        x, y = (as_vec(context, builder, v, t, vec) for v, t in zip(args[:2], sig.args[:2], strict=True))
        p, q = (as_vec(context, builder, v, t, out) for v, t in zip(args[2:], sig.args[2:], strict=True))
        integer = isinstance(vec.dtype, types.Integer)
        mask = builder.icmp_signed("<", x, y) if integer else builder.fcmp_ordered("<", x, y)
        return builder.select(mask, p, q)

    return out(a, b, yes, no), codegen


@intrinsic
def where_equal(typingctx, a, b, yes, no):
    """``yes`` in the lanes where the integers a and b are equal, else ``no``."""
    vec = vec_of(a, b)
    out = vec_of(yes, no)
    if vec is None or out is None:
        return None

    def codegen(context, builder, sig, args):
        x, y = (as_vec(context, builder, v, t, vec) for v, t in zip(args[:2], sig.args[:2], strict=True))
        p, q = (as_vec(context, builder, v, t, out) for v, t in zip(args[2:], sig.args[2:], strict=True))
        return builder.select(builder.icmp_signed("==", x, y), p, q)

    return out(a, b, yes, no), codegen


@intrinsic
def add_exponent(typingctx, mantissa, shifted):
    """``mantissa`` · 2ⁿ, n being the integer in the low bits of ``shifted`` = n + 1.5 · 2^(mantissa bits).

    The sum must stay in the range of normal numbers.
    """
    bits, width = (23, 32) if mantissa.dtype == types.float32 else (52, 64)

    def codegen(context, builder, sig, args):
        ints = ir.VectorType(ir.IntType(width), mantissa.lanes)
        n = builder.shl(builder.bitcast(args[1], ints), ir.Constant(ints, [bits] * mantissa.lanes))
        return builder.bitcast(builder.add(builder.bitcast(args[0], ints), n), ir_type(mantissa))

    return mantissa(mantissa, shifted), codegen


@intrinsic
def total(typingctx, a):
    """Sum of all lanes, halves first: always in the same order."""

    def codegen(context, builder, sig, args):
        value, lanes = args[0], a.lanes
        while lanes > 1:
            lanes //= 2
            nothing = ir.Constant(value.type, ir.Undefined)
            low, high = (
                builder.shuffle_vector(value, nothing, ir.Constant(ir.VectorType(I32, lanes), list(part)))
                for part in (range(lanes), range(lanes, 2 * lanes))
            )
            value = builder.fadd(low, high) if isinstance(a.dtype, types.Float) else builder.add(low, high)
        return builder.extract_element(value, ir.Constant(I32, 0))

    return a.dtype(a), codegen


@intrinsic
def transpose(typingctx, source, start, stride, target, begin, step, width):
    """Transpose a square tile of ``len(width)`` rows; the width is a power of two.

    ``target[begin + c * step + r] = source[start + r * stride + c]``.
    """
    vec = Vec(source.dtype, width.count)
    n = vec.lanes

    def codegen(context, builder, sig, args):
        align = SCALARS[vec.dtype][2]
        pointer_type = ir_type(vec).as_pointer()

        def row(array: int, first: int, stride: int, r: int) -> ir.Value:
            index = builder.add(args[first], builder.mul(args[stride], ir.Constant(args[stride].type, r)))
            pointer = builder.gep(args[array], [index])
            return builder.bitcast(pointer, pointer_type)

        rows = [builder.load(row(0, 1, 2, r), align=align) for r in range(n)]
        # Each stage exchanges the blocks of side ``half`` off the diagonal of blocks of twice that side.
        half = n // 2
        while half:
            low = [k if not k & half else k - half + n for k in range(n)]
            high = [k + half if not k & half else k + n for k in range(n)]
            for r in range(n):
                if not r & half:
                    a, b = rows[r], rows[r + half]
                    rows[r], rows[r + half] = (
                        builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, n), mask)) for mask in (low, high)
                    )
            half //= 2
        for r in range(n):
            builder.store(rows[r], row(3, 4, 5, r), align=align)
        return context.get_dummy_value()

    return types.void(source, types.intp, types.intp, target, types.intp, types.intp, width), codegen


@intrinsic
def fill(typingctx, value, width):
    """``value`` in every lane."""
    vec = Vec(value, width.count)

    def codegen(context, builder, sig, args):
        return fill_lanes(builder, args[0], vec)

    return vec(value, width), codegen
