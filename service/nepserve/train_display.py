"""What a training says while it runs: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress as Bar
    from typing_extensions import Self

    from nepcore.training import Errors, Progress

LINE_EVERY = 10.0
"""Seconds between lines where there is no terminal; the first and the last epoch have one in any case."""

ROWS = 40
"""Lines that stay on a terminal in a whole run."""


class Display:
    """Shows the records of a training on the standard error.

    Args:
        epochs: Epochs of the whole run.
        shown: Whether epochs are shown. Messages are in either case.
    """

    def __init__(self, epochs: int, *, shown: bool = True) -> None:
        self._epochs = epochs
        self._shown = shown
        self._bar: Bar | None = None
        self._last = 0.0
        self._every = max(1, epochs // ROWS)

    def __enter__(self) -> Self:
        if self._shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(bar_width=30), TextColumn("{task.fields[text]}"),
                console=Console(stderr=True, highlight=False), transient=True,
            )  # fmt: skip
            self._bar.add_task("training", total=self._epochs, text="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def add(self, record: Progress) -> None:
        """Show a record."""
        for text in record.messages:
            self.say(text)
        if not self._shown or record.kind in {"stopped", "finished"}:
            return
        now = time.monotonic()
        if self._bar is not None:
            done = record.epoch - (record.kind == "step")
            self._bar.update(self._bar.task_ids[0], completed=done, description=f"epoch {record.epoch}/{record.epochs}",
                             text=f"lr {record.lr:.2g}  {_pace(record)}")  # fmt: skip
            if record.kind == "epoch" and (record.epoch in {1, record.epochs} or record.epoch % self._every == 0):
                self.say(line(record))
        elif record.epoch in {1, record.epochs} or now - self._last >= LINE_EVERY:
            self._last = now
            self.say(f"{line(record)}  {_pace(record)}")

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)  # noqa: T201 - this is what it is for


def line(record: Progress) -> str:
    """An epoch in a line: losses, errors of the training frames and of those that are validated on."""
    parts = [f"epoch {record.epoch}/{record.epochs}" + (" (running)" if record.kind == "step" else "")]
    if record.stage > 1:
        parts.append(f"stage {record.stage}")
    parts += [f"loss {record.loss:.4g}", f"train {errors(record.train)}"]
    if record.valid is not None:
        parts.append(f"valid {errors(record.valid)}{' *' if record.best else ''}")
    return "  ".join([*parts, f"lr {record.lr:.2g}"])


def errors(found: Errors) -> str:
    """Root mean squares: E in meV/atom, F in meV/Å, V in meV/atom; what has no labels is left out."""
    values = (("E", found.energy), ("F", found.force), ("V", found.virial))
    return " ".join(f"{name} {1000 * value:.4g}" for name, value in values if value is not None) or "no labels"


def _pace(record: Progress) -> str:
    text = f"{record.frames_per_second:,.0f} frames/s"
    if record.seconds_left is not None:
        minutes, seconds = divmod(round(record.seconds_left), 60)
        hours, minutes = divmod(minutes, 60)
        text += f", {hours}:{minutes:02d}:{seconds:02d} left"
    return text
