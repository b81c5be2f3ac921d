"""Vectors of several numbers inside compiled loops: what the kernels of this package are written in.

numba compiles scalar loops and leaves it to LLVM to find vectors in them, which fails for most loops here: sums that
stay in registers over the neighbours while the lanes run over radial functions, transposed tiles. A ``Vec`` is an LLVM
vector, so that the machine code is what the source says; where the machine's registers are narrower, LLVM splits them.

A width travels as a tuple, ``(0,) * 16``: its length is part of its type, so that the compiler knows it. Arrays are
flat and C contiguous; indices are neither checked nor wrapped. A number beside a vector stands for a vector of it.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model
from numba.np.arrayobj import make_array

Width = tuple[int, ...]
"""A vector width as the compiled functions take it: a tuple of that length."""

_I32 = ir.IntType(32)


class Vec(types.Type):
    """``lanes`` numbers of one scalar type in a register."""

    def __init__(self, dtype: Any, lanes: int) -> None:
        self.dtype = dtype
        self.lanes = lanes
        super().__init__(name=f"vec({dtype}, {lanes})")


_SCALARS = {
    types.float32: (ir.FloatType(), "f32", 4),
    types.float64: (ir.DoubleType(), "f64", 8),
    types.int32: (_I32, "i32", 4),
    types.int64: (ir.IntType(64), "i64", 8),
}


def _ir_type(vec: Vec) -> ir.VectorType:
    return ir.VectorType(_SCALARS[vec.dtype][0], vec.lanes)


@register_model(Vec)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Vec) -> None:
        super().__init__(dmm, fe_type, _ir_type(fe_type))


def _fill(builder: ir.IRBuilder, value: ir.Value, vec: Vec) -> ir.Value:
    """A vector whose lanes are all ``value``."""
    ty = _ir_type(vec)
    nothing = ir.Constant(ty, ir.Undefined)
    one = builder.insert_element(nothing, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(_I32, vec.lanes), [0] * vec.lanes))


def _as_vec(context: Any, builder: ir.IRBuilder, value: ir.Value, ty: Any, vec: Vec) -> ir.Value:
    """``value`` itself if it is a vector, else a vector of it."""
    if isinstance(ty, Vec):
        return value
    return _fill(builder, context.cast(builder, value, ty, vec.dtype), vec)


def _vec_of(*args: Any) -> Vec | None:
    """The one vector type among operands; None if there is none, or two, or something that is no number."""
    found = {a for a in args if isinstance(a, Vec)}
    if len(found) != 1 or not all(isinstance(a, (Vec, types.Number)) for a in args):
        return None
    return found.pop()


def _call(builder: ir.IRBuilder, name: str, vec: Vec, args: list[ir.Value]) -> ir.Value:
    ty = _ir_type(vec)
    full = f"llvm.{name}.v{vec.lanes}{_SCALARS[vec.dtype][1]}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ty, [ty] * len(args)), full)
    return builder.call(function, args)


def _pointer(context: Any, builder: ir.IRBuilder, array_type: Any, array: ir.Value, index: ir.Value) -> ir.Value:
    data = make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


def _binary(op: Any, float_name: str, int_name: str | None) -> None:
    @infer_global(op)
    class _Template(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:  # noqa: ARG002
            if len(args) != 2:
                return None
            vec = _vec_of(*args)
            return None if vec is None else signature(vec, *args)

    def lower(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        vec = sig.return_type
        a, b = (_as_vec(context, builder, value, ty, vec) for value, ty in zip(args, sig.args, strict=True))
        name = float_name if isinstance(vec.dtype, types.Float) else int_name
        return getattr(builder, name)(a, b)  # type: ignore[arg-type]

    lower_builtin(op, Vec, Vec)(lower)
    lower_builtin(op, Vec, types.Number)(lower)
    lower_builtin(op, types.Number, Vec)(lower)


@infer_global(operator.neg)
class _NegTemplate(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:  # noqa: ARG002
        return signature(args[0], args[0]) if len(args) == 1 and isinstance(args[0], Vec) else None


@lower_builtin(operator.neg, Vec)
def _neg(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:  # noqa: ARG001
    return builder.fneg(args[0])


_binary(operator.add, "fadd", "add")
_binary(operator.sub, "fsub", "sub")
_binary(operator.mul, "fmul", "mul")
_binary(operator.truediv, "fdiv", None)


@intrinsic
def zeros(typingctx, array, width):  # type: ignore[no-untyped-def]
    """``len(width)`` zeros of the array's dtype."""
    vec = Vec(array.dtype, width.count)

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return ir.Constant(_ir_type(vec), [0] * vec.lanes)

    return vec(array, width), codegen


@intrinsic
def load(typingctx, array, index, width):  # type: ignore[no-untyped-def]
    """``array[index : index + len(width)]``."""
    vec = Vec(array.dtype, width.count)

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        pointer = _pointer(context, builder, sig.args[0], args[0], args[1])
        typed = builder.bitcast(pointer, _ir_type(vec).as_pointer())
        return builder.load(typed, align=_SCALARS[vec.dtype][2])

    return vec(array, types.intp, width), codegen


@intrinsic
def spread(typingctx, array, index, width):  # type: ignore[no-untyped-def]
    """``array[index]`` in every lane."""
    vec = Vec(array.dtype, width.count)

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return _fill(builder, builder.load(_pointer(context, builder, sig.args[0], args[0], args[1])), vec)

    return vec(array, types.intp, width), codegen


@intrinsic
def store(typingctx, array, index, value):  # type: ignore[no-untyped-def]
    """``array[index : index + lanes] = value``."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        pointer = _pointer(context, builder, sig.args[0], args[0], args[1])
        typed = builder.bitcast(pointer, _ir_type(value).as_pointer())
        builder.store(args[2], typed, align=_SCALARS[value.dtype][2])
        return context.get_dummy_value()

    return types.void(array, types.intp, value), codegen


@intrinsic
def fma(typingctx, a, b, c):  # type: ignore[no-untyped-def]
    """``a * b + c``, rounded once where the machine can."""
    vec = _vec_of(a, b, c)
    if vec is None:
        return None

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return _call(
            builder, "fmuladd", vec,
            [_as_vec(context, builder, v, t, vec) for v, t in zip(args, sig.args, strict=True)],
        )  # fmt: skip

    return vec(a, b, c), codegen


@intrinsic
def root(typingctx, a):  # type: ignore[no-untyped-def]
    """Square root of each lane."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        return _call(builder, "sqrt", a, args)

    return a(a), codegen


@intrinsic
def where_less(typingctx, a, b, yes, no):  # type: ignore[no-untyped-def]
    """``yes`` in the lanes where a < b, else ``no``; where a or b is NaN, ``no``."""
    vec = _vec_of(a, b)
    out = _vec_of(yes, no)
    if vec is None or out is None:
        return None

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        x, y = (_as_vec(context, builder, v, t, vec) for v, t in zip(args[:2], sig.args[:2], strict=True))
        p, q = (_as_vec(context, builder, v, t, out) for v, t in zip(args[2:], sig.args[2:], strict=True))
        integer = isinstance(vec.dtype, types.Integer)
        mask = builder.icmp_signed("<", x, y) if integer else builder.fcmp_ordered("<", x, y)
        return builder.select(mask, p, q)

    return out(a, b, yes, no), codegen


@intrinsic
def where_equal(typingctx, a, b, yes, no):  # type: ignore[no-untyped-def]
    """``yes`` in the lanes where the integers a and b are equal, else ``no``."""
    vec = _vec_of(a, b)
    out = _vec_of(yes, no)
    if vec is None or out is None:
        return None

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        x, y = (_as_vec(context, builder, v, t, vec) for v, t in zip(args[:2], sig.args[:2], strict=True))
        p, q = (_as_vec(context, builder, v, t, out) for v, t in zip(args[2:], sig.args[2:], strict=True))
        return builder.select(builder.icmp_signed("==", x, y), p, q)

    return out(a, b, yes, no), codegen


@intrinsic
def add_exponent(typingctx, mantissa, shifted):  # type: ignore[no-untyped-def]
    """``mantissa`` · 2ⁿ, n being the integer in the low bits of ``shifted`` = n + 1.5 · 2^(mantissa bits).

    The sum must stay in the range of normal numbers.
    """
    bits, width = (23, 32) if mantissa.dtype == types.float32 else (52, 64)

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        ints = ir.VectorType(ir.IntType(width), mantissa.lanes)
        n = builder.shl(builder.bitcast(args[1], ints), ir.Constant(ints, [bits] * mantissa.lanes))
        return builder.bitcast(builder.add(builder.bitcast(args[0], ints), n), _ir_type(mantissa))

    return mantissa(mantissa, shifted), codegen


@intrinsic
def total(typingctx, a):  # type: ignore[no-untyped-def]
    """Sum of all lanes, halves first: always in the same order."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        value, lanes = args[0], a.lanes
        while lanes > 1:
            lanes //= 2
            nothing = ir.Constant(value.type, ir.Undefined)
            low, high = (
                builder.shuffle_vector(value, nothing, ir.Constant(ir.VectorType(_I32, lanes), list(part)))
                for part in (range(lanes), range(lanes, 2 * lanes))
            )
            value = builder.fadd(low, high) if isinstance(a.dtype, types.Float) else builder.add(low, high)
        return builder.extract_element(value, ir.Constant(_I32, 0))

    return a.dtype(a), codegen


@intrinsic
def transpose(typingctx, source, start, stride, target, begin, step, width):  # type: ignore[no-untyped-def]
    """Transpose a square tile of ``len(width)`` rows; the width is a power of two.

    ``target[begin + c * step + r] = source[start + r * stride + c]``.
    """
    vec = Vec(source.dtype, width.count)
    n = vec.lanes

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        align = _SCALARS[vec.dtype][2]
        pointer_type = _ir_type(vec).as_pointer()

        def row(array: int, first: int, stride: int, r: int) -> ir.Value:
            index = builder.add(args[first], builder.mul(args[stride], ir.Constant(args[stride].type, r)))
            pointer = _pointer(context, builder, sig.args[array], args[array], index)
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
                        builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, n), mask)) for mask in (low, high)
                    )
            half //= 2
        for r in range(n):
            builder.store(rows[r], row(3, 4, 5, r), align=align)
        return context.get_dummy_value()

    return types.void(source, types.intp, types.intp, target, types.intp, types.intp, width), codegen


@intrinsic
def fetch_add(typingctx, array, index, amount):  # type: ignore[no-untyped-def]
    """``array[index] += amount`` in one indivisible step; the value before."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        pointer = _pointer(context, builder, sig.args[0], args[0], args[1])
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return array.dtype(array, types.intp, array.dtype), codegen


__all__ = [
    "Vec",
    "Width",
    "add_exponent",
    "fetch_add",
    "fma",
    "load",
    "root",
    "spread",
    "store",
    "total",
    "transpose",
    "where_equal",
    "where_less",
    "zeros",
]
