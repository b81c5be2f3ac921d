"""Messages between the processes of a server over a unix stream socket.

A message is a fixed prefix, a msgpack header and a payload of arrays:

    prefix   "NEPM", header bytes u32, payload bytes u64, flags u32, arena u32 (little-endian)
    header   [kind, id, body, [[array name, dtype, shape], ...], [arenas given back]]
    payload  the arrays in the order of the header, each from a multiple of its item size on

A small payload follows the header. A large one lies in an arena (flag 1; see :mod:`.arenas`) whose file descriptor is
attached to the first message that uses it (flag 2). Where there is no memfd, or no arena is free, the payload follows
the header whatever its size. A message without a payload may bring a socket (flag 4).
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections import deque
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from .arenas import Borrower, Lender

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

INLINE_BYTES = 128 * 1024
"""Payloads up to this size follow their header: to copy them through the socket is as fast as an arena."""

BUFFER_BYTES = 4 * 1024 * 1024
"""Socket buffer asked of the kernel (it grants what its limits allow): a message should not need two turns."""

_PREFIX = struct.Struct("<4sIQII")
_MAGIC = b"NEPM"
_IN_ARENA = 1
_NEW_ARENA = 2
_SOCKET = 4
_MAX_HEADER = 1 << 30
_READ_BYTES = 256 * 1024
_CHUNK = 1 << 30  # one call moves at most 2 GiB
_PADDING = bytes(16)
_MOST_PIECES = 512  # the kernel takes 1,024 of them in one call
_RIGHTS_SPACE = socket.CMSG_SPACE(16 * 4)
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Closed(Exception):  # noqa: N818 -- an end, not a mistake
    """The other side closed the socket, or died."""


class ProtocolError(Exception):
    """Bytes that are no message: the other side is not ours, or is broken."""


@dataclass(eq=False, slots=True)
class Message:
    """A message as it arrived.

    Attributes:
        arrays: Writable, and the receiver's for as long as it holds them.
        fd: Descriptor of the socket that it brought, the receiver's to close; −1 if it brought none.
    """

    kind: str
    id: int
    body: dict[str, Any]
    arrays: dict[str, NDArray[Any]]
    fd: int = -1


class Outgoing:
    """One message on its way out, sent in as many turns as the socket asks for."""

    def __init__(self, pieces: list[Any], fd: int | None = None, given: socket.socket | None = None) -> None:
        """Take what to send (contiguous buffers), and a file descriptor to attach to it.

        ``given`` is a socket to give away: it is closed here once it is on its way.
        """
        self._pieces = pieces
        self._fd = fd if given is None else given.fileno()
        self._given = given

    def join(self, other: Outgoing) -> bool:
        """Take up what comes after this, to be sent with one call; false if that cannot be."""
        if self._fd is not None or other._fd is not None or len(self._pieces) + len(other._pieces) > _MOST_PIECES:
            return False
        self._pieces += other._pieces
        return True

    def drop(self) -> None:
        """It will not be sent."""
        if self._given is not None:
            self._given.close()

    def send(self, sock: socket.socket) -> bool:
        """Hand the kernel what it takes; true once everything is on its way.

        Raises:
            Closed: The other side is gone.
        """
        while self._pieces:
            try:
                if self._fd is None:
                    sent = sock.sendmsg(self._pieces)
                else:
                    rights = array.array("i", [self._fd])
                    sent = sock.sendmsg(self._pieces, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                    self._fd = None
                    self.drop()
            except BlockingIOError:
                return False
            except ConnectionError as error:
                raise Closed(str(error)) from error
            self._advance(sent)
        return True

    def _advance(self, sent: int) -> None:
        left: list[Any] = []
        for piece in self._pieces:
            size = piece.nbytes if isinstance(piece, np.ndarray) else len(piece)
            if sent >= size:
                sent -= size
            elif sent:
                left.append(memoryview(piece).cast("B")[sent:])
                sent = 0
            else:
                left.append(piece)
        self._pieces = left


class Channel:
    """One side of the way: writes messages, and takes those of the other side from a socket.

    Args:
        sock: A unix stream socket, blocking or not.
        arenas: Whether large payloads may go through arenas.
    """

    def __init__(self, sock: socket.socket, *, arenas: bool) -> None:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        self._sock = sock
        self._lender = Lender() if arenas else None
        self._borrower = Borrower()
        # A new packer would take and give back a large buffer each time.
        self._pack = msgpack.Packer(autoreset=True).pack
        self._buffer = bytearray(_READ_BYTES)
        self._view = memoryview(self._buffer)
        self._have = 0
        self._fds: deque[int] = deque()
        # A message whose payload is still arriving: its header, the payload, and how much of it is there.
        self._header: list[Any] = []
        self._payload: bytearray | None = None
        self._filled = 0

    def message(
        self,
        kind: str,
        id: int,  # noqa: A002
        body: Mapping[str, Any],
        arrays: Mapping[str, NDArray[Any]] | None = None,
        *,
        give: socket.socket | None = None,
    ) -> Outgoing:
        """Make a message. Arrays that do not go into an arena are read when they are sent, and must not change.

        ``give`` is a socket that the receiver shall have; such a message carries no arrays.
        """
        table = []
        placed: list[tuple[int, NDArray[Any]]] = []
        size = 0
        if arrays:
            for name, values in arrays.items():
                dtype = values.dtype
                table.append((name, dtype.str, values.shape))
                if bytes_ := values.nbytes:
                    offset = size + -size % dtype.itemsize
                    placed.append((offset, values))
                    size = offset + bytes_
        header = self._pack((kind, id, body, table, self._borrower.returned()))
        if give is not None:
            return Outgoing([_PREFIX.pack(_MAGIC, len(header), 0, _SOCKET, 0) + header], given=give)
        if self._lender is not None and size > INLINE_BYTES and (lent := self._lender.lend(placed, size)):
            number, fd = lent
            flags = _IN_ARENA if fd is None else _IN_ARENA | _NEW_ARENA
            return Outgoing([_PREFIX.pack(_MAGIC, len(header), size, flags, number) + header], fd)
        pieces: list[Any] = [_PREFIX.pack(_MAGIC, len(header), size, 0, 0) + header]
        end = 0
        for offset, values in placed:
            if offset > end:
                pieces.append(_PADDING[: offset - end])
            pieces.append(values if values.flags.c_contiguous else np.ascontiguousarray(values))
            end = offset + values.nbytes
        return Outgoing(pieces)

    def read(self) -> list[Message]:
        """Take what is there, in one or a few system calls; messages that are whole come back.

        On a blocking socket it waits for the first bytes; a large payload is then awaited whole.

        Raises:
            Closed: The other side closed the socket, or died.
            ProtocolError: What came is no message.
        """
        if self._payload is not None:
            return self._read_payload()
        try:
            data, rights, flags, _ = self._sock.recvmsg_into([self._view[self._have :]], _RIGHTS_SPACE, _CLOSE_ON_EXEC)
        except BlockingIOError:
            return []
        except ConnectionError as error:
            # It died with bytes of ours unread.
            raise Closed(str(error)) from error
        for level, kind, content in rights:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds.extend(array.array("i", content[: len(content) // 4 * 4]))
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError("a file descriptor was lost on the way: this process may have no more of them")
        if not data:
            raise Closed("the other side closed the socket")
        self._have += data
        return self._parse()

    def close(self) -> None:
        """Close the socket and every descriptor; arrays that were received live on."""
        self._sock.close()
        while self._fds:
            os.close(self._fds.popleft())
        self._borrower.close()
        if self._lender is not None:
            self._lender.close()
            self._lender = None

    def _read_payload(self) -> list[Message]:
        payload = self._payload
        assert payload is not None
        view = memoryview(payload)
        while self._filled < len(payload):
            try:
                got = self._sock.recv_into(view[self._filled : self._filled + _CHUNK])
            except BlockingIOError:
                return []
            except ConnectionError as error:
                raise Closed(str(error)) from error
            if not got:
                raise Closed("the other side closed the socket within a message")
            self._filled += got
        self._payload = None
        return [self._message(self._header, payload)]

    def _parse(self) -> list[Message]:
        """Cut whole messages from the buffer and keep the rest."""
        found: list[Message] = []
        start = 0
        have = self._have
        while have - start >= _PREFIX.size:
            magic, header_size, size, flags, number = _PREFIX.unpack_from(self._buffer, start)
            if magic != _MAGIC or header_size > _MAX_HEADER:
                raise ProtocolError("what came is not a message of this program")
            body = start + _PREFIX.size
            end = body + header_size
            if end > have:
                self._make_room(end - start)
                break
            try:
                header = msgpack.unpackb(self._view[body:end], strict_map_key=False)
            except ValueError as error:
                raise ProtocolError(f"a header cannot be read: {error}") from error
            if flags & _IN_ARENA:
                found.append(self._message(header, self._borrow(number, size, new=bool(flags & _NEW_ARENA))))
                start = end
                continue
            if flags & _SOCKET:
                if not self._fds:
                    raise ProtocolError("a message came without the socket it announced")
                found.append(self._message(header, bytearray()))
                found[-1].fd = self._fds.popleft()
                start = end
                continue
            start = end + size
            if start > have:
                self._header, self._payload, self._filled = header, bytearray(size), have - end
                self._payload[: have - end] = self._view[end:have]
                start = have
                break
            found.append(self._message(header, self._buffer[end:start]))
        if start:
            self._buffer[: have - start] = self._buffer[start:have]
            self._have = have - start
        if self._payload is not None:
            try:
                found += self._read_payload()
            except Closed:
                # What came before the end is still good; the next read meets the end again.
                if not found:
                    raise
        return found

    def _make_room(self, size: int) -> None:
        if size > len(self._buffer):
            larger = bytearray(size)
            larger[: len(self._buffer)] = self._buffer
            self._buffer = larger
            self._view = memoryview(larger)

    def _borrow(self, number: int, size: int, *, new: bool) -> NDArray[np.uint8]:
        if new and not self._fds:
            raise ProtocolError("a message came without the file descriptor it announced")
        try:
            return self._borrower.borrow(number, size, self._fds.popleft() if new else None)
        except (ValueError, OSError) as error:
            raise ProtocolError(f"an arena cannot be used: {error}") from error

    def _message(self, header: list[Any], payload: bytearray | NDArray[np.uint8]) -> Message:
        kind, id_, body, table, returned = header
        if returned and self._lender is not None:
            self._lender.take_back(returned)
        arrays: dict[str, NDArray[Any]] = {}
        offset = 0
        for name, code, shape in table:
            dtype = _DTYPES.get(code)
            if dtype is None:
                dtype = _DTYPES[code] = np.dtype(code)
            size = prod(shape) * dtype.itemsize
            if size:
                offset += -offset % dtype.itemsize
                arrays[name] = np.ndarray(shape, dtype, payload, offset)
                offset += size
            else:
                arrays[name] = np.empty(shape, dtype)
        return Message(kind, id_, body, arrays)


_DTYPES: dict[str, np.dtype[Any]] = {}
