"""How far a long run is: a bar on a terminal, a line now and then elsewhere, nothing where it is not wanted."""

from __future__ import annotations

import sys
import time
from collections import deque
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
        self._here = 0
        self._blocks: deque[tuple[int, int, int]] = deque()

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

    def resumed(self, frames: int) -> None:
        """``frames`` frames were finished before this run."""
        self._frames = frames

    def begin(self, position: int | None, atoms: int, frames: int) -> None:
        """Another block, of ``atoms`` atoms, was read; the file now stands at ``position`` bytes."""
        self._blocks.append((position or 0, atoms, frames))
        self.step(0)

    def step(self, atoms: int) -> None:
        """``atoms`` atoms of the blocks that have begun and not ended are finished."""
        if not self._shown:
            return
        now = time.monotonic()
        at, left = float(self._here), atoms
        start = self._here
        for position, size, _ in self._blocks:
            at += (position - start) * (min(left / size, 1.0) if size else 0.0)
            left, start = max(left - size, 0), position
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=at, text=self._text(self._atoms + atoms, now))
        elif now - self._last >= LINE_EVERY:
            self._last = now
            share = f"{100 * at / self._total:.0f} %, " if self._total else ""
            self._print(f"{self._name}: {share}{self._text(self._atoms + atoms, now)}")

    def end(self) -> None:
        """The block that began first is finished."""
        self._here, atoms, frames = self._blocks.popleft()
        self._atoms += atoms
        self._frames += frames
        self.step(0)

    def say(self, text: str) -> None:
        """A line that matters, shown always."""
        self._print(text)

    def _text(self, atoms: int, now: float) -> str:
        speed = atoms / max(now - self._started, 1e-3)
        return f"{self._frames:,} frames, {atoms:,} atoms, {speed:,.0f} atoms/s"

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - this is what it is for
