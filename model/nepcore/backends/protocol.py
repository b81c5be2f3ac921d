"""What a backend is."""

from __future__ import annotations

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
