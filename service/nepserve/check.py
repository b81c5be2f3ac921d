"""``nepserve check``: what a model file is, what it cannot give, and what is odd about it. Needs no torch.

A file is read as the server reads it. One that the server would refuse has an error and the exit status 1; warnings
are about files that work, and leave it 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nepcore.errors import ModelFileError
from nepcore.files import nep_txt
from nepcore.files.nep_layout import LEAST_L, SWITCHES

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray

    from nepcore.files.nep_txt import NepFile

HUGE_WEIGHT = 1e3
"""Parameters above this are odd: a trainer's regularisation keeps them around one, up to some ten."""

HUGE_SCALER = 1e6
"""Descriptor scalers above this belong to components that hardly vary in the training set."""

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_GPUMD_MAX_NEIGHBORS = 819

_VERSIONS = {3: "one network for all elements", 4: "one network per element", 5: "one network and bias per element"}


@dataclass(frozen=True, eq=False)
class CheckReport:
    """What ``nepserve check`` has to say about one file.

    Attributes:
        path: The file.
        model: The model, or None if it cannot be used.
        error: Why it cannot be used, or None.
        facts: What it is: name and text.
        limits: What it cannot give, or needs.
        warnings: What is odd about it, or keeps other programs from reading it.
    """

    path: Path
    model: NepFile | None
    error: ModelFileError | None
    facts: tuple[tuple[str, str], ...] = ()
    limits: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 if the file can be served, 1 if not."""
        return 0 if self.error is None else 1

    def lines(self) -> list[str]:
        """The report as plain text, line by line."""
        if self.error is not None:
            return [f"{self.error}", "This file cannot be served."]
        lines = [f"{self.path}"]
        width = max((len(name) for name, _ in self.facts), default=0)
        lines += [f"  {name:<{width}}  {text}" for name, text in self.facts]
        for title, entries in (("Limits", self.limits), ("Warnings", self.warnings)):
            if entries:
                lines += ["", f"{title}:", *(f"  - {entry}" for entry in entries)]
        return lines

    def as_dict(self) -> dict[str, Any]:
        """The report in plain values, for JSON; ``line`` counts from 1."""
        report: dict[str, Any] = {"path": str(self.path), "ok": self.error is None}
        if self.error is not None:
            report["error"] = self.error.reason
            if self.error.line is not None:
                report["line"] = self.error.line
        if self.model is not None:
            report |= {"model": self.model.describe(), "limits": list(self.limits), "warnings": list(self.warnings)}
        return report


def check(path: str | os.PathLike[str]) -> CheckReport:
    """Read a model file and look at it; a file that cannot be used is an error in the report, not an exception."""
    path = Path(path)
    try:
        model = nep_txt.read(path)
    except ModelFileError as error:
        return CheckReport(path, None, error)
    return CheckReport(path, model, None, _facts(model), _limits(model), _warnings(model))


def report(path: str | os.PathLike[str]) -> str:
    """The text that ``nepserve check`` prints for a file."""
    return "\n".join(check(path).lines())


def _facts(model: NepFile) -> tuple[tuple[str, str], ...]:
    T = len(model.elements)
    blocks = [f"l = 1 … {model.l_max}" if model.l_max > 1 else "l = 1"]
    blocks += [name for name in SWITCHES if model.switches[name]]
    sizes = f"{model.dim_radial} radial, {model.dim_angular} angular ({', '.join(blocks)})"
    layers = " – ".join(str(n) for n in (model.dim, *model.hidden, 1))
    facts = [
        ("model", f"NEP version {model.version} ({_VERSIONS[model.version]}), tag {model.tag}"),
        ("gives", "free energy, forces, stress" if model.temperature else "energy, forces, stress"),
        ("elements", f"{T}: {' '.join(model.elements)}"),
        ("cutoffs", _cutoffs(model)),
        ("functions", f"{model.n_max_radial + 1} radial, {model.n_max_angular + 1} angular"),
        ("basis", f"{model.basis_radial + 1} radial, {model.basis_angular + 1} angular"),
        ("descriptor", sizes + (", temperature" if model.temperature else "")),
        ("network", layers + (f", for each of {T} elements" if model.version > 3 and T > 1 else "")),
        ("repulsion", _zbl(model)),
        ("parameters", f"{model.layout.n_parameters:,} fitted, of {model.layout.n_values:,} numbers in the file"),
    ]
    if model.mn_radial is not None and model.mn_angular is not None:
        facts.append(("neighbours", f"up to {model.mn_radial:g} and {model.mn_angular:g} when trained (no limit here)"))
    return tuple(facts)


def _cutoffs(model: NepFile) -> str:
    pairs = list(zip(model.elements, model.cutoff_radial.tolist(), model.cutoff_angular.tolist(), strict=True))
    if len({pair[1:] for pair in pairs}) == 1:
        return f"{pairs[0][1]:g} Å radial, {pairs[0][2]:g} Å angular"
    return "radial and angular, Å: " + ", ".join(
        f"{symbol} {radial:g} {angular:g}" for symbol, radial, angular in pairs
    )


def _zbl(model: NepFile) -> str:
    if model.zbl == "universal":
        return f"universal ZBL, switched off from {model.zbl_inner:g} to {model.zbl_outer:g} Å"
    if model.zbl == "typewise":
        return f"typewise ZBL, up to {model.zbl_factor:g} of the sum of covalent radii, at most {model.zbl_outer:g} Å"
    if model.zbl == "flexible" and model.zbl_pairs is not None:
        outer = model.zbl_pairs[:, 1]
        return f"flexible ZBL for {len(outer)} pairs of elements, up to {outer.min():.3g} … {outer.max():.3g} Å"
    return "none"


def _limits(model: NepFile) -> tuple[str, ...]:
    limits = [
        f"Only structures of {' '.join(model.elements)}; others are refused.",
        f"Short-ranged: atoms farther apart than {model.cutoff:g} Å do not see each other; no charges, no dispersion.",
        "Stress only for structures that are periodic in all three directions.",
        "No dipoles, polarizabilities or Born charges: the file has a potential only.",
    ]
    if model.temperature:
        limits.insert(1, "Every structure needs a temperature (K); the energy is a free energy at that temperature.")
    if model.zbl == "none":
        limits.append("No ZBL: at distances shorter than those of the training set the energies mean nothing.")
    return tuple(limits)


def _warnings(model: NepFile) -> tuple[str, ...]:
    return (*_reader_warnings(model), *_size_warnings(model), *_zbl_warnings(model), *_value_warnings(model))


def _reader_warnings(model: NepFile) -> list[str]:
    """What keeps other programs from reading the file."""
    warnings = []
    if model.version == 3:
        warnings.append("NEP version 3 is no longer read by GPUMD; it is served here all the same.")
    if model.version == 5:
        warnings.append("NEP version 5 is no longer written by GPUMD's trainer; not every program reads it.")
    if model.mn_radial is None or model.mn_angular is None:
        warnings.append("The cutoff line has no neighbour limits (MN): current GPUMD does not read such a file.")
        return warnings
    if model.mn_radial > _GPUMD_MAX_NEIGHBORS:
        warnings.append(f"MN is {model.mn_radial:g}: GPUMD refuses more than {_GPUMD_MAX_NEIGHBORS} radial neighbours.")
    if not (model.mn_radial.is_integer() and model.mn_angular.is_integer()):
        odd = f"The neighbour limits MN are not whole: {model.mn_radial:g} {model.mn_angular:g}."
        if len(model.elements) == 2 and len(set(model.cutoff_radial.tolist())) == 1:
            odd += " If these are cutoffs of the second element, the line lacks MN and is read wrongly everywhere."
        warnings.append(odd)
    return warnings


def _size_warnings(model: NepFile) -> list[str]:
    """Sizes that GPUMD's trainer would not make, and parts that have no effect."""
    sizes = [
        ("n_max (radial)", model.n_max_radial, 12),
        ("n_max (angular)", model.n_max_angular, 8),
        ("basis_size (radial)", model.basis_radial, 16),
        ("basis_size (angular)", model.basis_angular, 12),
        ("number of angular components", model.dim_angular, 90),
        *[("number of neurons", neurons, 120) for neurons in model.hidden],
    ]
    warnings = [
        f"The {name} is {value}; GPUMD's trainer stops at {limit}." for name, value, limit in sizes if value > limit
    ]
    if model.l_max < 2:
        warnings.append(f"l_max is {model.l_max}; GPUMD's trainer starts at 2.")
    if len(model.hidden) == 2 and model.version != 4:
        warnings.append(
            f"Two hidden layers in NEP version {model.version}: GPUMD's trainer makes them in version 4 only."
        )
    if float(model.cutoff_angular.min()) < 3.0 or model.cutoff > 100.0:
        warnings.append("GPUMD's trainer keeps cutoffs between 3 and 100 Å.")
    if model.cutoff > 12.0:
        neighbors = 0.05 * 4.0 / 3.0 * np.pi * model.cutoff**3
        warnings.append(
            f"A radial cutoff of {model.cutoff:g} Å means some {neighbors:,.0f} neighbours per atom in a solid."
        )
    idle = [name for name in SWITCHES if model.switches[name] and LEAST_L[name] > model.l_max]
    if idle:
        warnings.append(f"{', '.join(idle)} are on, but zero: they need a larger l than {model.l_max}.")
    return warnings


def _zbl_warnings(model: NepFile) -> list[str]:
    if model.zbl == "flexible" and model.zbl_pairs is not None:
        return _flexible_warnings(model, model.zbl_pairs)
    if model.zbl_inner is None or model.zbl_outer is None:
        return []
    warnings = []
    shortest = float(model.cutoff_angular.min())
    if model.zbl_outer > shortest:
        verb = "may be" if model.zbl == "typewise" else "is"
        warnings.append(
            f"ZBL reaches {model.zbl_outer:g} Å, beyond the shortest angular cutoff of {shortest:g} Å:"
            f" it {verb} truncated there, with a jump in the energy."
        )
    if model.zbl == "universal" and model.zbl_inner == model.zbl_outer:
        warnings.append(f"ZBL has no width to switch off in: the energy jumps at {model.zbl_outer:g} Å.")
    return warnings


def _flexible_warnings(model: NepFile, pairs: NDArray[np.float64]) -> list[str]:
    first, second = np.triu_indices(len(model.elements))  # in the order of the file
    cutoffs = 0.5 * (model.cutoff_angular[first] + model.cutoff_angular[second])
    warnings = []
    for odd, what in (
        ((pairs[:, 0] < 0) | (pairs[:, 1] <= pairs[:, 0]), "leaves no width to switch off in: the energy jumps"),
        (pairs[:, 1] > cutoffs, "reaches beyond the angular cutoff: it is truncated there, with a jump in the energy"),
        ((pairs[:, 3::2] < 0).any(axis=1), "has a negative decay rate: the screening grows with distance"),
    ):
        which = np.flatnonzero(odd).tolist()
        if which:
            names = [f"{model.elements[first[i]]}-{model.elements[second[i]]}" for i in which[:4]]
            more = f" and {len(which) - 4} more pairs" if len(which) > 4 else ""
            warnings.append(f"ZBL of {', '.join(names)}{more} {what}.")
    return warnings


def _value_warnings(model: NepFile) -> list[str]:
    """Numbers that no training run ends with."""
    warnings = []
    groups = {
        "input weights (w0)": model.w0,
        "biases (b0)": model.b0,
        "output weights": model.w1 if model.w2 is None else model.w2,
        "radial coefficients": model.c_radial,
        "angular coefficients": model.c_angular,
    }
    if model.w2 is not None:
        groups["weights of the second layer (w1)"] = model.w1
    zero = [name for name, values in groups.items() if not values.any()]
    if len(zero) == len(groups):
        warnings.append("All parameters are zero: every structure has the same energy per atom, and no forces.")
    elif zero:
        warnings.append(f"All zero: {', '.join(zero)}.")
    elif len(model.elements) > 1 and model.version > 3:
        output = groups["output weights"]
        flat = [symbol for symbol, row in zip(model.elements, output, strict=True) if not row.any()]
        if flat:
            warnings.append(
                f"The network of {', '.join(flat)} has no output weights: the energy of such atoms is constant."
            )
    for name, values in groups.items():
        largest = float(np.abs(values).max())
        if largest > HUGE_WEIGHT:
            warnings.append(f"The {name} go up to {largest:.3g}; trained ones stay below some ten.")
    scaler = model.q_scaler
    for odd, what in (
        (scaler == 0, "zero, so that part of the descriptor has no effect"),
        (scaler < 0, "negative, which no trainer writes"),
        (scaler > HUGE_SCALER, f"above {HUGE_SCALER:g}: components that hardly vary in the training set"),
    ):
        if odd.any():
            warnings.append(f"Of {len(scaler)} descriptor scalers {int(odd.sum())} are {what}.")
    everything = [model.q_scaler, *groups.values(), np.array([model.bias])]
    everything += [a for a in (model.b1, model.type_bias, model.zbl_pairs) if a is not None]
    if max(float(np.abs(a).max()) for a in everything) > _FLOAT32_MAX:
        warnings.append("Numbers beyond the range of float32: serve this model with --dtype float64.")
    return warnings
