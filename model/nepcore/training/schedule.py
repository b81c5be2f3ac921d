"""Learning rate and end of a stage, epoch by epoch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .settings import Stage

THRESHOLD = 1e-4
"""Share by which a loss must fall to count as having fallen, of the plateau."""


@dataclass
class Schedule:
    """Where a stage stands.

    Attributes:
        stage: Its settings.
        epoch: Epochs of it that have ended.
        lr: Learning rate of the next one.
        least: Smallest loss so far, by steps of more than :data:`THRESHOLD`.
        waited: Epochs since it fell; counted anew when the plateau scheduler lowers the rate.
        best: Smallest loss so far.
        stalled: Epochs since then.
    """

    stage: Stage
    epoch: int = 0
    lr: float = 0.0
    least: float = math.inf
    waited: int = 0
    best: float = math.inf
    stalled: int = 0

    def __post_init__(self) -> None:
        self.lr = self.lr or self.stage.lr

    @property
    def over(self) -> str:
        """Why the stage is over: empty, ``epochs`` or ``early stop``."""
        if self.epoch >= self.stage.epochs:
            return "epochs"
        return "early stop" if 0 < self.stage.early_stop <= self.stalled else ""

    def end_epoch(self, loss: float) -> bool:
        """Take the loss of an epoch; says whether it is the best of the stage."""
        stage = self.stage
        self.epoch += 1
        better = loss < self.best
        self.best = min(self.best, loss) if math.isfinite(loss) else self.best
        self.stalled = 0 if better else self.stalled + 1
        if loss < self.least * (1.0 - THRESHOLD):
            self.least, self.waited = loss, 0
        else:
            self.waited += 1
        if stage.lr_scheduler == "cosine":
            done = min(1.0, self.epoch / max(1, stage.epochs))
            self.lr = stage.stop_lr + 0.5 * (stage.lr - stage.stop_lr) * (1.0 + math.cos(math.pi * done))
        elif stage.lr_scheduler == "step":
            power = self.epoch // stage.scheduler_step
            self.lr = max(min(stage.stop_lr, stage.lr), stage.lr * stage.scheduler_factor**power)
        elif self.waited > stage.scheduler_patience:
            self.lr = max(min(stage.stop_lr, stage.lr), self.lr * stage.scheduler_factor)
            self.waited = 0
        return better

    def as_dict(self) -> dict[str, Any]:
        """Everything but the settings, JSON-able."""
        values = asdict(self)
        del values["stage"]
        return values
