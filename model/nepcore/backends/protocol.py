"""What a backend is, and what a form of the torch backends is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor

    from nepcore.structures import Predictions, Structures


class Backend(Protocol):
    """A way to evaluate one model on one device."""

    @property
    def name(self) -> str:
        """Name by which it is asked for and reported."""

    def run(self, structures: Structures, properties: frozenset[str]) -> Generator[int, None, Predictions]:
        """Evaluate structures that the model's admission let in.

        Yields the number of atoms finished, after each piece of work, so that a caller can do other work in between
        (another ``run`` included). Returns the predictions; a structure that turns out to be impossible (coincident
        atoms) is an entry of their ``errors`` and harms no other.
        """


class Contraction(Protocol):
    """How coefficients and basis meet: g_n(r; t1, t2) = Σ_k c[n, k, t1, t2] f_k(r) for every pair."""

    def __call__(self, coefficients: Tensor, basis: Tensor, centre: Tensor, neighbor: Tensor) -> Tensor:
        """Contract.

        Args:
            coefficients: (n, k, T, T).
            basis: (S, k, P), S stacked sets of basis functions (values; values and derivatives).
            centre: (P,) type indices of the centres.
            neighbor: (P,) type indices of the neighbours.

        Returns:
            (S, n, P).
        """


class Sums(Protocol):
    """The way from pairs to atoms: s_bn(i) = Σ_j g_n(r_ij) Y_b(ij)."""

    def __call__(
        self, coefficients: Tensor, basis: Tensor, centre: Tensor, neighbor: Tensor, y: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Sum over neighbours.

        Args:
            coefficients: (n, k, T, T).
            basis: (S, k, A, w): values and, if S = 2, derivatives, for the A atoms and their w slots; zero in slots
                that no neighbour fills.
            centre: (A,) type indices.
            neighbor: (A, w) type indices.
            y: (b, A, w), or None for Y = 1 alone.

        Returns:
            The sums of the values (b, A, n), and what :class:`Spread` wants of the pairs, (S, ..., A, w).
        """


class Spread(Protocol):
    """The way back: Σ_n ds_bn(i) g_n(r_ij) for every pair."""

    def __call__(self, coefficients: Tensor, kept: Tensor, ds: Tensor, centre: Tensor, neighbor: Tensor) -> Tensor:
        """Spread derivatives by the sums over the pairs.

        Args:
            coefficients: (n, k, T, T).
            kept: (S, ..., A, w) of :class:`Sums`, or some of its first indices.
            ds: (b, A, n).
            centre: (A,).
            neighbor: (A, w).

        Returns:
            (S, b, A, w), with g or g' as ``kept`` has it.
        """


@dataclass(frozen=True)
class Form:
    """A form of the torch backends: plain functions of tensors, for every device, eager or compiled."""

    sums: Sums
    spread: Spread
