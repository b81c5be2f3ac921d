"""Tables that kernels read while they are compiled."""

from __future__ import annotations

from typing import Any


class Fixed:
    """A table that never changes.

    Triton copies what a kernel refers to, and compares it at every launch: of this, the address alone.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: object) -> Fixed:
        return self
