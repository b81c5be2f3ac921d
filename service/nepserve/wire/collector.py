"""Python's garbage collector, kept still while a large text becomes objects."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_lock = Lock()
_users = 0
_was_on = False


@contextmanager
def still() -> Iterator[None]:
    """No collections in this process until the last of the blocks that run at a time ends, in whatever thread.

    Millions of new lists make the collector look at all of them over and over, which takes longer than reading the
    text and keeps the interpreter from everybody else; none of them is garbage.
    """
    global _users, _was_on  # noqa: PLW0603 - the collector is one for the process
    with _lock:
        if not _users:
            _was_on = gc.isenabled()
            gc.disable()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and _was_on:
                gc.enable()
