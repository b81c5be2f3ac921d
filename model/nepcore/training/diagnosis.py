"""Which frame and which term of the loss made a step impossible."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .batches import assemble, widths
from .loss import TERMS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .dataset import Dataset
    from .stepper import Stepper


def diagnose(stepper: Stepper, data: Dataset, frames: NDArray[np.int64]) -> str:
    """In words: the first frame whose loss, or its gradient, is not finite with the parameters as they are."""
    for frame in frames.tolist():
        arrays = assemble(data, frames[frames == frame])
        w = widths(arrays, pad=False)
        found = stepper.errors(arrays, w)
        lost = ~torch.isfinite(found.weighted)
        if bool(lost.any()):
            return f"{data.name(frame)}: the {TERMS[int(lost.to(torch.int64).argmax())]} term is not finite"
    for frame in frames.tolist():
        arrays = assemble(data, frames[frames == frame])
        w = widths(arrays, pad=False)
        kept = stepper.lambdas.clone()
        for k, term in enumerate(TERMS):
            stepper.lambdas.zero_()
            stepper.lambdas[k] = kept[k]
            lost = ~torch.isfinite(stepper.local_gradient(arrays, w))
            if bool(lost.any()):
                stepper.lambdas.copy_(kept)
                return f"{data.name(frame)}: the gradient of the {term} term is not finite"
        stepper.lambdas.copy_(kept)
    names = ", ".join(str(int(i) + 1) for i in data.frames.indices[frames][:8])
    return f"{data.frames.path}, frames {names}: finite one by one, but not together"
