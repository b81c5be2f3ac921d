"""Dense blocks compiled by torch (inductor), once for all sizes.

Rows and slots are dynamic dimensions from the start, so that no mix of sizes compiles anything again. What cannot be
compiled on this machine (no C++ compiler, no headers, no folder to write to) is evaluated operation by operation, and
one line says so.
"""

from __future__ import annotations

import logging
import types as python_types
import warnings
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nepcore.physics import products

from .rows import Results, Rows, Shape, Tables, evaluate, evaluate_by_autograd

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .protocol import Form

logger = logging.getLogger("nepcore")

_NUMBERS = count()

_ALL_TYPES = 16
"""Up to this many types a GPU's tables hold all of them, and their number is a constant of the code."""

_ROWS = 16
"""Rows come in multiples: a processor's vectors then have no remainder, which would be computed in another way."""


class CompiledBlock:
    """Blocks evaluated by compiled code; see :class:`nepcore.backends.pairwise.Block`.

    Args:
        shape: What the code depends on.
        form: The form of the sums.
        device: Where it computes.
        by_autograd: Compile :func:`with_forces_inside` instead of :func:`nepcore.backends.rows.evaluate`.

    Attributes:
        fault: Why it is evaluated operation by operation instead; empty while nothing went wrong.
    """

    def __init__(self, shape: Shape, form: Form, device: torch.device, *, by_autograd: bool = False) -> None:
        self.fault = ""
        self._on_gpu = device.type != "cpu"
        self._by_autograd = by_autograd
        self._shape, self._form = shape, form
        self._plain = lambda tables, rows: evaluate(shape, form, tables, rows)
        self._compiled: Callable[[Tables, Rows], Results] | None = None

    def types(self, present: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """See :class:`nepcore.backends.pairwise.Block`.

        On a CPU the tables hold every type: code for another number of them could round in another way, and results
        would depend on what else is in the batch. On a GPU they hold at least two, since one is another case to the
        compiler.
        """
        if count <= _ALL_TYPES or not self._on_gpu:
            return np.arange(count)
        return present if len(present) > 1 else np.unique([present[0], (present[0] + 1) % count])

    def rows(self, n: int) -> int:
        """See :class:`nepcore.backends.pairwise.Block`."""
        return -(-n // _ROWS) * _ROWS

    def __call__(self, tables: Tables, rows: Rows) -> Results:
        """See :class:`nepcore.backends.pairwise.Block`."""
        if self.fault:
            return self._plain(tables, rows)
        try:
            if self._compiled is None:
                self._compiled = self._compile(tables)
            return self._compiled(tables, rows)
        except Exception as error:  # compilers fail in many ways, none of which is worth an answer
            if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
                raise
            self.fault = _reason(error)
            logger.warning("torch cannot compile here, the model is evaluated without: %s", self.fault)
            logger.debug("the whole error:", exc_info=error)
        return self._plain(tables, rows)

    def _compile(self, tables: Tables) -> Callable[[Tables, Rows], Results]:
        """Compile for sizes that differ from each other, since equal ones would be taken for one size."""
        # Some builds of torch do not import it by themselves, and tracing may look it up.
        import torch.backends.opt_einsum

        example = _example(tables)
        function = self._plain
        if self._by_autograd:
            function = with_forces_inside(self._shape, self._form, tables, example)
        compiled: Callable[[Tables, Rows], Results] = torch.compile(_own_code(function), fullgraph=True)
        with warnings.catch_warnings():
            # It is off on purpose: ten bits are too few for energies.
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            compiled(tables, example)
        return compiled


def with_forces_inside(shape: Shape, form: Form, tables: Tables, rows: Rows) -> Callable[[Tables, Rows], Results]:
    """:func:`evaluate_by_autograd` as a graph of plain operations that holds the first derivatives.

    It can be compiled and differentiated once more by the parameters, which a compiler cannot do with a call of
    autograd inside. Sizes that differ in the example stay variable.

    Args:
        shape: What the code depends on.
        form: The form of the sums.
        tables, rows: An example.
    """
    # Some builds of torch do not import it by themselves, and tracing may look it up.
    import torch.backends.opt_einsum
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(tables: Tables, rows: Rows) -> tuple[Tensor, ...]:
        return tuple(evaluate_by_autograd(shape, form, tables, rows))

    with products.traced():
        traced = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(tables, rows)
    # What autograd saves for its way back is detached, which would cut the second derivatives off.
    for node in list(traced.graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)
    traced.recompile()
    return lambda tables, rows: Results(*traced(tables, rows))


def _own_code(function: Any) -> Any:
    """The same function with code of its own: compiled code is kept by code object, a few versions of each."""
    code = function.__code__.replace(co_name=f"block_{next(_NUMBERS)}")
    return python_types.FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)


def _example(tables: Tables) -> Rows:
    """Rows whose numbers and slots are marked as dynamic; all slots empty."""
    A, w, v = 1040, 96, 48
    c = tables.c_radial
    far = 2.0 * float(tables.cutoff_radial.max())

    def dynamic(tensor: Tensor, *dims: int) -> Tensor:
        for dim in dims:
            torch._dynamo.mark_dynamic(tensor, dim)  # noqa: SLF001 (this is its public name)
        return tensor

    def types(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=c.device)

    return Rows(
        dynamic(types(A), 0),
        dynamic(c.new_full((A, w), far), 0, 1),
        dynamic(types(A, w), 0, 1),
        dynamic(c.new_full((A, v), far), 0, 1),
        dynamic(types(A, v), 0, 1),
        dynamic(c.new_zeros((3, A, v)), 1, 2),
        dynamic(c.new_full((A,), 300.0), 0),
    )


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause that says something."""
    while error.__cause__ is not None and str(error.__cause__):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
