"""Extended XYZ: one parser for the trainer, the server, the command line and the client, and one writer.

A frame is a line with the number of atoms, a comment line of ``key=value`` items, and one line an atom with exactly
the columns that ``Properties`` announces (``species:S:1:pos:R:3`` where it says nothing). Keys and column names are
read in any letter case, species exactly as they are spelled in ``nep.txt``; numbers are read whole and must be finite
(an exponent is written with E, not with Fortran's D). Blank lines between frames, CRLF, a byte order mark and a missing
last newline are fine.

Virials are W = −∂E/∂ε in eV; a ``stress`` label (eV/Å³, tension positive) becomes W = −V σ.
"""

from __future__ import annotations

import gzip
import math
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from nepcore.errors import InputFileError

from .xyz_atoms import misfit
from .xyz_comment import Fault, header, shown
from .xyz_frames import MAX_DISAGREEMENT, MISSING, Frames, RawFrame, build
from .xyz_write import dumps, write

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_LINE = 1 << 26
"""Longest line, bytes; a longer one is not a structure file."""

_CHUNK = 1 << 22

_CHECK_LINES = 100_000
"""A frame that is not complete after this many lines is checked while it arrives: its count may be a mistake."""


class TooManyError(ValueError):
    """There is more in the content than was to be read.

    Attributes:
        frames: Frames that were found before reading stopped.
        atoms: Atoms that they announce.
    """

    def __init__(self, frames: int, atoms: int) -> None:
        super().__init__(f"more than wanted: {frames:,} frames, {atoms:,} atoms so far")
        self.frames = frames
        self.atoms = atoms


def parse(
    data: bytes | bytearray | str,
    path: str = "<request>",
    *,
    skip_bad: bool = False,
    max_frames: int | None = None,
    max_atoms: int | None = None,
) -> Frames:
    """Read all frames of a file's content.

    Args:
        data: The content; text is taken as UTF-8.
        path: What messages call it.
        skip_bad: Keep going over frames that cannot be read but whose end is sure; see :attr:`Frames.errors`.
        max_frames: Frames that are taken; None for any number.
        max_atoms: Atoms of all frames together that are taken; None for any number.

    Raises:
        InputFileError: Naming file, frame, line, key or column, and token. Nothing else, whatever the bytes.
        TooManyError: There are more than ``max_frames`` or ``max_atoms``; seen before numbers are read.
    """
    content = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else bytes(data)
    scanner = _Scanner(path, max_frames, max_atoms)
    scanner.feed(content)
    scanner.finish()
    return Frames.concatenate(list(_taken(scanner, None, skip_bad)))


def read(path: str | Path, *, skip_bad: bool = False) -> Frames:
    """Read a whole file (also gzip; ``-`` is the standard input); see :func:`parse`."""
    return Frames.concatenate(list(read_blocks(path, skip_bad=skip_bad)))


def read_blocks(
    source: str | Path | BinaryIO,
    max_atoms: int = 200_000,
    *,
    path: str | None = None,
    skip_bad: bool = False,
    first: int = 0,
) -> Iterator[Frames]:
    """Stream a file, larger than memory too, in blocks of about ``max_atoms`` atoms (one frame at least).

    Args:
        source: A file name, ``-`` for the standard input, or an open binary file. What is gzip is unpacked.
        max_atoms: Atoms after which a block ends.
        path: What messages call the file, where ``source`` is an open file.
        skip_bad: As in :func:`parse`.
        first: The first frame that is wanted, from 0. Those before it are counted, and not looked into; the blocks end
            where they would have ended with them.

    Raises:
        InputFileError: As in :func:`parse`, or the file cannot be opened or unpacked. Frames before the one at fault
            have been yielded.
    """
    if not isinstance(source, (str, Path)):
        yield from _stream(source, path or str(getattr(source, "name", "<stream>")), max_atoms, skip_bad, first)
    elif str(source) == "-":
        yield from _stream(sys.stdin.buffer, path or "<stdin>", max_atoms, skip_bad, first)
    else:
        name = path or str(source)
        with _opened(source, name) as file:
            yield from _stream(file, name, max_atoms, skip_bad, first)


def _opened(source: str | Path, name: str) -> BinaryIO:
    try:
        return Path(source).open("rb")
    except (OSError, ValueError) as error:
        raise InputFileError(name, None, None, getattr(error, "strerror", None) or str(error)) from error


def _stream(file: BinaryIO, path: str, max_atoms: int, skip_bad: bool, first: int) -> Iterator[Frames]:
    scanner = _Scanner(path)
    try:
        start = file.read(2)
        if start == b"\x1f\x8b":
            source = cast("BinaryIO", gzip.GzipFile(fileobj=cast("BinaryIO", _Rejoined(start, file))))
        else:
            source = file
            scanner.feed(start)
        # What a pipe holds now is enough: frames are yielded while the writer still works.
        step = getattr(source, "read1", source.read)
        while not scanner.fatal and (chunk := step(_CHUNK)):
            scanner.feed(chunk)
            yield from _taken(scanner, max_atoms, skip_bad, first)
    except (OSError, EOFError, zlib.error) as error:
        raise InputFileError(path, None, None, f"cannot be read: {error}") from error
    scanner.finish()
    yield from _taken(scanner, max_atoms, skip_bad, first)


class _Rejoined:
    """A file whose first bytes have been read already."""

    def __init__(self, start: bytes, rest: BinaryIO) -> None:
        self._start = start
        self._rest = rest

    def read(self, size: int = -1) -> bytes:
        start, self._start = self._start, b""
        return start or self._rest.read(size)


def _taken(scanner: _Scanner, max_atoms: int | None, skip_bad: bool, first: int = 0) -> Iterator[Frames]:
    """Blocks that are complete by now; the first fault is raised after the frames before it."""
    while raws := scanner.take(max_atoms):
        if raws[0].frame < first:
            raws = [raw for raw in raws if raw.frame >= first]
            if not raws:
                continue
        block = build(scanner.path, raws)
        if block.errors and not skip_bad:
            bad = min(block.errors)
            if bad:
                yield block.select(range(bad))
            raise block.errors[bad]
        scanner.cause = block.errors.get(len(block) - 1)
        yield block
    if scanner.fatal is not None:
        # After a frame that could not be read, its fault is the cause of what follows.
        raise scanner.cause or scanner.fatal


class _Scanner:
    """Cuts a stream of bytes into frames.

    Attributes:
        path: What messages call the file.
        fatal: The fault after which no frame can be told from another.
        cause: The fault of the frame before, if there is one.
    """

    def __init__(self, path: str, max_frames: int | None = None, max_atoms: int | None = None) -> None:
        self.path = path
        self._most_frames = math.inf if max_frames is None else max_frames
        self._most_atoms = math.inf if max_atoms is None else max_atoms
        self._atoms = 0
        self.fatal: InputFileError | None = None
        self.cause: InputFileError | None = None
        self._lines: list[bytes] = []
        self._tail = b""
        self._at = 0
        self._gone = 0
        self._frame = 0
        self._checked = 0
        self._ended = False
        self._waiting: list[RawFrame] = []
        self._weight = 0

    def feed(self, chunk: bytes) -> None:
        """Take more of the file."""
        lines = (self._tail + chunk).split(b"\n")
        self._tail = lines.pop()
        self._lines += lines
        if len(self._tail) > MAX_LINE:
            self._stop(len(self._lines), f"a line is longer than {MAX_LINE:,} bytes; this is no structure file")

    def finish(self) -> None:
        """The file has ended."""
        if self._tail:
            self._lines.append(self._tail)
            self._tail = b""
        self._ended = True

    def take(self, max_atoms: int | None) -> list[RawFrame]:
        """Frames of about ``max_atoms`` atoms (None: all); empty if more must be fed first, or at the end."""
        while max_atoms is None or self._weight < max_atoms:
            frame = self._next()
            if frame is None:
                if not (self._ended or self.fatal):
                    return []
                break
            self._waiting.append(frame)
            # A comment line is worth some atoms.
            self._weight += len(frame.atoms) + 5
        taken, self._waiting, self._weight = self._waiting, [], 0
        del self._lines[: self._at]
        self._gone += self._at
        self._at = 0
        return taken

    def _next(self) -> RawFrame | None:
        """The next frame; None if it is not complete yet, or there is none."""
        if self.fatal is not None:
            return None
        lines = self._lines
        if self._frame == 0 and lines:
            lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
        while self._at < len(lines) and not lines[self._at].strip():
            self._at += 1
        at = self._at
        if at == len(lines):
            return None
        count = lines[at].strip()
        # Digits only: int() would take 1_000, too.
        if not count.isdigit() or len(count) > 18:
            self._stop(at, f"found {shown(count)}, wanted the number of atoms of a frame")
            return None
        n = int(count)
        if at + 2 + n > len(lines):
            if self._ended:
                self._ends_early(n)
            elif len(lines) - at - self._checked > _CHECK_LINES:
                self._check(n)
            return None
        if self._frame + 1 > self._most_frames or self._atoms + n > self._most_atoms:
            raise TooManyError(self._frame + 1, self._atoms + n)
        comment = lines[at + 1].decode("utf-8", "surrogateescape").strip()
        frame = RawFrame(self._frame, self._gone + at + 1, comment, lines[at + 2 : at + 2 + n])
        self._frame += 1
        self._atoms += n
        self._at += 2 + n
        self._checked = 0
        return frame

    def _stop(self, row: int, reason: str) -> None:
        self.fatal = InputFileError(self.path, self._frame, self._gone + row + 1, reason)

    def _ends_early(self, n: int) -> None:
        """The file ends within a frame of ``n`` atoms: because of a wrong line in it, if there is one."""
        self._checked = 0
        if self._at + 1 == len(self._lines):
            self._stop(self._at, "the file ends before the comment line")
            return
        self._check(n)
        if self.fatal is None:
            found = sum(bool(line.strip()) for line in self._lines[self._at + 2 :])
            self._stop(self._at, f"the frame ends early: {n} atoms announced, {found} found before the end of the file")

    def _check(self, n: int) -> None:
        """Look for a line that cannot belong to the frame of ``n`` atoms that is arriving."""
        at = self._at
        try:
            columns = header(self._lines[at + 1].decode("utf-8", "surrogateescape").strip()).layout
        except Fault as fault:
            self._stop(at + 1, str(fault))
            return
        for row in range(max(at + 2, at + self._checked), len(self._lines)):
            tokens = self._lines[row].split()
            reason = misfit(tokens, columns, row - at - 2, n)
            if reason is not None and (tokens or not self._ended):
                self._stop(row, reason)
                return
        self._checked = len(self._lines) - at


__all__ = [
    "MAX_DISAGREEMENT",
    "MAX_LINE",
    "MISSING",
    "Frames",
    "TooManyError",
    "dumps",
    "parse",
    "read",
    "read_blocks",
    "write",
]
