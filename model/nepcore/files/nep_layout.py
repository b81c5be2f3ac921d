"""What the header of a ``nep.txt`` announces: the order, the shapes and the number of the values.

Every size is computed with Python integers before anything is allocated, so a header may announce what it likes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

SWITCHES: tuple[str, ...] = ("q222", "q1111", "q112", "q123", "q233", "q134")
"""The invariants beyond three-body, in the order of the ``l_max`` line and of the descriptor."""

LEAST_L: dict[str, int] = {"q222": 2, "q1111": 1, "q112": 2, "q123": 3, "q233": 3, "q134": 4}
"""The least ``l_max`` at which an invariant is not zero."""

MAX_L = 8
"""Largest l for which the angular functions are defined."""


@dataclass(frozen=True)
class Header:
    """What the header says; field by field as in :class:`nepcore.files.nep_txt.NepFile`, with tuples for arrays."""

    tag: str
    version: int
    elements: tuple[str, ...]
    temperature: bool
    zbl: str
    zbl_inner: float | None
    zbl_outer: float | None
    zbl_factor: float | None
    cutoff_radial: tuple[float, ...]
    cutoff_angular: tuple[float, ...]
    mn_radial: float | None
    mn_angular: float | None
    n_max_radial: int
    n_max_angular: int
    basis_radial: int
    basis_angular: int
    l_max: int
    switches: tuple[bool, ...]
    hidden: tuple[int, ...]

    @property
    def n_lines(self) -> int:
        """Number of header lines."""
        return 6 if self.zbl == "none" else 7

    @property
    def n_networks(self) -> int:
        """M: one network for all types (version 3), else one per type."""
        return 1 if self.version == 3 else len(self.elements)

    @property
    def n_blocks(self) -> int:
        """nL: angular blocks of the descriptor, l = 1 … L and the switches that are on."""
        return self.l_max + sum(self.switches)

    @property
    def dim_radial(self) -> int:
        """Radial components of the descriptor."""
        return self.n_max_radial + 1

    @property
    def dim_angular(self) -> int:
        """Angular components of the descriptor."""
        return (self.n_max_angular + 1) * self.n_blocks

    @property
    def dim(self) -> int:
        """D: length of the network's input, with the temperature where there is one."""
        return self.dim_radial + self.dim_angular + self.temperature

    def network_blocks(self) -> list[tuple[str, tuple[int, ...]]]:
        """Blocks of one network in file order: name and shape."""
        H, D = self.hidden[0], self.dim
        blocks: list[tuple[str, tuple[int, ...]]] = [("w0", (H, D)), ("b0", (H,))]
        if len(self.hidden) == 1:
            blocks.append(("w1", (H,)))
        else:
            H2 = self.hidden[1]
            blocks += [("w1", (H2, H)), ("b1", (H2,)), ("w2", (H2,))]
        if self.version == 5:
            blocks.append(("type_bias", ()))
        return blocks

    def common_blocks(self) -> list[tuple[str, tuple[int, ...]]]:
        """Blocks that follow the networks, in file order: name and shape."""
        T = len(self.elements)
        blocks: list[tuple[str, tuple[int, ...]]] = [
            ("bias", ()),
            ("c_radial", (self.n_max_radial + 1, self.basis_radial + 1, T, T)),
            ("c_angular", (self.n_max_angular + 1, self.basis_angular + 1, T, T)),
            ("q_scaler", (self.dim,)),
        ]
        if self.zbl == "flexible":
            blocks.append(("zbl_pairs", (T * (T + 1) // 2, 10)))
        return blocks

    @property
    def network_size(self) -> int:
        """Numbers of one network."""
        return sum(math.prod(shape) for _, shape in self.network_blocks())

    @property
    def n_parameters(self) -> int:
        """Fitted numbers: networks, biases and descriptor coefficients (neither scalers nor ZBL)."""
        common = {name: math.prod(shape) for name, shape in self.common_blocks()}
        return self.n_networks * self.network_size + common["bias"] + common["c_radial"] + common["c_angular"]

    @property
    def n_values(self) -> int:
        """Numbers that follow the header."""
        return self.n_networks * self.network_size + sum(math.prod(shape) for _, shape in self.common_blocks())


def explain_count(header: Header, found: int) -> str:
    """What a wrong number of values may come from: a clause that names the header it would fit, or ''."""
    T, H, D = len(header.elements), header.hidden[0], header.dim
    expected = header.n_values
    zbl = "_zbl" if header.zbl != "none" else ""
    candidates: list[tuple[int, str]] = []
    for version in (3, 4, 5):
        other = replace(header, version=version)
        if version != header.version and not (version == 5 and header.temperature):
            candidates.append((other.n_values, f"nep{version}{zbl}{'_temperature' * header.temperature}"))
    if header.version != 5:
        other = replace(header, temperature=not header.temperature)
        candidates.append((other.n_values, f"nep{header.version}{zbl}{'_temperature' * other.temperature}"))
    if len(header.hidden) == 1:
        heads = H * header.n_networks
        candidates += [
            (expected + heads + 1, f"nep{header.version}{zbl}_charge1 (or charge2, charge3)"),
            (expected + heads, f"nep{header.version}{zbl}_vdw"),
            (expected + 2 * heads + 1, f"nep{header.version}{zbl}_charge_vdw"),
            (expected + (D + 2) * heads + 1, f"nep{header.version}{zbl}_polarizability"),
        ]
    tags = [tag for count, tag in candidates if count == found]
    if tags:
        return f"; as many as {' or '.join(tags)} has with the same header: is the tag on line 1 right?"
    pairs = 10 * (T * (T + 1) // 2)
    if header.zbl == "flexible" and found == expected - pairs:
        return f"; the {pairs} numbers of the flexible ZBL at the end are missing"
    if header.zbl in {"universal", "typewise"} and found == expected + pairs:
        return f"; {pairs} more are what a flexible ZBL (zbl 0 0) has at the end"
    coefficients = sum(math.prod(shape) for name, shape in header.common_blocks() if name.startswith("c_"))
    if T > 1 and found == expected - coefficients + coefficients // T:
        return "; it fits coefficients that depend on the neighbour's type only (a GPUMD built so), not supported"
    for blocks in range(1, MAX_L + len(SWITCHES) + 1):
        if replace(header, l_max=blocks, switches=(False,) * len(SWITCHES)).n_values == found:
            return f"; it fits {blocks} angular blocks where the l_max line says {header.n_blocks}"
    return "; the file may be cut short" if found < expected else ""
