"""Vectors of several numbers inside compiled loops: what the kernels of this package are written in.

numba compiles scalar loops and leaves it to LLVM to find vectors in them, which fails for most loops here: sums that
stay in registers over the neighbours while the lanes run over radial functions, transposed tiles. A ``Vec`` is an LLVM
vector, so that the machine code is what the source says; where the machine's registers are narrower, LLVM splits them.

A width travels as a tuple, ``(0,) * 16``: its length is part of its type, so that the compiler knows it. A number beside
a vector stands for a vector of it.

Arrays come into the kernels as named tuples; :func:`bare` turns them into pointers there. A pointer is one word, where
an array is seven that every call would copy, and counts no references: an array's count is shared by all threads.
Indices into pointers are neither checked nor wrapped.
"""

# ruff: noqa: ARG001 — the compiler calls these functions by position
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import operator
from typing import Any

from llvmlite import binding, ir
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


_COMPRESS = bool(binding.get_host_cpu_features().get("avx512vl")) and binding.llvm_version_info[0] >= 20
"""Whether the machine packs lanes in one instruction, and LLVM knows how to ask for it."""

_SCALARS = {
    types.float32: (ir.FloatType(), "f32", 4),
    types.float64: (ir.DoubleType(), "f64", 8),
    types.int32: (_I32, "i32", 4),
    types.int64: (ir.IntType(64), "i64", 8),
    types.boolean: (ir.IntType(1), "i1", 1),
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


def _pointer(builder: ir.IRBuilder, array: ir.Value, index: ir.Value) -> ir.Value:
    return builder.gep(array, [index])


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
def _neg(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
    return builder.fneg(args[0])


_binary(operator.add, "fadd", "add")
_binary(operator.sub, "fsub", "sub")
_binary(operator.mul, "fmul", "mul")
_binary(operator.truediv, "fdiv", None)


@intrinsic
def bare(typingctx, group):
    """The same named tuple with a pointer to its first item for each (flat, contiguous) array."""
    out = types.NamedTuple(
        [types.CPointer(t.dtype) if isinstance(t, types.Array) else t for t in group.types], group.instance_class
    )

    def codegen(context, builder, sig, args):
        items = []
        for k, ty in enumerate(group.types):
            item = builder.extract_value(args[0], k)
            items.append(make_array(ty)(context, builder, item).data if isinstance(ty, types.Array) else item)
        return context.make_tuple(builder, out, items)

    return out(group), codegen


@intrinsic
def zeros(typingctx, array, width):
    """``len(width)`` zeros of the array's dtype."""
    vec = Vec(array.dtype, width.count)

    def codegen(context, builder, sig, args):
        return ir.Constant(_ir_type(vec), [0] * vec.lanes)

    return vec(array, width), codegen


@intrinsic
def load(typingctx, array, index, width):
    """``array[index : index + len(width)]``."""
    vec = Vec(array.dtype, width.count)

    def codegen(context, builder, sig, args):
        pointer = _pointer(builder, args[0], args[1])
        typed = builder.bitcast(pointer, _ir_type(vec).as_pointer())
        return builder.load(typed, align=_SCALARS[vec.dtype][2])

    return vec(array, types.intp, width), codegen


@intrinsic
def spread(typingctx, array, index, width):
    """``array[index]`` in every lane."""
    vec = Vec(array.dtype, width.count)

    def codegen(context, builder, sig, args):
        return _fill(builder, builder.load(_pointer(builder, args[0], args[1])), vec)

    return vec(array, types.intp, width), codegen


@intrinsic
def store(typingctx, array, index, value):
    """``array[index : index + lanes] = value``."""

    def codegen(context, builder, sig, args):
        pointer = _pointer(builder, args[0], args[1])
        typed = builder.bitcast(pointer, _ir_type(value).as_pointer())
        builder.store(args[2], typed, align=_SCALARS[value.dtype][2])
        return context.get_dummy_value()

    return types.void(array, types.intp, value), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """``a * b + c``, rounded once where the machine can."""
    vec = _vec_of(a, b, c)
    if vec is None:
        return None

    def codegen(context, builder, sig, args):
        return _call(
            builder, "fmuladd", vec,
            [_as_vec(context, builder, v, t, vec) for v, t in zip(args, sig.args, strict=True)],
        )  # fmt: skip

    return vec(a, b, c), codegen


@intrinsic
def root(typingctx, a):
    """Square root of each lane."""

    def codegen(context, builder, sig, args):
        return _call(builder, "sqrt", a, args)

    return a(a), codegen


@intrinsic
def where_less(typingctx, a, b, yes, no):
    """``yes`` in the lanes where a < b, else ``no``; where a or b is NaN, ``no``."""
    vec = _vec_of(a, b)
    out = _vec_of(yes, no)
    if vec is None or out is None:
        return None

    def codegen(context, builder, sig, args):
        x, y = (_as_vec(context, builder, v, t, vec) for v, t in zip(args[:2], sig.args[:2], strict=True))
        p, q = (_as_vec(context, builder, v, t, out) for v, t in zip(args[2:], sig.args[2:], strict=True))
        integer = isinstance(vec.dtype, types.Integer)
        mask = builder.icmp_signed("<", x, y) if integer else builder.fcmp_ordered("<", x, y)
        return builder.select(mask, p, q)

    return out(a, b, yes, no), codegen


@intrinsic
def where_equal(typingctx, a, b, yes, no):
    """``yes`` in the lanes where the integers a and b are equal, else ``no``."""
    vec = _vec_of(a, b)
    out = _vec_of(yes, no)
    if vec is None or out is None:
        return None

    def codegen(context, builder, sig, args):
        x, y = (_as_vec(context, builder, v, t, vec) for v, t in zip(args[:2], sig.args[:2], strict=True))
        p, q = (_as_vec(context, builder, v, t, out) for v, t in zip(args[2:], sig.args[2:], strict=True))
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
        return builder.bitcast(builder.add(builder.bitcast(args[0], ints), n), _ir_type(mantissa))

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
                builder.shuffle_vector(value, nothing, ir.Constant(ir.VectorType(_I32, lanes), list(part)))
                for part in (range(lanes), range(lanes, 2 * lanes))
            )
            value = builder.fadd(low, high) if isinstance(a.dtype, types.Float) else builder.add(low, high)
        return builder.extract_element(value, ir.Constant(_I32, 0))

    return a.dtype(a), codegen


@intrinsic
def transpose(typingctx, source, start, stride, target, begin, step, width):
    """Transpose a square tile of ``len(width)`` rows; the width is a power of two.

    ``target[begin + c * step + r] = source[start + r * stride + c]``.
    """
    vec = Vec(source.dtype, width.count)
    n = vec.lanes

    def codegen(context, builder, sig, args):
        align = _SCALARS[vec.dtype][2]
        pointer_type = _ir_type(vec).as_pointer()

        def row(array: int, first: int, stride: int, r: int) -> ir.Value:
            index = builder.add(args[first], builder.mul(args[stride], ir.Constant(args[stride].type, r)))
            pointer = _pointer(builder, args[array], index)
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
def first_lanes(typingctx, count, like):
    """Which lanes are the first ``count``: a mask for vectors as long as ``like``."""
    lanes = like.lanes
    out = Vec(types.boolean, lanes)

    def codegen(context, builder, sig, args):
        ints = Vec(types.int32, lanes)
        lane = ir.Constant(_ir_type(ints), list(range(lanes)))
        return builder.icmp_signed("<", lane, _fill(builder, builder.trunc(args[0], _I32), ints))

    return out(types.int64, like), codegen


@intrinsic
def but_lane(typingctx, mask, lane):
    """``mask`` without lane number ``lane``, if there is one of that number."""

    def codegen(context, builder, sig, args):
        ints = Vec(types.int64, mask.lanes)
        numbers = ir.Constant(_ir_type(ints), list(range(mask.lanes)))
        return builder.and_(args[0], builder.icmp_signed("!=", numbers, _fill(builder, args[1], ints)))

    return mask(mask, types.int64), codegen


@intrinsic
def and_less(typingctx, mask, a, b):
    """``mask`` and a < b."""

    def codegen(context, builder, sig, args):
        return builder.and_(args[0], builder.fcmp_ordered("<", args[1], _as_vec(context, builder, args[2], b, a)))

    return mask(mask, a, b), codegen


@intrinsic
def count_lanes(typingctx, mask):
    """Number of lanes set."""

    def codegen(context, builder, sig, args):
        bits = builder.bitcast(args[0], ir.IntType(mask.lanes))
        return builder.ctpop(builder.zext(bits, ir.IntType(64)))

    return types.int64(mask), codegen


@intrinsic
def store_numbers(typingctx, array, index, first, mask):
    """Store ``first`` + lane number of the lanes set in ``mask``, one after the other, as int32.

    What is behind them, up to all lanes, is overwritten.
    """
    lanes = mask.lanes
    ints = Vec(types.int32, lanes)

    def codegen(context, builder, sig, args):
        array, at, first, mask = args
        ty = _ir_type(ints)
        numbers = builder.add(ir.Constant(ty, list(range(lanes))), _fill(builder, builder.trunc(first, _I32), ints))
        if _COMPRESS:
            full = f"llvm.experimental.vector.compress.v{lanes}i32"
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ty, [ty, mask.type, ty]), full)
            packed = builder.call(function, [numbers, mask, ir.Constant(ty, [0] * lanes)])
            builder.store(packed, builder.bitcast(_pointer(builder, array, at), ty.as_pointer()), align=4)
            return context.get_dummy_value()
        for k in range(lanes):
            place = ir.Constant(_I32, k)
            builder.store(builder.extract_element(numbers, place), _pointer(builder, array, at))
            at = builder.add(at, builder.zext(builder.extract_element(mask, place), at.type))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int64, mask), codegen


@intrinsic
def fill(typingctx, value, width):
    """``value`` in every lane."""
    vec = Vec(value, width.count)

    def codegen(context, builder, sig, args):
        return _fill(builder, args[0], vec)

    return vec(value, width), codegen


@intrinsic
def fetch_add(typingctx, array, index, amount):
    """``array[index] += amount`` in one indivisible step; the value before."""

    def codegen(context, builder, sig, args):
        pointer = _pointer(builder, args[0], args[1])
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return array.dtype(array, types.intp, array.dtype), codegen


__all__ = [
    "Vec",
    "Width",
    "add_exponent",
    "and_less",
    "bare",
    "but_lane",
    "count_lanes",
    "fetch_add",
    "fill",
    "first_lanes",
    "fma",
    "load",
    "root",
    "spread",
    "store",
    "store_numbers",
    "total",
    "transpose",
    "where_equal",
    "where_less",
    "zeros",
]
