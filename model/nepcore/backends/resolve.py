"""Which backend evaluates a model: by name, or by the rule for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nepcore.errors import ModelError

from . import bmm, loop, mulsum
from .pairwise import PairwiseBackend

if TYPE_CHECKING:
    from nepcore.admission import Admission
    from nepcore.backends.protocol import Backend, Contraction
    from nepcore.potential import NEP

CONTRACTIONS: dict[str, Contraction] = {"loop": loop.contract, "bmm": bmm.contract, "mulsum": mulsum.contract}
"""Ways to contract basis and coefficients, by the name of the backend built on them."""

NAMES: tuple[str, ...] = tuple(CONTRACTIONS)

_LOOP_TYPES = 20
_GPU_MULSUM_TYPES = 32


def by_rule(device_type: str, n_types: int) -> str:
    """Name of the backend that measurements on other machines favour.

    On a GPU ``mulsum`` up to 32 types and ``bmm`` above; on a CPU (and MPS) ``loop`` below 20 types, ``bmm`` from 20.
    """
    if device_type == "cuda":
        return "mulsum" if n_types <= _GPU_MULSUM_TYPES else "bmm"
    return "loop" if n_types < _LOOP_TYPES else "bmm"


def make(name: str, potential: NEP, admission: Admission, memory: float) -> Backend:
    """Build a backend.

    Args:
        name: One of :data:`NAMES`, or ``auto``.
        potential: Parameters, on the device and in the dtype to compute with.
        admission: The model's door.
        memory: Bytes for intermediate arrays.

    Raises:
        ModelError: No backend of that name.
    """
    chosen = by_rule(potential.q_scaler.device.type, len(potential.elements)) if name == "auto" else name
    if chosen not in CONTRACTIONS:
        raise ModelError(f"there is no backend {name!r}; there are: auto, {', '.join(NAMES)}")
    return PairwiseBackend(chosen, potential, admission, CONTRACTIONS[chosen], memory)
