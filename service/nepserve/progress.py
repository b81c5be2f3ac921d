"""How far a long run is: a bar on a terminal, a line now and then elsewhere, nothing where it is not wanted."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress as Bar
    from typing_extensions import Self

LINE_EVERY = 10.0
"""Seconds between lines where there is no terminal."""


class Progress:
    """Progress through a file that is read in blocks, on the standard error.

    Args:
        name: What is worked on.
        total: Its size in bytes; None if it is not known.
        shown: Whether anything is shown at all. :meth:`say` speaks in either case.
    """

    def __init__(self, name: str, total: int | None, *, shown: bool = True) -> None:
        self._name = name
        self._total = total
        self._shown = shown
        self._bar: Bar | None = None
        self._started = self._last = time.monotonic()
        self._frames = self._atoms = 0
        self._here = self._next = 0
        self._block_atoms = self._block_frames = 0

    def __enter__(self) -> Self:
        # What came before, as loading a model, is no part of the speed.
        self._started = self._last = time.monotonic()
        if self._shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:3.0f} %"),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.add_task(self._name, total=self._total, text="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def begin(self, position: int | None, atoms: int, frames: int) -> None:
        """A block of ``atoms`` atoms was read; the file now stands at ``position`` bytes."""
        self._next = position or 0
        self._block_atoms, self._block_frames = atoms, frames
        self.step(0)

    def step(self, atoms: int) -> None:
        """``atoms`` atoms of the block are finished."""
        if not self._shown:
            return
        now = time.monotonic()
        part = atoms / self._block_atoms if self._block_atoms else 0.0
        at = self._here + part * (self._next - self._here)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=at, text=self._text(self._atoms + atoms, now))
        elif now - self._last >= LINE_EVERY:
            self._last = now
            share = f"{100 * at / self._total:.0f} %, " if self._total else ""
            self._print(f"{self._name}: {share}{self._text(self._atoms + atoms, now)}")

    def end(self) -> None:
        """The block is finished."""
        self._atoms += self._block_atoms
        self._frames += self._block_frames
        self._here = self._next
        self._block_atoms = self._block_frames = 0
        self.step(0)

    def say(self, text: str) -> None:
        """A line that matters, shown always."""
        self._print(text)

    def _text(self, atoms: int, now: float) -> str:
        speed = atoms / max(now - self._started, 1e-3)
        return f"{self._frames:,} frames, {atoms:,} atoms, {speed:,.0f} atoms/s"

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - this is what it is for
