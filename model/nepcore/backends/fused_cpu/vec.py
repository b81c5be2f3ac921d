"""The type of vectors that compiled loops compute with, and its arithmetic."""

# ruff: noqa: ARG001, ARG002 — the compiler calls these functions by position

from __future__ import annotations

import operator
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.core import config as _config
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import lower_builtin, models, register_model

config: Any = _config

Width = tuple[int, ...]
"""A vector width as the compiled functions take it: a tuple of that length."""

I32 = ir.IntType(32)


class Vec(types.Type):
    """``lanes`` numbers of one scalar type in a register."""

    def __init__(self, dtype: Any, lanes: int) -> None:
        self.dtype = dtype
        self.lanes = lanes
        super().__init__(name=f"vec({dtype}, {lanes})")


def features() -> frozenset[str]:
    """What the processor that is compiled for can do; ``NUMBA_CPU_FEATURES`` overrules what is found."""
    if config.CPU_FEATURES is not None:
        return frozenset(f[1:] for f in config.CPU_FEATURES.split(",") if f.startswith("+"))
    return frozenset(f for f, there in binding.get_host_cpu_features().items() if there)


REGISTER = 64 if "avx512f" in features() else 32
"""Bytes of a vector: those of the widest registers, or, where they are narrower still, two of them."""

SCALARS = {
    types.float32: (ir.FloatType(), "f32", 4),
    types.float64: (ir.DoubleType(), "f64", 8),
    types.int32: (I32, "i32", 4),
    types.int64: (ir.IntType(64), "i64", 8),
    types.boolean: (ir.IntType(1), "i1", 1),
}


def ir_type(vec: Vec) -> ir.VectorType:
    """The LLVM type."""
    return ir.VectorType(SCALARS[vec.dtype][0], vec.lanes)


@register_model(Vec)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Vec) -> None:
        super().__init__(dmm, fe_type, ir_type(fe_type))


def fill_lanes(builder: ir.IRBuilder, value: ir.Value, vec: Vec) -> ir.Value:
    """A vector whose lanes are all ``value``."""
    ty = ir_type(vec)
    nothing = ir.Constant(ty, ir.Undefined)
    one = builder.insert_element(nothing, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(I32, vec.lanes), [0] * vec.lanes))


def as_vec(context: Any, builder: ir.IRBuilder, value: ir.Value, ty: Any, vec: Vec) -> ir.Value:
    """``value`` itself if it is a vector, else a vector of it."""
    if isinstance(ty, Vec):
        return value
    return fill_lanes(builder, context.cast(builder, value, ty, vec.dtype), vec)


def vec_of(*args: Any) -> Vec | None:
    """The one vector type among operands; None if there is none, or two, or something that is no number."""
    found = {a for a in args if isinstance(a, Vec)}
    if len(found) != 1 or not all(isinstance(a, (Vec, types.Number)) for a in args):
        return None
    return found.pop()


def call(builder: ir.IRBuilder, name: str, vec: Vec, args: list[ir.Value]) -> ir.Value:
    """Call an LLVM intrinsic on vectors of one type."""
    ty = ir_type(vec)
    full = f"llvm.{name}.v{vec.lanes}{SCALARS[vec.dtype][1]}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ty, [ty] * len(args)), full)
    return builder.call(function, args)


def _binary(op: Any, float_name: str, int_name: str | None) -> None:
    @infer_global(op)
    class _Template(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            if len(args) != 2:
                return None
            vec = vec_of(*args)
            return None if vec is None else signature(vec, *args)

    def lower(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        vec = sig.return_type
        a, b = (as_vec(context, builder, value, ty, vec) for value, ty in zip(args, sig.args, strict=True))
        name = float_name if isinstance(vec.dtype, types.Float) else int_name
        return getattr(builder, name)(a, b)  # type: ignore[arg-type]

    lower_builtin(op, Vec, Vec)(lower)
    lower_builtin(op, Vec, types.Number)(lower)
    lower_builtin(op, types.Number, Vec)(lower)


@infer_global(operator.neg)
class _NegTemplate(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        return signature(args[0], args[0]) if len(args) == 1 and isinstance(args[0], Vec) else None


@lower_builtin(operator.neg, Vec)
def _neg(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
    return builder.fneg(args[0])


_binary(operator.add, "fadd", "add")
_binary(operator.sub, "fsub", "sub")
_binary(operator.mul, "fmul", "mul")
_binary(operator.truediv, "fdiv", None)
