"""``nepserve tune``: measure every way to evaluate a model on this machine, and keep the choice for the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import nepcore

from .models import locate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EVERYTHING = 1e9
"""Seconds of a budget that leaves nothing out."""


def tune(
    model: Path,
    *,
    device: str = "auto",
    dtype: str = "float32",
    seconds: float = EVERYTHING,
    say: Callable[[str], None] = lambda _: None,
) -> str:
    """Measure, keep what was chosen on disk, and return the table.

    An interrupt (Ctrl-C) ends the measuring: the table then has what was measured until then, which is kept.

    Args:
        model: A ``nep.txt`` or a folder with one.
        device: As of :func:`nepcore.load`.
        dtype: ``float32`` or ``float64``.
        seconds: Budget; left out, everything is measured, compiled forms included.
        say: Called with what is being measured.

    Raises:
        ModelFileError, ModelError: The model cannot be loaded, or no backend could be measured.
    """
    calculator = nepcore.load(locate(model), device=device, dtype=dtype)
    bound = "as long as it takes" if seconds >= EVERYTHING else f"for about {seconds:g} s"
    say(f"measuring on {calculator.device}, {bound}; Ctrl-C ends it and keeps what was measured")
    last = ""
    for step in calculator.tune(seconds, again=True):
        if step["what"] != last:
            last = step["what"]
            say(f"[{step['done'] + 1}/{step['total']}] {last}")
    choice = calculator.choice
    if choice["how"] != "measured":
        raise nepcore.ModelError(f"{model}: no backend was measured; the log says why")
    return table(choice)


def table(choice: dict[str, Any]) -> str:
    """What was measured, as text: a line for each candidate and batch, and what was chosen or why not."""
    header = ("backend", "batch", "ms", "µs/atom", "peak MiB", "error/allowed", "verdict")
    rows = [header]
    for row in choice["rows"]:
        timings = row["timings"] or [{}]
        for i, timing in enumerate(timings):
            rows.append(
                (
                    row["name"] if i == 0 else "",
                    timing.get("batch", ""),
                    _number(timing.get("milliseconds")),
                    _number(timing.get("microseconds_per_atom")),
                    _number(timing["peak_bytes"] / 2**20 if "peak_bytes" in timing else None),
                    _number(timing.get("error")),
                    row["verdict"] if i == 0 else "",
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header) - 1)]
    numbers = {2, 3, 4, 5}
    lines = []
    for row in rows:
        cells = [
            c.rjust(w) if k in numbers else c.ljust(w) for k, (c, w) in enumerate(zip(row[:-1], widths, strict=True))
        ]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    ended = "stopped by an interrupt; " if choice.get("interrupted") else ""
    chosen = ", ".join(f"{name} for {size} structures" for size, name in choice["choice"].items())
    return "\n".join([*lines, "", f"{ended}chosen: {chosen} ({choice['seconds']:.0f} s)"])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
