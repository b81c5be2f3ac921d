"""Masks of lanes, and what the neighbour search does with them."""

# ruff: noqa: ARG001 — the compiler calls these functions by position
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from llvmlite import binding, ir
from numba.core import cgutils, types

from .inner import intrinsic
from .vec import I32, Vec, as_vec, features, fill_lanes, ir_type

_COMPRESS = "avx512vl" in features() and binding.llvm_version_info[0] >= 20
"""Whether the machine packs lanes in one instruction, and LLVM knows how to ask for it."""


@intrinsic
def first_lanes(typingctx, count, like):
    """Which lanes are the first ``count``: a mask for vectors as long as ``like``."""
    lanes = like.lanes
    out = Vec(types.boolean, lanes)

    def codegen(context, builder, sig, args):
        ints = Vec(types.int32, lanes)
        lane = ir.Constant(ir_type(ints), list(range(lanes)))
        return builder.icmp_signed("<", lane, fill_lanes(builder, builder.trunc(args[0], I32), ints))

    return out(types.int64, like), codegen


@intrinsic
def but_lane(typingctx, mask, lane):
    """``mask`` without lane number ``lane``, if there is one of that number."""

    def codegen(context, builder, sig, args):
        ints = Vec(types.int64, mask.lanes)
        numbers = ir.Constant(ir_type(ints), list(range(mask.lanes)))
        return builder.and_(args[0], builder.icmp_signed("!=", numbers, fill_lanes(builder, args[1], ints)))

    return mask(mask, types.int64), codegen


@intrinsic
def and_less(typingctx, mask, a, b):
    """``mask`` and a < b."""

    def codegen(context, builder, sig, args):
        return builder.and_(args[0], builder.fcmp_ordered("<", args[1], as_vec(context, builder, args[2], b, a)))

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
        ty = ir_type(ints)
        numbers = builder.add(ir.Constant(ty, list(range(lanes))), fill_lanes(builder, builder.trunc(first, I32), ints))
        if _COMPRESS:
            full = f"llvm.experimental.vector.compress.v{lanes}i32"
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ty, [ty, mask.type, ty]), full)
            packed = builder.call(function, [numbers, mask, ir.Constant(ty, [0] * lanes)])
            builder.store(packed, builder.bitcast(builder.gep(array, [at]), ty.as_pointer()), align=4)
            return context.get_dummy_value()
        for k in range(lanes):
            place = ir.Constant(I32, k)
            builder.store(builder.extract_element(numbers, place), builder.gep(array, [at]))
            at = builder.add(at, builder.zext(builder.extract_element(mask, place), at.type))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int64, mask), codegen
