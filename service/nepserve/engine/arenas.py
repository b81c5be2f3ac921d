"""Memory that front and engine share for large arrays: sealed memfds that are used again and again.

The sender owns an arena, writes a message's arrays into it and lends it to the receiver, who maps it once and reads
the arrays where they lie. It is given back when the last array over it is gone, so an array is never overwritten
while somebody holds it, however long that is. Nothing has a name: whoever dies, the kernel clears up.

A memfd made for one message and thrown away costs twice what the socket costs, since the kernel must find, clear and
map each page anew.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

SMALLEST = 1 << 20
"""Bytes of the smallest arena; others are larger by powers of two, so that few sizes serve all messages."""

POOL_BYTES = 256 << 20
"""Bytes that the arenas of one sender may have together; beyond that the socket must do."""

_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0) | getattr(fcntl, "F_SEAL_SEAL", 0)


def available() -> bool:
    """Whether the kernel gives out memfds that can be sealed."""
    try:
        os.close(_create(mmap.PAGESIZE))
    except (OSError, AttributeError):
        return False
    return True


def _create(size: int) -> int:
    """A memfd whose size nobody can change: to read beyond the end of a shrunken file would kill the reader."""
    fd = os.memfd_create("nepserve", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Its pages are taken now: one that is missing later would kill whoever touches it.
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


@dataclass
class _Arena:
    fd: int
    memory: mmap.mmap
    lent: bool = False


class Lender:
    """The arenas of a sender."""

    def __init__(self, capacity: int = POOL_BYTES) -> None:
        self._capacity = capacity
        self._arenas: list[_Arena] = []

    def lend(self, arrays: Iterable[tuple[int, NDArray[Any]]], size: int) -> tuple[int, int | None] | None:
        """Copy arrays to their offsets in a free arena of at least ``size`` bytes.

        Returns:
            Number of the arena, and its file descriptor if the receiver has not seen it yet; None if there is no
            arena to be had.
        """
        number = self._free(size)
        fd = None
        if number < 0:
            made = self._make(max(SMALLEST, 1 << (size - 1).bit_length()))
            if made is None:
                return None
            number, fd = len(self._arenas), made.fd
            self._arenas.append(made)
        arena = self._arenas[number]
        for offset, values in arrays:
            # Several times faster than to write to the file.
            np.copyto(np.ndarray(values.shape, values.dtype, arena.memory, offset), values)
        arena.lent = True
        return number, fd

    def _free(self, size: int) -> int:
        """Number of the smallest free arena that has ``size`` bytes, or −1."""
        best = -1
        for number, arena in enumerate(self._arenas):
            there = len(arena.memory)
            if not arena.lent and there >= size and (best < 0 or there < len(self._arenas[best].memory)):
                best = number
        return best

    def _make(self, size: int) -> _Arena | None:
        if size + sum(len(arena.memory) for arena in self._arenas) > self._capacity:
            return None
        try:
            fd = _create(size)
        except OSError:
            return None
        try:
            return _Arena(fd, mmap.mmap(fd, size, mmap.MAP_SHARED))
        except OSError:
            os.close(fd)
            return None

    def take_back(self, numbers: Iterable[int]) -> None:
        """The receiver no longer looks at these arenas."""
        for number in numbers:
            self._arenas[number].lent = False

    def close(self) -> None:
        """Give up the arenas. The receiver's arrays stay what they are."""
        for arena in self._arenas:
            os.close(arena.fd)
        self._arenas.clear()


class Borrower:
    """The arenas of the other side, mapped here."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._watched: dict[int, weakref.ref[NDArray[np.uint8]]] = {}
        self._done: deque[int] = deque()

    def borrow(self, number: int, size: int, fd: int | None) -> NDArray[np.uint8]:
        """The first ``size`` bytes of an arena; lent until the array and all views of it are gone.

        Args:
            number: Number of the arena.
            size: Bytes wanted.
            fd: Its file descriptor when it comes for the first time; closed here.

        Raises:
            ValueError: The arena is not known, or smaller than that.
        """
        if fd is not None:
            try:
                there = os.fstat(fd).st_size
                # Shared and writable: what is written here is seen by the sender alone, who has copies of it all.
                self._maps[number] = mmap.mmap(fd, there, mmap.MAP_SHARED)
            finally:
                os.close(fd)
        mapped = self._maps.get(number)
        if mapped is None or len(mapped) < size:
            there = 0 if mapped is None else len(mapped)
            raise ValueError(f"{size} bytes were announced in arena {number}, which has {there}")
        array = np.frombuffer(mapped, np.uint8, size)
        # Views refer to this array, as it does not own its bytes and what it refers to is none.
        self._watched[number] = weakref.ref(array, lambda _: self._done.append(number))
        return array

    def returned(self) -> list[int]:
        """Arenas that nobody looks at any more, for the sender to know; each is told once.

        The last reference may go in any thread.
        """
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def close(self) -> None:
        """Forget the arenas; arrays over them live on."""
        self._maps.clear()
        self._watched.clear()
