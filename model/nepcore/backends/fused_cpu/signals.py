"""What threads in compiled code tell each other by: indivisible steps on shared words, semaphores to sleep on."""

# ruff: noqa: ARG001 — the compiler calls these functions by position
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

from llvmlite import binding, ir
from numba.core import cgutils, types

from .inner import intrinsic
from .vec import I32

if TYPE_CHECKING:
    from numpy.typing import NDArray

SEMAPHORES = sys.platform == "linux" and sys.maxsize > 1 << 32
"""Whether compiled code can sleep on a semaphore in memory: elsewhere they are missing or of other sizes."""

SEMAPHORE_WORDS = 8
"""Words to set aside for one; it takes 32 bytes, the rest keeps neighbours off its cache line."""

_BYTE = ir.IntType(8)
_PAUSES = {"x86_64": ("llvm.x86.sse2.pause", []), "aarch64": ("llvm.aarch64.hint", [1])}


def make_semaphore(words: NDArray[Any]) -> None:
    """Make a semaphore of count 0 of the first words of an array."""
    if SEMAPHORES:
        initialise = ctypes.CDLL(None).sem_init
        if initialise(ctypes.c_void_p(words.ctypes.data), 0, ctypes.c_uint(0)) != 0:
            raise OSError("sem_init failed")


def _call(builder: Any, name: str, pointer: Any) -> None:
    ty = ir.FunctionType(I32, [_BYTE.as_pointer()])
    function = cgutils.get_or_insert_function(builder.module, ty, name)
    builder.call(function, [builder.bitcast(pointer, _BYTE.as_pointer())])


@intrinsic
def sleep_on(typingctx, array, index):
    """Sleep until somebody calls :func:`wake` on the semaphore at ``array[index]``, or for no reason."""

    def codegen(context, builder, sig, args):
        if SEMAPHORES:
            _call(builder, "sem_wait", builder.gep(args[0], [args[1]]))
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@intrinsic
def wake(typingctx, array, index):
    """Wake whoever sleeps, or will go to sleep, on the semaphore at ``array[index]``."""

    def codegen(context, builder, sig, args):
        if SEMAPHORES:
            _call(builder, "sem_post", builder.gep(args[0], [args[1]]))
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@intrinsic
def fetch_add(typingctx, array, index, amount):
    """``array[index] += amount`` in one indivisible step; the value before."""

    def codegen(context, builder, sig, args):
        pointer = builder.gep(args[0], [args[1]])
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return array.dtype(array, types.intp, array.dtype), codegen


@intrinsic
def exchange(typingctx, array, index, value):
    """``array[index] = value`` in one indivisible step; the value before."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("xchg", builder.gep(args[0], [args[1]]), args[2], "seq_cst")

    return array.dtype(array, types.intp, array.dtype), codegen


@intrinsic
def replace(typingctx, array, index, before, after):
    """``array[index] = after`` if it is ``before``, in one indivisible step; whether it was."""

    def codegen(context, builder, sig, args):
        pointer = builder.gep(args[0], [args[1]])
        pair = builder.cmpxchg(pointer, args[2], args[3], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean(array, types.intp, array.dtype, array.dtype), codegen


@intrinsic
def relax(typingctx):
    """Tell the processor that a loop waits for another thread."""

    def codegen(context, builder, sig, args):
        machine = binding.get_default_triple().split("-")[0]
        if machine in _PAUSES:
            name, values = _PAUSES[machine]
            ty = ir.FunctionType(ir.VoidType(), [I32] * len(values))
            function = cgutils.get_or_insert_function(builder.module, ty, name)
            builder.call(function, [ir.Constant(I32, v) for v in values])
        return context.get_dummy_value()

    return types.void(), codegen
