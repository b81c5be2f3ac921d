"""One step: gradient of the loss of a batch, then Adam. On a GPU the whole of it is one graph that is replayed.

A step whose loss or gradient is not finite changes nothing. Everything that a step reads or writes stays where it is,
so that a captured step goes on to see the learning rate and the weights of the loss.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import loss
from .distributed import Group
from .forward import SUMS, make

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from nepcore.files.nep_txt import NepFile

    from .batches import Arrays, Part
    from .forward import Forward
    from .parameters import Layout
    from .settings import Settings

logger = logging.getLogger("nepcore")

BETAS = (0.9, 0.999)
EPSILON = 1e-8

OFFSET_MEMORY = 256.0
"""Frames over which the energy offset is averaged while parameters change; it is solved for all frames at the end."""

MOST_GRAPHS = 96


@dataclass(eq=False)
class State:
    """What a step changes, on the device.

    Attributes:
        vector: Parameters, (N,).
        first, second: Adam's moments, (N,).
        count: Steps since the moments were zero, () float64.
        bias: Common energy offset, subtracted, eV, () float64.
        totals: Sums since the last epoch, (12,) float64: loss, l1, l2, squares (3), labels (3), steps, skipped steps,
            and whether the last step was skipped.
    """

    vector: Tensor
    first: Tensor
    second: Tensor
    count: Tensor
    bias: Tensor
    totals: Tensor

    @classmethod
    def of(cls, vector: Tensor, bias: float) -> State:
        """Before the first step."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=vector.device)

        return cls(
            vector, torch.zeros_like(vector), torch.zeros_like(vector), zeros(), zeros() + bias, zeros(12),
        )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """All of it by name."""
        return dict(vars(self))

    def copy(self) -> dict[str, Tensor]:
        """A copy of all of it."""
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take the values of a copy."""
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])

    def forget(self) -> None:
        """Start Adam anew."""
        for tensor in (self.first, self.second, self.count):
            tensor.zero_()


class Stepper:
    """Makes steps.

    Args:
        model: Sizes, cutoffs.
        settings: Form of the loss, regularisation, decay, clipping.
        layout: Of the vector of parameters.
        state: What is changed.
        q_scaler: (D,).
        backend: Name of the way to compute.
        group: The processes that share each batch.
        graphs: Capture steps as graphs.
        compiled: Let torch compile the parts of a step.
    """

    def __init__(
        self, model: NepFile, settings: Settings, layout: Layout, state: State, q_scaler: Tensor, *,
        backend: str = SUMS, group: Group | None = None, graphs: bool = False, compiled: bool = False,
    ) -> None:  # fmt: skip
        self.settings, self.layout, self.state, self.q_scaler = settings, layout, state, q_scaler
        self.group = Group() if group is None else group
        device, dtype = state.vector.device, state.vector.dtype
        self.device = device
        self.forward: Forward = make(backend, model, dtype, device, compiled=compiled)
        self.decay = layout.decayed(dtype).to(device) * settings.weight_decay
        self.lr = torch.zeros((), dtype=torch.float64, device=device)
        self.lambdas = torch.zeros(3, dtype=torch.float64, device=device)
        self.labels = torch.zeros(3, dtype=torch.float64, device=device)
        self._graphs: dict[Any, _Captured] = {}
        self._capturing = graphs and device.type == "cuda" and self.group.size == 1
        self._evaluations: dict[Any, tuple[_Captured, loss.Sums]] = {}
        self._pool: Any = None
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def set(self, lr: float, lambdas: Sequence[float]) -> None:
        """Learning rate and weights of the loss from now on."""
        self.lr.fill_(lr)
        self.lambdas.copy_(torch.tensor(lambdas, dtype=torch.float64))

    def step(self, parts: Sequence[Part], labels: Sequence[float]) -> None:
        """One step; nothing is waited for.

        Args:
            parts: The batch in one or more pieces, of this process; none, where it has no frame of this batch.
            labels: Labels of the whole batch, of all processes, as in :class:`nepcore.training.loss.Sums`.
        """
        self.labels.copy_(torch.tensor(list(labels), dtype=torch.float64), non_blocking=True)
        if self._capturing and len(parts) == 1:
            self._replay(*parts[0])
            return
        self._apply(*self._gradient([(self._uploaded(arrays), w) for arrays, w in parts]))

    def errors(self, arrays: Arrays, widths: tuple[int, int], *, forces: bool = True) -> loss.Sums:
        """Sums of a batch, without gradient."""
        if (
            self._capturing
            and forces
            and arrays.blob.is_pinned()
            and (found := self._replayed_errors(arrays, widths)) is not None
        ):
            return found
        with torch.no_grad():
            return self._compute(self._uploaded(arrays), widths, self.state.vector, forces=forces)

    def found(self, arrays: Arrays, widths: tuple[int, int]) -> Any:
        """Predictions of a batch, without gradient; see :class:`nepcore.training.forward.Found`."""
        with torch.no_grad():
            arrays = arrays.to(self.device)
            parameters = self.layout.views(self.state.vector)
            return self.forward(parameters, self.q_scaler, arrays, self.forward.prepare(arrays, widths))

    def gradient(self, parts: Sequence[Part], labels: Sequence[float]) -> Tensor:
        """Gradient of the loss of a batch without regularisation, (N,)."""
        self.labels.copy_(torch.tensor(list(labels), dtype=torch.float64))
        return self._gradient([(arrays.to(self.device), w) for arrays, w in parts])[0]

    def local_gradient(self, arrays: Arrays, widths: tuple[int, int]) -> Tensor:
        """Gradient of the weighted squares of this process's frames, (N,)."""
        leaf = self.state.vector.detach().requires_grad_()
        part = self._compute(arrays.to(self.device), widths, leaf)
        return torch.autograd.grad((part.weighted * self.lambdas).sum(), leaf)[0]

    def _compute(self, arrays: Arrays, widths: tuple[int, int], vector: Tensor, *, forces: bool = True) -> loss.Sums:
        with torch.no_grad():
            prepared = self.forward.prepare(arrays, widths)
        found = self.forward(self.layout.views(vector), self.q_scaler, arrays, prepared, forces)
        return loss.sums(arrays, found, self.state.bias, self.settings.lambda_shear)

    def _gradient(self, parts: Sequence[Part]) -> tuple[Tensor, loss.Sums]:
        form = self.settings.loss
        empty = loss.Sums(*(self.lambdas.new_zeros(n) for n in (3, 3, 3, 2)))
        total = empty
        if form == "rmse" and len(parts) > 1:
            # The factors of a root want the sum over all parts first.
            for arrays, widths in parts:
                total = _added(total, self.errors(arrays, widths))
            total = self._shared(total)
            known: Tensor | None = loss.factors(total.weighted, self.labels, self.lambdas, form)
        else:
            known = loss.factors(empty.weighted, self.labels, self.lambdas, form) if form == "mse" else None
        gradient = torch.zeros_like(self.state.vector)
        after = empty
        held = []
        for arrays, widths in parts:
            leaf = self.state.vector.detach().requires_grad_()
            part = self._compute(arrays, widths, leaf)
            after = _added(after, loss.Sums(*(t.detach() for t in part)))
            if known is None:
                held.append((leaf, part.weighted))
            else:
                gradient += torch.autograd.grad((part.weighted * known).sum(), leaf)[0]
        if form == "mse" or len(parts) <= 1:
            total = self._shared(after)
        if known is None:
            known = loss.factors(total.weighted, self.labels, self.lambdas, form)
            for leaf, weighted in held:
                gradient += torch.autograd.grad((weighted * known).sum(), leaf)[0]
        self.group.add(gradient)
        return gradient, total

    def _shared(self, found: loss.Sums) -> loss.Sums:
        """Sums of all processes."""
        if self.group.size == 1:
            return found
        flat = torch.cat(list(found))
        self.group.add(flat)
        return loss.Sums(*torch.split(flat, [3, 3, 3, 2]))

    def _apply(self, gradient: Tensor, found: loss.Sums) -> None:
        """Change the state, or, where anything is not finite, leave it as it is."""
        s, state, dtype = self.settings, self.state, self.state.vector.dtype
        total = loss.terms(found.weighted, self.labels, self.lambdas, s.loss).sum()
        l1 = l2 = torch.zeros_like(total)
        if s.lambda_1 or s.lambda_2:
            l1, l2, slope = (t.to(torch.float64) for t in loss.regularisation(state.vector, s.lambda_1, s.lambda_2))
            total, gradient = total + l1 + l2, gradient + slope.to(dtype)
        norm = torch.linalg.vector_norm(gradient)
        good = torch.isfinite(norm + total)
        kept = good.to(torch.float64)
        if s.max_grad_norm > 0.0:
            gradient = gradient * (s.max_grad_norm / norm.clamp(min=s.max_grad_norm))
        gradient = torch.where(good, gradient, 0.0)
        state.count.add_(kept)
        weight = kept.to(dtype)
        state.first.lerp_(gradient, weight * (1.0 - BETAS[0]))
        state.second.lerp_(gradient * gradient, weight * (1.0 - BETAS[1]))
        begun = [(1.0 - beta**state.count).clamp(min=1e-30) for beta in BETAS]
        lr = self.lr * kept
        if s.weight_decay:
            state.vector.mul_(1.0 - lr.to(dtype) * self.decay)
        root = torch.sqrt(state.second) * torch.rsqrt(begun[1]).to(dtype) + EPSILON
        state.vector.sub_((lr / begun[0]).to(dtype) * state.first / root)
        share = self.labels[0] / (self.labels[0] + OFFSET_MEMORY)
        known = good & (found.offset[1] > 0.0)
        state.bias.add_(torch.where(known, share * found.offset[0] / found.offset[1], 0.0))
        row = torch.cat([torch.stack([total, l1, l2]), found.plain, found.labels, torch.ones_like(total)[None]])
        state.totals[:10].add_(torch.where(good, row, 0.0))
        state.totals[10].sub_(kept - 1.0)
        state.totals[11].copy_(1.0 - kept)

    def _uploaded(self, arrays: Arrays) -> Arrays:
        """Arrays on the device; they go there while the step before computes."""
        if self._copies is None or not arrays.blob.is_pinned():
            return arrays.to(self.device)
        now = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._copies):
            blob = arrays.blob.to(self.device, non_blocking=True)
        now.wait_stream(self._copies)
        blob.record_stream(now)
        return arrays.at(blob)

    def _replay(self, arrays: Arrays, widths: tuple[int, int]) -> None:
        key = (arrays.rows, widths)
        found = self._graphs.get(key)
        if found is None:
            if len(self._graphs) >= MOST_GRAPHS:
                self._apply(*self._gradient([(self._uploaded(arrays), widths)]))
                return

            def whole(static: Arrays) -> None:
                self._apply(*self._gradient([(static, widths)]))

            found = self._graphs[key] = self._capture(arrays, whole)[0]
        found.arrays.blob.copy_(self._uploaded(arrays).blob)
        found.graph.replay()

    def _replayed_errors(self, arrays: Arrays, widths: tuple[int, int]) -> loss.Sums | None:
        key = (arrays.rows, widths)
        if key not in self._evaluations:
            if len(self._evaluations) >= MOST_GRAPHS:
                return None

            @torch.no_grad()
            def whole(static: Arrays) -> loss.Sums:
                return self._compute(static, widths, self.state.vector)

            self._evaluations[key] = self._capture(arrays, whole)
        captured, out = self._evaluations[key]
        captured.arrays.blob.copy_(self._uploaded(arrays).blob)
        captured.graph.replay()
        return loss.Sums(*(t.clone() for t in out))

    def _capture(self, arrays: Arrays, work: Callable[[Arrays], Any]) -> tuple[_Captured, Any]:
        device = self.device
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        static = arrays.to(device)
        kept = self.state.copy()
        # Libraries set themselves up, and compilers compile, at first calls, which must not be part of a capture.
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(2):
                work(static)
            self.state.restore(kept)
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = work(static)
        return _Captured(graph, static), out


@dataclass(frozen=True, eq=False)
class _Captured:
    graph: Any
    arrays: Arrays


def _added(a: loss.Sums, b: loss.Sums) -> loss.Sums:
    return loss.Sums(*(x + y for x, y in zip(a, b, strict=True)))
