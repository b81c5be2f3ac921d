"""Which backend evaluates a model: by name, or by the rule for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nepcore.errors import ModelError
from nepcore.potential import DTYPES, NEP

from .forms import FORMS
from .pairwise import EagerBlock, PairwiseBackend
from .rows import Shape

if TYPE_CHECKING:
    from nepcore.backends.protocol import Backend
    from nepcore.files.nep_txt import NepFile

FUSED_CPU = "fused-cpu"
"""Name of the numba backend, :mod:`nepcore.backends.fused_cpu`."""

NAMES: tuple[str, ...] = (*FORMS, FUSED_CPU)

_LOOP_TYPES = 20
_GPU_MULSUM_TYPES = 32


def by_rule(device_type: str, n_types: int) -> str:
    """Name of the backend that measurements on other machines favour.

    On a GPU ``mulsum`` up to 32 types and ``bmm`` above; on a CPU (and MPS) ``loop`` below 20 types, ``bmm`` from 20.
    """
    if device_type == "cuda":
        return "mulsum" if n_types <= _GPU_MULSUM_TYPES else "bmm"
    return "loop" if n_types < _LOOP_TYPES else "bmm"


def make(name: str, model: NepFile, device: torch.device, dtype: str, memory: float) -> Backend:
    """Build a backend.

    Args:
        name: One of :data:`NAMES`, or ``auto``.
        model: The model.
        device: Where it computes.
        dtype: ``float32`` or ``float64``.
        memory: Bytes for intermediate arrays.

    Raises:
        ModelError: No backend of that name, or none for that device.
    """
    chosen = by_rule(device.type, len(model.elements)) if name == "auto" else name
    if chosen == FUSED_CPU:
        if device.type != "cpu":
            raise ModelError(f"the backend {FUSED_CPU} computes on a CPU, not on {device}")
        try:
            from .fused_cpu import FusedCPU
        except ImportError as error:
            raise ModelError(f"the backend {FUSED_CPU} needs the package numba: {error}") from error
        return FusedCPU(model, dtype, torch.get_num_threads())
    if chosen not in FORMS:
        raise ModelError(f"there is no backend {name!r}; there are: auto, {', '.join(NAMES)}")
    potential = NEP(model, DTYPES[dtype]).to(device)
    block = EagerBlock(Shape.of(potential), FORMS[chosen])
    return PairwiseBackend(chosen, potential, model.admission, block, memory)
