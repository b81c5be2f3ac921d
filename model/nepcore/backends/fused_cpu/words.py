"""Named tuples of arrays and numbers as rows of words.

To hand dozens of arrays to a compiled function takes tens of microseconds, each of which holds the interpreter's lock.
What lives longer than a call, or goes to several threads, is therefore written down once, one word a field, by
:func:`words` or in compiled code by :func:`note`, and read by :func:`unpack`, which knows the fields from the
annotations of the tuple's class.
"""

# ruff: noqa: ARG001 — the compiler calls these functions by position
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.errors import TypingError
from numba.np.arrayobj import make_array

from .inner import intrinsic

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Flat arrays: of the compute dtype, and of float64, float32, int64, int32.
Reals = Any
Doubles = Any
Singles = Any
Ints = Any
Ints32 = Any

_ITEMS: dict[str, Any] = {
    "Doubles": types.float64,
    "Singles": types.float32,
    "Ints": types.int64,
    "Ints32": types.int32,
}
_WORD = ir.IntType(64)
_NUMBERS: dict[str, Any] = {"bool": types.boolean, "int": types.int64, "float": types.float64}


def _kinds(cls: Any) -> list[str]:
    """The annotations of a named tuple's fields, as they are spelled."""
    return [getattr(kind, "__forward_arg__", kind) for kind in cls.__annotations__.values()]


def words(group: Any, dtype: str) -> NDArray[np.int64]:
    """The fields of a named tuple, (fields,): addresses of arrays, numbers. The tuple must be kept as long.

    Raises:
        TypeError: An array is not of the kind that the class says, with ``dtype`` as the compute dtype.
    """
    out = np.zeros(len(group), np.int64)
    for k, (name, kind, value) in enumerate(zip(group._fields, _kinds(type(group)), group, strict=True)):
        if kind in _NUMBERS:
            out[k] = np.float64(value).view(np.int64) if kind == "float" else value
            continue
        if value.dtype != (dtype if kind == "Reals" else _ITEMS[kind].name) or not value.flags.carray:
            raise TypeError(f"{name} of {type(group).__name__} must be flat {kind}, not {value.dtype}")
        out[k] = value.ctypes.data
    return out


@intrinsic
def note(typingctx, row, at, group):
    """Write the fields of a named tuple of flat arrays and numbers into ``row[at:]``, as :func:`words` does."""
    for name, kind, ty in zip(group.fields, _kinds(group.instance_class), group.types, strict=True):
        expected = _NUMBERS.get(kind) or _ITEMS.get(kind, ty.dtype if isinstance(ty, types.Array) else None)
        if isinstance(ty, types.Array):
            fits = ty.layout == "C" and ty.dtype == expected
        else:
            fits = kind in _NUMBERS and (isinstance(ty, types.Boolean) or ty == expected)
        if not fits:
            raise TypingError(f"{name} of {group.instance_class.__name__} must be {kind}, not {ty}")

    def codegen(context, builder, sig, args):
        row, at, group_value = args
        for k, ty in enumerate(group.types):
            item = builder.extract_value(group_value, k)
            if isinstance(ty, types.Array):
                word = builder.ptrtoint(make_array(ty)(context, builder, item).data, _WORD)
            elif ty == types.float64:
                word = builder.bitcast(item, _WORD)
            else:
                word = context.cast(builder, item, ty, types.int64)
            builder.store(word, builder.gep(row, [builder.add(at, ir.Constant(at.type, k))]))
        return context.get_dummy_value()

    return types.void(row, types.intp, group), codegen


@intrinsic
def unpack(typingctx, row, at, kind, like):
    """The named tuple of class ``kind`` that ``row[at:]`` holds, with a pointer to its first item for each array.

    ``row`` is a pointer; ``like`` an array of the compute dtype.
    """
    cls = kind.instance_class
    fields = [
        types.CPointer(like.dtype) if name == "Reals" else _NUMBERS[name] if name in _NUMBERS
        else types.CPointer(_ITEMS[name])
        for name in _kinds(cls)
    ]  # fmt: skip
    out = types.NamedTuple(fields, cls)

    def codegen(context, builder, sig, args):
        data = builder.gep(args[0], [args[1]])
        items = []
        for k, ty in enumerate(fields):
            word = builder.load(builder.gep(data, [ir.Constant(_WORD, k)]))
            if isinstance(ty, types.CPointer):
                word = builder.inttoptr(word, context.get_value_type(ty))
            elif ty == types.float64:
                word = builder.bitcast(word, ir.DoubleType())
            elif ty == types.boolean:
                word = builder.trunc(word, ir.IntType(1))
            items.append(word)
        return context.make_tuple(builder, out, items)

    return out(row, types.intp, kind, like), codegen


@intrinsic
def first_of(typingctx, array):
    """Pointer to the first item of a flat array."""

    def codegen(context, builder, sig, args):
        return make_array(array)(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), codegen


@intrinsic
def address_of(typingctx, array):
    """Address of the first item of a flat array."""

    def codegen(context, builder, sig, args):
        return builder.ptrtoint(make_array(array)(context, builder, args[0]).data, _WORD)

    return types.int64(array), codegen


@intrinsic
def at_address(typingctx, address, like):
    """Pointer to an item of the dtype of ``like`` (an array or a pointer) at an address."""
    out = types.CPointer(like.dtype)

    def codegen(context, builder, sig, args):
        return builder.inttoptr(args[0], context.get_value_type(out))

    return out(types.int64, like), codegen
