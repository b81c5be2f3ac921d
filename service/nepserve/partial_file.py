"""Output files that have their name only when they are complete."""

from __future__ import annotations

import errno
import gzip
import os
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from nepcore.errors import NepError
from nepcore.files import durable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from io import FileIO


class OutputError(NepError):
    """Results that cannot be written where they should go."""


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn an ``OSError`` of writing ``path`` into an :class:`OutputError` that names it."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror or error}") from error


class PartialFile:
    """A binary output file: ``<name>.partial`` until :meth:`close` gives it its name.

    ``-`` is the standard output. What exists and is no regular file (a device, a pipe) is written as it is. A name that
    ends in ``.gz`` is packed: each write by itself, so that the file can be cut behind any of them.

    Args:
        path: Its name.
        kept: Bytes of a partial file that stay, what is behind them is cut off; None begins a new one.

    Attributes:
        partial: Its name until it is complete; None where it has none.

    Raises:
        OutputError: The file cannot be made, or holds fewer bytes than are to stay.
    """

    def __init__(self, path: str | Path, kept: int | None = None) -> None:
        self._shown = str(path)
        self.partial: Path | None = None
        self._packed = self._empty = False
        self._whole = kept or 0
        if self._shown == "-":
            self._file: BinaryIO | FileIO = sys.stdout.buffer
            return
        # A link stays a link: what it points to is written.
        self._path = Path(os.path.realpath(path))
        if not self._path.exists() or self._path.is_file():
            self.partial = partial_name(self._path)
        with writing(path):
            self._file = (self.partial or self._path).open("wb" if kept is None else "r+b", buffering=0)
            if kept is not None:
                durable.cut(self._file, kept)
        self._packed = self._path.suffix == ".gz"
        self._empty = not kept

    def write(self, content: bytes) -> None:
        """Write more.

        Raises:
            OutputError: The disk is full, the reader is gone …
        """
        if content:
            with writing(self._shown):
                content = gzip.compress(content, 6, mtime=0) if self._packed else content
                _write_all(self._file, content)
            self._whole += len(content)
            self._empty = False

    def settle(self) -> int:
        """Have the disk hold what was written; its size in bytes.

        Raises:
            OutputError: It cannot.
        """
        with writing(self._shown):
            return durable.settle(self._file)

    def close(self) -> None:
        """Finish the file and give it its name.

        Raises:
            OutputError: It cannot be finished.
        """
        with writing(self._shown):
            self._finish()
            if self.partial is not None:
                self.partial.replace(self._path)

    def abandon(self, keep: bool) -> list[Path]:
        """Finish the file without naming it, and remove it unless it is to be kept; what is left of it."""
        # If it cannot be finished (the disk is full, the reader is gone), that was said before.
        with suppress(OSError):
            if self.partial is not None and not self._file.closed:
                # What was written in part is no result.
                os.truncate(self._file.fileno(), self._whole)
            self._finish()
        return remaining([] if self.partial is None else [self.partial], keep)

    def _finish(self) -> None:
        if self._packed and self._empty and not self._file.closed:
            _write_all(self._file, gzip.compress(b"", 6, mtime=0))
            self._empty = False
        if self._file is sys.stdout.buffer:
            self._file.flush()
        else:
            self._file.close()


def _write_all(file: BinaryIO | FileIO, content: bytes) -> None:
    """Write all of it: a raw stream (also the standard output where Python does not buffer it) may take less."""
    left = memoryview(content)
    while left:
        taken = file.write(left)
        if not taken:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        left = left[taken:]


def partial_name(path: Path) -> Path:
    """The name of ``path`` while it is not complete."""
    return path.with_name(path.name + ".partial")


def remaining(paths: Iterable[Path], keep: bool) -> list[Path]:
    """Those of ``paths`` that exist; none, after removing them, unless they are to be kept."""
    left = [path for path in paths if path.exists()]
    if keep:
        return left
    for path in left:
        path.unlink()
    return []


def refuse_overwriting(output: str | Path, inputs: Iterable[str | Path]) -> None:
    """Refuse an output that is one of the inputs, under its own or its partial name.

    Raises:
        OutputError: Naming both.
    """
    if str(output) == "-":
        return
    for read in inputs:
        for target in (Path(output), partial_name(Path(output))):
            if str(read) != "-" and _same(Path(read), target):
                raise OutputError(f"{target}: the output would overwrite {read}; choose another name")


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except (OSError, ValueError):
        return False
