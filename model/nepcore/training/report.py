"""The report of a run: one HTML file with its figures inside, and the figures as files. Figures need matplotlib."""

from __future__ import annotations

import base64
import html
import io
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from nepcore.elements import symbol_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from .outputs import Evaluated
    from .progress import RunDirectory

MAX_POINTS = 20_000
"""Points of a parity plot, of each kind; more are thinned out, the largest errors stay."""

MAX_TYPES = 12
"""Elements that have a colour of their own."""

_TERMS = (("energy", "eV/atom"), ("force", "eV/Å"), ("virial", "eV/atom"))
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .9em;border-bottom:1px solid #ddd;text-align:left;"
    "vertical-align:top}td.n{text-align:right;font-variant-numeric:tabular-nums}img{max-width:100%}"
    "h2{margin-top:2em}li{margin:.2em 0}"
)


def write(
    directory: RunDirectory, title: str, tables: Sequence[tuple[str, Sequence[tuple[str, str]]]],
    records: Sequence[dict[str, Any]], evaluated: Sequence[Evaluated], messages: Sequence[str] = (),
) -> bool:  # fmt: skip
    """Write ``report.html`` and ``figures/``.

    Args:
        directory: Of the run.
        title: What the report is called.
        tables: Headings, and rows of names and texts.
        records: Epochs, see :func:`nepcore.training.outputs.records`.
        evaluated: Predictions beside references.
        messages: What was said during the run.

    Returns:
        Whether there are figures: without matplotlib the report has only its tables.
    """
    figures = _figures(records, evaluated)
    folder = directory.path / "figures"
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for heading, rows in tables:
        cells = "".join(f"<tr><th>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>" for a, b in rows)
        parts.append(f"<h2>{html.escape(heading)}</h2><table>{cells}</table>")
    parts.append(_errors(evaluated))
    for name, heading, figure in figures:
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=110)
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.png").write_bytes(data.getvalue())
        source = base64.b64encode(data.getvalue()).decode("ascii")
        parts.append(f'<h2>{html.escape(heading)}</h2><img alt="{html.escape(heading)}" ')
        parts.append(f'src="data:image/png;base64,{source}">')
    if messages:
        items = "".join(f"<li>{html.escape(text)}</li>" for text in messages)
        parts.append(f"<h2>Messages</h2><ul>{items}</ul>")
    text = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
    partial = directory.report.with_suffix(".html.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(directory.report)
    return bool(figures)


def _errors(evaluated: Sequence[Evaluated]) -> str:
    rows = []
    for found in evaluated:
        for name, unit in _TERMS:
            error = found.errors().get(name)
            if error is not None:
                rows.append(
                    f"<tr><td>{found.kind}</td><td>{name}</td><td class=n>{1000 * error['rmse']:.3f}</td>"
                    f"<td class=n>{1000 * error['mae']:.3f}</td><td>m{unit}</td>"
                    f"<td class=n>{int(error['labels']):,}</td></tr>"
                )
    head = "<tr><th>frames</th><th>of</th><th>RMSE</th><th>MAE</th><th></th><th>numbers</th></tr>"
    return f"<h2>Errors of the best model</h2><table>{head}{''.join(rows)}</table>"


def _figures(
    records: Sequence[dict[str, Any]], evaluated: Sequence[Evaluated]
) -> list[tuple[str, str, Figure]]:  # fmt: skip
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    found = []
    if records:
        found.append(
            ("learning", "Learning curves", _learning(Figure(figsize=(12, 3.6), layout="constrained"), records))
        )
    known = [e for e in evaluated if e.errors()]
    if known:
        found.append(("parity", "Predictions beside references",
                      _parity(Figure(figsize=(12, 4), layout="constrained"), known)))  # fmt: skip
        found.append(("errors", "Errors", _histograms(Figure(figsize=(12, 3.6), layout="constrained"), known)))
    return found


def _learning(figure: Figure, records: Sequence[dict[str, Any]]) -> Figure:
    epochs = np.array([r["epoch"] for r in records])
    axes = figure.subplots(1, 4)
    losses = _finite([r["loss"] for r in records])
    if np.isfinite(losses).any():
        axes[0].semilogy(epochs, losses, color="C0")
    rate = axes[0].twinx()
    rate.semilogy(epochs, _finite([r["lr"] for r in records]), color="0.6", lw=1)
    rate.set_ylabel("learning rate", color="0.5")
    axes[0].set_title("loss")
    for axis, (name, unit) in zip(axes[1:], _TERMS, strict=True):
        for kind, colour in (("train", "C0"), ("valid", "C1")):
            values = _finite([(r[kind] or {}).get(name) for r in records])
            if np.isfinite(values).any():
                axis.semilogy(epochs, 1000 * values, color=colour, label=kind)
        axis.set_title(f"{name}, RMSE, m{unit}")
        if axis.lines:
            axis.legend()
    for axis in axes:
        axis.set_xlabel("epoch")
        for a, b in pairwise(records):
            if b["stage"] != a["stage"]:
                axis.axvline(a["epoch"], color="0.8", lw=1, zorder=0)
    return figure


def _parity(figure: Figure, evaluated: Sequence[Evaluated]) -> Figure:
    axes = figure.subplots(1, 3)
    for found in evaluated:
        marker = "." if found.kind == "train" else "x"
        for axis, both in ((axes[0], found.energy), (axes[2], found.virial.reshape(-1, 2))):
            _points(axis, both, found.kind, marker)
        symbols = np.unique(found.numbers).tolist()
        if len(symbols) > MAX_TYPES:
            _points(axes[1], found.forces.reshape(-1, 2), found.kind, marker)
            continue
        for k, number in enumerate(symbols):
            mine = found.forces[found.numbers == number].reshape(-1, 2)
            label = symbol_of(number) if found is evaluated[0] else None
            _points(axes[1], mine, label, marker, colour=f"C{k}" if k < 10 else f"{0.2 * (k - 9)}")
    for axis, (name, unit) in zip(axes, _TERMS, strict=True):
        axis.set(title=f"{name}, {unit}", xlabel="reference", ylabel="prediction")
        if not axis.lines:
            axis.text(0.5, 0.5, "no labels", ha="center", transform=axis.transAxes)
            continue
        _diagonal(axis)
        axis.legend(fontsize="small", markerscale=2)
    return figure


def _diagonal(axis: Axes) -> None:
    """Draw the diagonal over what is shown, not through an origin far away."""
    low, high = min(axis.get_xlim()[0], axis.get_ylim()[0]), max(axis.get_xlim()[1], axis.get_ylim()[1])
    axis.plot([low, high], [low, high], color="0.7", lw=1, zorder=0)


def _points(axis: Axes, both: NDArray[np.float64], label: str | None, marker: str, colour: str | None = None) -> None:
    known = both[np.isfinite(both).all(axis=1)]
    if not len(known):
        return
    if len(known) > MAX_POINTS:
        error = np.abs(known[:, 0] - known[:, 1])
        worst = np.argpartition(error, -100)[-100:]
        step = -(-len(known) // MAX_POINTS)
        known = known[np.unique(np.concatenate([worst, np.arange(0, len(known), step)]))]
    axis.plot(known[:, 1], known[:, 0], marker, ms=3, alpha=0.6, label=label, color=colour, rasterized=True)


def _histograms(figure: Figure, evaluated: Sequence[Evaluated]) -> Figure:
    axes = figure.subplots(1, 3)
    for axis, (name, unit) in zip(axes, _TERMS, strict=True):
        errors = []
        for found in evaluated:
            both = {"energy": found.energy, "force": found.forces, "virial": found.virial}[name]
            difference = 1000 * (both[..., 0] - both[..., 1]).ravel()
            errors.append(difference[np.isfinite(difference)])
        every = np.concatenate(errors)
        axis.set(title=f"{name}, m{unit}", xlabel="prediction − reference")
        if not len(every):
            axis.text(0.5, 0.5, "no labels", ha="center", transform=axis.transAxes)
            continue
        reach = float(np.quantile(np.abs(every), 0.995)) or 1e-12
        for found, difference in zip(evaluated, errors, strict=True):
            if len(difference):
                axis.hist(difference, np.linspace(-reach, reach, 80), histtype="step", density=True, label=found.kind)
        axis.set_yticks([])
        axis.legend()
    return figure


def _finite(values: Sequence[float | None]) -> NDArray[np.float64]:
    """Values that a logarithmic axis can show."""
    return np.array([np.nan if v is None or v <= 0.0 else v for v in values], np.float64)
