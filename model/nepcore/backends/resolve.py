"""Which backend evaluates a model: the one that was asked for, the one that measurements chose, or that of the rule."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nepcore.errors import ModelError

from . import candidates, choices
from .chosen import ChosenBackend
from .measure import CLASSES, Report, measure

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch

    from nepcore.files.nep_txt import NepFile

    from .protocol import Backend

logger = logging.getLogger("nepcore")

_LOOP_TYPES = 20
_GPU_MULSUM_TYPES = 32


def by_rule(device_type: str, n_types: int, *, compiled: bool = False) -> str:
    """Name of the form that measurements on other machines favour.

    On a GPU (CUDA and ROCm) ``mulsum``, but ``bmm`` above 32 types where nothing is compiled. On a CPU and on MPS
    ``loop`` below 20 types and ``bmm`` from 20 on.
    """
    if device_type == "cuda":
        return "mulsum" if compiled or n_types <= _GPU_MULSUM_TYPES else "bmm"
    return "loop" if n_types < _LOOP_TYPES else "bmm"


@dataclass(frozen=True)
class Resolved:
    """A backend, and how it came to be the one.

    Attributes:
        backend: Ready to evaluate.
        how: ``asked``, ``rule`` (asked for), ``measured`` (now), ``cached`` (measured at another start), or
            ``unmeasured``, where the rule stands in.
        report: What was measured, as of :class:`nepcore.backends.measure.Report`; empty where nothing was.
    """

    backend: Backend
    how: str
    report: dict[str, Any] = field(default_factory=dict)


def resolve(name: str, model: NepFile, device: torch.device, dtype: str, memory: float) -> Resolved:
    """Build the backend of a model without measuring anything.

    Args:
        name: ``auto`` (what was measured before, or else the rule), ``rule``, or the name of a candidate.
        model: The model.
        device: Where it computes.
        dtype: ``float32`` or ``float64``.
        memory: Bytes for intermediate arrays.

    Raises:
        ModelError: No backend of that name, or none for that device.
    """
    if name not in {"auto", "rule"}:
        return Resolved(candidates.make(name, model, device, dtype, memory), "asked")
    if name == "auto":
        report = choices.read(choices.key_of(model, device, dtype))
        if report is not None and (found := of_report(report, model, device, dtype, memory, "cached")) is not None:
            return found
        at_hand = device.type == "cpu" and candidates.FUSED_CPU in candidates.names()
        if at_hand and candidates.is_compiled(model, dtype):
            return Resolved(candidates.make(candidates.FUSED_CPU, model, device, dtype, memory), "unmeasured")
    chosen = by_rule(device.type, len(model.elements))
    how = "rule" if name == "rule" else "unmeasured"
    return Resolved(candidates.make(chosen, model, device, dtype, memory), how)


def tune(
    current: Resolved, model: NepFile, device: torch.device, dtype: str, memory: float, seconds: float
) -> Generator[dict[str, Any], None, Resolved]:
    """Measure the candidates, keep the choice on disk, and build what was chosen; ``current`` where that fails.

    Yields what is being done, JSON-able. An interrupt (Ctrl-C) ends the measuring, and what was measured decides.
    """
    key = choices.key_of(model, device, dtype)
    try:
        report = yield from measure(model, device, dtype, memory, seconds, earlier=choices.read(key))
        found = of_report(report, model, device, dtype, memory, "measured")
    except Exception as error:  # a server must start with the rule's backend, whatever measuring ran into
        logger.warning("measuring the backends failed, the rule decides: %s", error)
        logger.debug("the whole error:", exc_info=error)
        return current
    if found is None:
        logger.warning("no backend could be measured, the rule decides")
        return current
    choices.write(key, report)
    return found


def of_report(
    report: Report, model: NepFile, device: torch.device, dtype: str, memory: float, how: str
) -> Resolved | None:
    """The backend that a report chose; None where it cannot be built, or the report chose none."""
    if set(report.choice) != set(CLASSES):
        return None
    built: dict[str, Backend] = {}
    try:
        for name in report.choice.values():
            if name not in built:
                built[name] = candidates.make(name, model, device, dtype, memory)
    except (ModelError, ImportError) as error:
        logger.warning("the backend that was chosen earlier cannot be built, the rule decides: %s", error)
        return None
    backend = ChosenBackend({where: built[name] for where, name in report.choice.items()})
    return Resolved(backend, how, report.to_dict())
