"""Requests that get no results although nothing is wrong with their structures."""

from __future__ import annotations

from typing import ClassVar


class Refused(Exception):  # noqa: N818 -- the name says what happened; nobody made an error
    """A request that is not taken, or not gone on with.

    Attributes:
        code: The stable word for the reason.
    """

    code: ClassVar[str]


class QueueFull(Refused):
    """The queue has no room at present.

    Attributes:
        retry_after: Seconds until the work that is here now will be done, by the measured speed.
    """

    code = "queue_full"

    def __init__(self, retry_after: float) -> None:
        self.retry_after = retry_after
        super().__init__(f"the queue is full; its work takes about {retry_after:.3g} s")

    def __reduce__(self) -> tuple[type, tuple[float]]:
        return type(self), (self.retry_after,)


class TooLarge(Refused):
    """A request that would not be taken by an empty queue either.

    Attributes:
        max_atoms: Atoms that can be taken: in one structure, or in one request if ``structure`` is None.
        atoms: Atoms that came.
        structure: Index of the (first) largest structure, from 0; None if it is the request as a whole.
    """

    code = "too_large"

    def __init__(self, max_atoms: int, atoms: int, structure: int | None) -> None:
        self.max_atoms = max_atoms
        self.atoms = atoms
        self.structure = structure
        what = "the request" if structure is None else f"structure {structure + 1}"
        super().__init__(f"{what} has {atoms:,} atoms; at most {max_atoms:,} can be taken")

    def __reduce__(self) -> tuple[type, tuple[int, int, int | None]]:
        return type(self), (self.max_atoms, self.atoms, self.structure)


class DeadlinePassed(Refused):
    """The time given for the request was over before all of it had reached the device.

    Attributes:
        timeout: Seconds that were given.
    """

    code = "deadline_passed"

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        super().__init__(f"the request was given {timeout:g} s, and was not reached within them")

    def __reduce__(self) -> tuple[type, tuple[float]]:
        return type(self), (self.timeout,)


class Draining(Refused):
    """No more work is taken, since the server is about to stop."""

    code = "draining"
