"""The edges of one atom, laid out for vectors: cut to the cutoffs of their pairs, padded with far ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .inner import inner
from .neighbors import COINCIDENT

if TYPE_CHECKING:
    from .bins import Bins
    from .neighbors import Found
    from .site import Present


@inner
def gather(
    model: Any, bins: Bins, i: int, count: int, found: Found, present: Present, site: Any, stride: int, align: int
) -> Any:
    """Edges of the neighbours found, in order, cut to the cutoffs of their pairs and padded with far ones.

    Returns:
        Radial neighbours, angular neighbours, and the first atom at the place of atom i, or −1.
    """
    geo = site.geo
    kind = bins.types[i]
    base = kind * model.n_types
    x = bins.positions[3 * i]
    y = bins.positions[3 * i + 1]
    z = bins.positions[3 * i + 2]
    n = 0
    angular = 0
    coincident = -1
    for k in range(count):
        h = found.sorted[k]
        c = found.near[h]
        t = 3 * found.run[h]
        dx = (bins.x[c] - x) + found.shift[t]
        dy = (bins.y[c] - y) + found.shift[t + 1]
        dz = (bins.z[c] - z) + found.shift[t + 2]
        square = dx * dx + dy * dy + dz * dz
        j = bins.order[c]
        if square < COINCIDENT * COINCIDENT and coincident < 0:
            coincident = j
        other = bins.types[j]
        pair = base + other
        if not square < model.squared_radial[pair]:
            continue
        geo[n] = dx
        geo[stride + n] = dy
        geo[2 * stride + n] = dz
        geo[5 * stride + n] = model.inverse_radial[pair]
        site.kind[n] = other
        site.slot[n] = present.slots[other]
        site.neighbor[n] = j
        if square < model.squared_angular[pair]:
            site.pair[angular] = n
            site.kind_angular[angular] = other
            site.geo_angular[5 * stride + angular] = model.inverse_angular[pair]
            angular += 1
        n += 1
    for j in range(n, up(n, align)):
        geo[j] = 2.0 * model.cutoff
        geo[stride + j] = 0.0
        geo[2 * stride + j] = 0.0
        geo[5 * stride + j] = 1.0 / model.cutoff
        site.kind[j] = 0
        site.slot[j] = -1
    return n, angular, coincident


@inner
def up(n: int, align: int) -> int:
    """The multiple of ``align``, a power of two, that is not less than n."""
    return (n + align - 1) & -align


@inner
def angular_geometry(model: Any, site: Any, stride: int, count: int, align: int) -> None:
    """Rows 0–4 of the angular neighbours from those of the radial ones, and padding."""
    for a in range(count):
        p = site.pair[a]
        for row in range(5):
            site.geo_angular[row * stride + a] = site.geo[row * stride + p]
    for a in range(count, up(count, align)):
        site.kind_angular[a] = 0
        site.geo_angular[a] = 1.0
        site.geo_angular[stride + a] = 0.0
        site.geo_angular[2 * stride + a] = 0.0
        site.geo_angular[3 * stride + a] = 2.0 * model.cutoff
        site.geo_angular[4 * stride + a] = 0.5 / model.cutoff
        site.geo_angular[5 * stride + a] = 1.0 / model.cutoff
