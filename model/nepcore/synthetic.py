"""Models with random parameters, for tests, benchmarks and a first look at the service.

They are well scaled (descriptors and site energies of order one, forces of order 1 eV/Å in condensed matter) and mean
nothing: no energy of theirs says anything about a material. A seed gives the same file on every platform.

    python -m nepcore.synthetic -o nep.txt --elements Si C --zbl universal
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from .errors import ModelFileError
from .files import nep_txt
from .files.nep_layout import MAX_L, SWITCHES
from .physics.screening import UNIVERSAL

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

DEMO_NAME = "demo-synthetic"
"""Name under which the demonstration model is served."""

DENSITY = 0.07
"""Atoms per Å³ of the condensed matter that models are scaled for, between silicon and copper."""

CONTACT = 2.0
"""Å; no neighbours nearer than this when scaling."""

_ZBL_KINDS = ("none", "universal", "typewise", "flexible")

# Root mean square of each invariant for sums s of random direction, over the product of the three-body invariants of
# its degrees l (each to half its multiplicity). By sampling the polynomials with normal deviates.
_HIGHER: dict[str, tuple[float, tuple[int, ...]]] = {
    "q222": (0.22, (2, 2, 2)),
    "q1111": (1.6, (1, 1, 1, 1)),
    "q112": (0.21, (1, 1, 2)),
    "q123": (0.098, (1, 2, 3)),
    "q233": (0.091, (2, 3, 3)),
    "q134": (0.073, (1, 3, 4)),
}

# The universal screening function, from which flexible pairs deviate by some percent.
_UNIVERSAL = np.ravel(UNIVERSAL)


def make_model(
    elements: Sequence[str],
    *,
    version: int = 4,
    zbl: str = "none",
    temperature: bool = False,
    cutoff: Sequence[float] | Sequence[Sequence[float]] = (5.0, 4.0),
    n_max: tuple[int, int] = (4, 4),
    basis_size: tuple[int, int] = (8, 8),
    l_max: int = 4,
    switches: Iterable[str] | Mapping[str, bool] = ("q222",),
    hidden: Sequence[int] = (30,),
    seed: int = 0,
) -> nep_txt.NepFile:
    """A model with random parameters.

    Args:
        elements: Symbols, in the order of the type index.
        version: 3, 4 or 5.
        zbl: ``none``, ``universal``, ``typewise`` or ``flexible``.
        temperature: Whether the temperature is an input (versions 3 and 4).
        cutoff: Radial and angular cutoff, Å; or such a pair for each element.
        n_max: Radial and angular number of functions less one.
        basis_size: Radial and angular basis size less one.
        l_max: Largest l of the three-body terms, 1 to 8.
        switches: Higher invariants: the names of those that are on, or a value for each name.
        hidden: Neurons of the one or two hidden layers.
        seed: Other seeds, other parameters.

    Returns:
        A model whose numbers survive being written with eight digits.

    Raises:
        ValueError: something that no model file can say.
    """
    elements = tuple(elements)
    on = {name for name, value in switches.items() if value} if isinstance(switches, Mapping) else set(switches)
    if on - set(SWITCHES):
        raise ValueError(f"unknown switches {sorted(on - set(SWITCHES))}; there are {' '.join(SWITCHES)}")
    if zbl not in _ZBL_KINDS:
        raise ValueError(f"unknown kind of ZBL {zbl!r}; there are {' '.join(_ZBL_KINDS)}")
    if not 1 <= l_max <= MAX_L:
        raise ValueError(f"l_max must be 1 to {MAX_L}, not {l_max}")
    if len(hidden) not in {1, 2}:
        raise ValueError(f"hidden must give one or two layers, not {len(hidden)}")
    T = len(elements)
    cutoffs = np.array(cutoff, dtype=np.float64)
    if cutoffs.shape == (2,):
        cutoffs = np.tile(cutoffs, (T, 1))
    if cutoffs.shape != (T, 2) or not T:
        raise ValueError(f"cutoff must be a pair, or one for each of the {T} elements; found shape {cutoffs.shape}")
    M = 1 if version == 3 else T
    dim_radial, dim_angular = n_max[0] + 1, (n_max[1] + 1) * (l_max + len(on))
    D = dim_radial + dim_angular + temperature
    dice = _Dice(seed)
    # High basis functions change fast with distance: less of them keeps forces moderate.
    c_radial = dice.spread((n_max[0] + 1, basis_size[0] + 1, T, T)) * _fading(basis_size[0])
    c_angular = dice.spread((n_max[1] + 1, basis_size[1] + 1, T, T)) * _fading(basis_size[1])
    scaler = np.concatenate(
        [
            1.0 / _radial_size(c_radial, cutoffs[:, 0]),
            1.0 / _angular_size(c_angular, cutoffs[:, 1], l_max, [name for name in SWITCHES if name in on]),
            np.full(int(temperature), 0.001),
        ]
    )
    H, H2 = hidden[0], hidden[-1]
    deep = len(hidden) == 2
    outer = round(min(2.0, float(cutoffs[:, 1].min())), 6)
    model = nep_txt.NepFile(
        tag=f"nep{version}{'_zbl' * (zbl != 'none')}{'_temperature' * temperature}",
        version=version,
        elements=elements,
        temperature=temperature,
        zbl=zbl,
        zbl_inner=outer / 2 if zbl in {"universal", "typewise"} else None,
        zbl_outer=outer if zbl in {"universal", "typewise"} else None,
        zbl_factor=0.7 if zbl == "typewise" else None,
        zbl_pairs=_flexible_pairs(dice, T, outer) if zbl == "flexible" else None,
        cutoff_radial=cutoffs[:, 0],
        cutoff_angular=cutoffs[:, 1],
        mn_radial=_neighbors(cutoffs[:, 0]),
        mn_angular=_neighbors(cutoffs[:, 1]),
        n_max_radial=n_max[0],
        n_max_angular=n_max[1],
        basis_radial=basis_size[0],
        basis_angular=basis_size[1],
        l_max=l_max,
        switches={name: name in on for name in SWITCHES},
        hidden=tuple(hidden),
        w0=_rounded(dice.spread((M, H, D)) / math.sqrt(max(D, 1))),
        b0=_rounded(0.5 * dice.spread((M, H))),
        w1=_rounded(dice.spread((M, H2, H)) / math.sqrt(H) if deep else 1.5 * dice.spread((M, H)) / math.sqrt(H)),
        b1=_rounded(0.5 * dice.spread((M, H2))) if deep else None,
        w2=_rounded(1.5 * dice.spread((M, H2)) / math.sqrt(H2)) if deep else None,
        type_bias=_rounded(0.5 * dice.spread((T,))) if version == 5 else None,
        bias=float(_rounded(dice.spread((1,)))[0]),
        c_radial=_rounded(c_radial),
        c_angular=_rounded(c_angular),
        q_scaler=_rounded(scaler, digits=4),
    )
    try:
        return nep_txt.loads(nep_txt.dumps(model), "synthetic")
    except ModelFileError as error:
        raise ValueError(error.reason) from error


def demo_model() -> nep_txt.NepFile:
    """The tiny model that is served where none is given; see :data:`DEMO_NAME`."""
    return make_model(
        ("H", "C", "N", "O", "Al", "Si", "Cu"), zbl="universal", n_max=(4, 3), basis_size=(4, 4), hidden=(10,), seed=7
    )


class _Dice:
    """Random numbers whose stream is guaranteed, and which need no function of the platform's mathematics library."""

    def __init__(self, seed: int) -> None:
        self.bits = np.random.PCG64(seed)

    def spread(self, shape: tuple[int, ...]) -> NDArray[np.float64]:
        """Evenly distributed numbers of mean 0 and variance 1."""
        n = math.prod(shape)
        raw = np.asarray(self.bits.random_raw(n), dtype=np.uint64).reshape(shape)
        return ((raw >> np.uint64(11)) * 2.0**-53 * 2.0 - 1.0) * math.sqrt(3.0)


def _rounded(values: NDArray[np.float64], digits: int = 8) -> NDArray[np.float64]:
    """Values with as many significant digits."""
    flat = [float(f"{v:.{digits - 1}e}") for v in values.reshape(-1).tolist()]
    return np.array(flat, dtype=np.float64).reshape(values.shape)


def _fading(basis_size: int) -> NDArray[np.float64]:
    return (1.0 / np.sqrt(1.0 + np.arange(basis_size + 1)))[None, :, None, None]


def _neighbors(cutoffs: NDArray[np.float64]) -> float:
    """Neighbours within the largest cutoff at a density that is rarely exceeded."""
    return float(math.ceil(0.12 * 4.0 / 3.0 * math.pi * float(np.max(cutoffs)) ** 3))


def _functions(c: NDArray[np.float64], cutoffs: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Neighbours in each of 200 shells at :data:`DENSITY`, (S, T, T), and radial functions there, (n, S, T, T)."""
    rc = 0.5 * (cutoffs[:, None] + cutoffs[None, :])
    start = np.minimum(CONTACT, 0.5 * rc)
    step = (rc - start) / 200.0
    r = start + step * (np.arange(200)[:, None, None] + 0.5)  # (S, T, T)
    x = 2.0 * (r / rc - 1.0) ** 2 - 1.0
    basis = [np.ones_like(x), x]
    for _ in range(2, c.shape[1]):
        basis.append(2.0 * x * basis[-1] - basis[-2])
    f = (0.5 * np.stack(basis[: c.shape[1]]) + 0.5) * (0.5 * np.cos(np.pi * r / rc) + 0.5)  # (k, S, T, T)
    return DENSITY * 4.0 * np.pi * r * r * step, np.einsum("nkab,ksab->nsab", c, f)


def _radial_size(c: NDArray[np.float64], cutoffs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Root mean square of the radial components among randomly placed neighbours of all types, (n,)."""
    shells, g = _functions(c, cutoffs)
    share = 1.0 / c.shape[-1]
    mean = share * (shells * g).sum(axis=(1, 3))  # (n, type of the centre)
    variance = share * (shells * g * g).sum(axis=(1, 3))
    return np.sqrt((mean**2 + variance).mean(axis=1))


def _angular_size(
    c: NDArray[np.float64], cutoffs: NDArray[np.float64], l_max: int, switches: Sequence[str]
) -> NDArray[np.float64]:
    """Root mean square of the angular components among randomly placed neighbours, block by block."""
    shells, g = _functions(c, cutoffs)
    power = (shells * g * g).sum(axis=(1, 3)).mean(axis=1) / c.shape[-1]  # (n,)
    three_body = [(2 * l + 1) / (4.0 * np.pi) * power for l in range(1, l_max + 1)]
    blocks = list(three_body)
    for name in switches:
        size, degrees = _HIGHER[name]
        # An invariant of a degree that the model lacks is zero, whatever its scaler.
        factors = [np.sqrt(three_body[min(l, l_max) - 1]) for l in degrees]
        blocks.append(size * np.prod(factors, axis=0))
    return np.concatenate(blocks)


def _flexible_pairs(dice: _Dice, n_types: int, outer: float) -> NDArray[np.float64]:
    """Cutoffs and screening function of every pair of types, (T(T+1)/2, 10)."""
    n = n_types * (n_types + 1) // 2
    jitter = 1.0 + 0.05 * dice.spread((n, 10))
    pairs = np.array([0.45 * outer, 0.9 * outer, *_UNIVERSAL]) * jitter
    return _rounded(pairs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a synthetic model from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m nepcore.synthetic",
        description="Write a nep.txt with random parameters: well scaled, and physically meaningless.",
    )
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="file to write")
    parser.add_argument("--elements", nargs="+", required=True, metavar="SYMBOL")
    parser.add_argument("--version", type=int, default=4, choices=(3, 4, 5))
    parser.add_argument("--zbl", default="none", choices=_ZBL_KINDS)
    parser.add_argument("--temperature", action="store_true", help="make the temperature an input")
    parser.add_argument(
        "--cutoff", nargs="+", type=float, default=[5.0, 4.0], metavar="Å", help="radial and angular, or per element"
    )
    parser.add_argument("--n-max", nargs=2, type=int, default=[4, 4], metavar=("R", "A"))
    parser.add_argument("--basis-size", nargs=2, type=int, default=[8, 8], metavar=("R", "A"))
    parser.add_argument("--l-max", type=int, default=4, metavar="L")
    parser.add_argument("--switches", nargs="*", default=["q222"], metavar="NAME", help=" ".join(SWITCHES))
    parser.add_argument("--hidden", nargs="+", type=int, default=[30], metavar="NEURONS", help="one or two layers")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if len(options.cutoff) not in {2, 2 * len(options.elements)}:
        parser.error(f"--cutoff takes 2 numbers, or {2 * len(options.elements)} for that many elements")
    cutoff = options.cutoff if len(options.cutoff) == 2 else np.reshape(options.cutoff, (-1, 2)).tolist()
    try:
        model = make_model(
            options.elements,
            version=options.version,
            zbl=options.zbl,
            temperature=options.temperature,
            cutoff=cutoff,
            n_max=tuple(options.n_max),
            basis_size=tuple(options.basis_size),
            l_max=options.l_max,
            switches=options.switches,
            hidden=options.hidden,
            seed=options.seed,
        )
        nep_txt.write(model, options.output)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 1
    sys.stdout.write(f"{options.output}: {model.tag} {' '.join(model.elements)}, synthetic, physically meaningless\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
