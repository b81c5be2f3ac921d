"""What can be chosen from: every way to evaluate a model, by its name. Others join by :func:`register`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nepcore.errors import ModelError
from nepcore.potential import DTYPES, NEP

from .compiled import CompiledBlock
from .forms import FORMS
from .graphs import GraphBlock
from .pairwise import Block, EagerBlock, PairwiseBackend
from .rows import Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from nepcore.files.nep_txt import NepFile

    from .protocol import Backend

FUSED_CPU = "fused-cpu"
"""Name of the numba backend, :mod:`nepcore.backends.fused_cpu`."""

FUSED = "fused"
"""Name of the Triton backend, :mod:`nepcore.backends.fused`."""

FUSED_SECONDS = 45.0
"""What Triton takes to compile the kernels of one model, about, where it has not yet been."""

COMPILED = "+compiled"
"""Ending of the names of forms that torch compiles."""

AUTOGRAD = "+autograd"
"""Ending of the names of compiled forms whose forces are derivatives that torch found, instead of formulas."""

COMPILE_SECONDS = {"cpu": 120.0, "cuda": 60.0}
"""What torch takes to compile a model, about."""

FUSED_CPU_SECONDS = 25.0
"""What numba takes to compile one, about, where it has not yet been."""

GRAPHS = "+graphs"
"""Ending of the names of forms whose small blocks are replayed as graphs."""

LOOP_TYPES = 8
"""Most types for which the loop over pairs of types is compiled: its code grows with them."""


@dataclass(frozen=True)
class Candidate:
    """A way to evaluate models.

    Attributes:
        name: By which it is asked for and reported.
        make: Builds the backend of a model, from the model, the device, the name of the dtype and the bytes for
            intermediate arrays.
        unfit: Says why it cannot evaluate a model on a device, or an empty text.
        preparation: Seconds that its first use takes, about (compilation), for a model, a device and a dtype.
        rank: Lower ones are measured first, while there is time: negative for those that are likely to win, 0 for
            those that run at once, positive for those that torch compiles.
    """

    name: str
    make: Callable[[NepFile, torch.device, str, float], Backend]
    unfit: Callable[[NepFile, torch.device], str] = lambda _model, _device: ""
    preparation: Callable[[NepFile, torch.device, str], float] = lambda _model, _device, _dtype: 0.0
    rank: int = 0


_REGISTERED: dict[str, Candidate] = {}


def register(candidate: Candidate) -> None:
    """Add a candidate: it can then be asked for by name, and is among those that are measured."""
    _REGISTERED[candidate.name] = candidate


def every() -> tuple[Candidate, ...]:
    """All candidates: those made from :data:`nepcore.backends.forms.FORMS`, and those registered."""
    captured = [form for form in FORMS if form != "loop"]  # the loop has to wait for the device
    return (
        *(_of_form(form) for form in FORMS),
        *_REGISTERED.values(),
        *(_of_form(form, graphs=True) for form in captured),
        *(_of_form(form, compiled=True) for form in reversed(FORMS)),
        *(_of_form(form, compiled=True, graphs=True) for form in reversed(captured)),
        _of_form("density", compiled=True, autograd=True),
    )


def names() -> tuple[str, ...]:
    """Names of all candidates."""
    return tuple(candidate.name for candidate in every())


def get(name: str) -> Candidate:
    """The candidate of that name.

    Raises:
        ModelError: There is none.
    """
    for candidate in every():
        if candidate.name == name:
            return candidate
    raise ModelError(f"there is no backend {name!r}; there are: auto, rule, {', '.join(names())}")


def make(name: str, model: NepFile, device: torch.device, dtype: str, memory: float) -> Backend:
    """Build the backend of that name.

    Raises:
        ModelError: There is none, or it cannot evaluate this model on this device.
    """
    candidate = get(name)
    if reason := candidate.unfit(model, device):
        raise ModelError(f"the backend {name} cannot be used: {reason}")
    return candidate.make(model, device, dtype, memory)


def _of_form(form: str, *, compiled: bool = False, graphs: bool = False, autograd: bool = False) -> Candidate:
    name = form + (COMPILED if compiled else "") + (AUTOGRAD if autograd else "") + (GRAPHS if graphs else "")

    def build(model: NepFile, device: torch.device, dtype: str, memory: float) -> Backend:
        potential = NEP(model, DTYPES[dtype]).to(device)
        shape = Shape.of(potential)
        block: Block = EagerBlock(shape, FORMS[form])
        if compiled:
            block = CompiledBlock(shape, FORMS[form], device, by_autograd=autograd)
        if graphs:
            block = GraphBlock(block, memory)
        return PairwiseBackend(name, potential, model.admission, block, memory)

    def unfit(model: NepFile, device: torch.device) -> str:
        if graphs and device.type != "cuda":
            return f"graphs are captured on a GPU, not on {device}"
        many = compiled and form == "loop" and len(model.elements) > LOOP_TYPES
        return f"the loop is compiled for up to {LOOP_TYPES} types, not {len(model.elements)}" if many else ""

    def preparation(model: NepFile, device: torch.device, dtype: str) -> float:
        del model, dtype
        return COMPILE_SECONDS.get(device.type, 60.0) if compiled else 0.0

    return Candidate(name, build, unfit, preparation, 2 * (compiled + autograd) + graphs)


def _fused_cpu() -> Candidate:
    def build(model: NepFile, device: torch.device, dtype: str, memory: float) -> Backend:
        del device, memory
        from .fused_cpu import FusedCPU

        return FusedCPU(model, dtype, torch.get_num_threads())

    def unfit(model: NepFile, device: torch.device) -> str:
        del model
        if device.type != "cpu":
            return f"it computes on a CPU, not on {device}"
        return "" if importlib.util.find_spec("numba") is not None else "it needs the package numba"

    def preparation(model: NepFile, device: torch.device, dtype: str) -> float:
        del device
        return 0.0 if is_compiled(model, dtype) else FUSED_CPU_SECONDS

    return Candidate(FUSED_CPU, build, unfit, preparation, -1)


def _fused() -> Candidate:
    def build(model: NepFile, device: torch.device, dtype: str, memory: float) -> Backend:
        if dtype != "float32":
            raise ModelError(f"the backend {FUSED} computes in float32, not in {dtype}")
        from .fused.backend import Fused
        from .resolve import by_rule

        def fallback() -> Backend:
            return make(by_rule(device.type, len(model.elements)), model, device, dtype, memory)

        return Fused(model, device, memory, fallback)

    def unfit(model: NepFile, device: torch.device) -> str:
        if device.type != "cuda":
            return f"it computes on a GPU, not on {device}"
        if importlib.util.find_spec("triton") is None:
            return "it needs Triton, which PyTorch's packages for GPUs bring along"
        from .fused.model import unfit as unfit_model

        return unfit_model(model)

    return Candidate(FUSED, build, unfit, lambda _model, _device, _dtype: FUSED_SECONDS, -1)


def is_compiled(model: NepFile, dtype: str) -> bool:
    """Whether numba's code for a model of this shape lies on the disk, so that ``fused-cpu`` starts at once."""
    if importlib.util.find_spec("numba") is None:
        return False
    from . import fused_cpu

    known = getattr(fused_cpu, "is_compiled", None)
    return bool(known(model, dtype)) if known is not None else False


register(_fused_cpu())
register(_fused())
