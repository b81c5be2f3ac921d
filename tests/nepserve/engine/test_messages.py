from __future__ import annotations

import gc
import os
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from nepserve.engine import arenas, messages
from nepserve.engine.messages import Channel, Closed, Message, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADER = msgpack.packb(("x", 1, {}, [], []))
INLINE = messages.INLINE_BYTES
needs_memfd = pytest.mark.skipif(not arenas.available(), reason="this kernel has no memfd that can be sealed")
ways = pytest.mark.parametrize(
    "shared", [pytest.param(True, marks=needs_memfd, id="arenas"), pytest.param(False, id="plain")]
)


@contextmanager
def channels(*, shared: bool) -> Iterator[tuple[Channel, Channel, socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    one, two = Channel(a, arenas=shared), Channel(b, arenas=shared)
    try:
        yield one, two, a, b
    finally:
        one.close()
        two.close()


def carry(sender: Channel, sock: socket.socket, receiver: Channel, *what: Any) -> Message:
    """One message from one end to the other, whatever its size."""
    outgoing = sender.message(*what)
    thread = threading.Thread(target=outgoing.send, args=(sock,))
    thread.start()
    found: list[Message] = []
    while not found:
        found = receiver.read()
    thread.join()
    assert len(found) == 1
    return found[0]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


arrays_of_any_kind = st.dictionaries(
    st.text(max_size=8),
    st.sampled_from([np.float64, np.float32, np.int64, np.uint8, np.bool_]).flatmap(
        lambda kind: npst.arrays(kind, npst.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=9))
    ),
    max_size=6,
)


@ways
@given(
    arrays=arrays_of_any_kind, body=st.dictionaries(st.text(max_size=5), st.integers(0, 2**60) | st.text(max_size=9))
)
@settings(max_examples=60)
def test_what_is_sent_arrives(shared: bool, arrays: dict[str, np.ndarray], body: dict[str, Any]) -> None:
    with channels(shared=shared) as (one, two, a, _):
        found = carry(one, a, two, "evaluate", 7, body, arrays)
        assert (found.kind, found.id, found.body) == ("evaluate", 7, body)
        assert list(found.arrays) == list(arrays)
        for name, values in arrays.items():
            assert found.arrays[name].dtype == values.dtype
            assert found.arrays[name].shape == values.shape
            assert found.arrays[name].tobytes() == values.tobytes()
            assert found.arrays[name].flags.writeable
            assert found.arrays[name].flags.aligned


@ways
@pytest.mark.parametrize(
    "size",
    [INLINE - 1, INLINE, INLINE + 1, 2 * INLINE - 40, 2 * INLINE, arenas.SMALLEST, arenas.SMALLEST + 1, 5_000_000],
)
def test_sizes_at_the_thresholds(shared: bool, size: int) -> None:
    values = np.random.default_rng(size).integers(0, 255, size, np.uint8)
    with channels(shared=shared) as (one, two, a, _):
        for _ in range(2):
            found = carry(one, a, two, "x", 1, {}, {"small": np.arange(3.0), "values": values})
            assert found.arrays["values"].tobytes() == values.tobytes()
            assert found.arrays["small"].tolist() == [0, 1, 2]


@ways
def test_strided_arrays_arrive_as_they_look(shared: bool) -> None:
    values = np.arange(120_000.0).reshape(300, 400)[::2, ::-1]
    with channels(shared=shared) as (one, two, a, _):
        small = carry(one, a, two, "x", 1, {}, {"v": values[:5]})
        large = carry(one, a, two, "x", 1, {}, {"v": values})
        assert np.array_equal(small.arrays["v"], values[:5])
        assert np.array_equal(large.arrays["v"], values)


@ways
def test_many_messages_in_one_read(shared: bool) -> None:
    with channels(shared=shared) as (one, two, a, _):
        for i in range(50):
            assert one.message("x", i, {"i": i}, {"v": np.full(i, float(i))}).send(a)
        found: list[Message] = []
        while len(found) < 50:
            found += two.read()
        assert [m.id for m in found] == list(range(50))
        assert all(m.arrays["v"].tolist() == [float(m.id)] * m.id for m in found)


@ways
def test_a_message_that_arrives_byte_by_byte(shared: bool) -> None:
    with channels(shared=False) as (one, _, a, b), channels(shared=shared) as (_, two, c, d):
        d.setblocking(False)
        assert one.message("x", 3, {"text": "y" * 100}, {"v": np.arange(40.0)}).send(a)
        data = b.recv(1 << 20)
        found: list[Message] = []
        for i in range(len(data)):
            assert not found
            c.send(data[i : i + 1])
            found += two.read()
        assert found[0].arrays["v"].tolist() == list(range(40))
        assert two.read() == []


def test_a_header_larger_than_the_buffer() -> None:
    text = "long" * 200_000
    with channels(shared=False) as (one, two, a, _):
        assert carry(one, a, two, "x", 1, {"text": text}, {"v": np.arange(9.0)}).body == {"text": text}
        assert carry(one, a, two, "y", 2, {}, {}).kind == "y"


@needs_memfd
def test_large_arrays_do_not_pass_through_the_socket() -> None:
    with channels(shared=True) as (one, _, a, b):
        assert one.message("x", 1, {}, {"v": np.zeros(1_000_000)}).send(a)
        assert len(b.recv(1 << 20)) < 200


@needs_memfd
def test_an_arena_is_not_used_again_while_an_array_lives() -> None:
    with channels(shared=True) as (one, two, a, b):
        held = []
        for i in range(4):
            found = carry(one, a, two, "x", i, {}, {"v": np.full(50_000, float(i))})
            held.append(found.arrays["v"][10:20].reshape(2, 5))
            del found
            carry(two, b, one, "tell", 0, {})
        for i, values in enumerate(held):
            assert (values == i).all()


@needs_memfd
def test_arenas_are_used_again_once_their_arrays_are_gone() -> None:
    with channels(shared=True) as (one, two, a, b):
        carry(one, a, two, "x", 0, {}, {"v": np.zeros(200_000)})
        carry(two, b, one, "tell", 0, {})
        before = descriptors()
        for i in range(30):
            carry(one, a, two, "x", i, {}, {"v": np.full(200_000 - i, float(i))})
            carry(two, b, one, "tell", 0, {})
        assert descriptors() == before


@needs_memfd
def test_without_a_free_arena_the_socket_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas.Lender.__init__, "__defaults__", (2 * arenas.SMALLEST,))
    with channels(shared=True) as (one, two, a, _):
        held = [carry(one, a, two, "x", i, {}, {"v": np.full(90_000, float(i))}) for i in range(5)]
        assert [m.arrays["v"].sum() for m in held] == [90_000.0 * i for i in range(5)]


@needs_memfd
@pytest.mark.parametrize("failing", ["memfd_create", "posix_fallocate"])
def test_a_kernel_without_memory_or_memfds(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with channels(shared=True) as (one, two, a, _):
        before = descriptors()
        monkeypatch.setattr(os, failing, refuse)
        assert not arenas.available()
        found = carry(one, a, two, "x", 1, {}, {"v": np.arange(100_000.0)})
        assert found.arrays["v"].sum() == np.arange(100_000.0).sum()
        assert descriptors() == before


@needs_memfd
def test_arrays_outlive_the_channel() -> None:
    with channels(shared=True) as (one, two, a, _):
        found = carry(one, a, two, "x", 1, {}, {"v": np.arange(100_000.0)})
    gc.collect()
    assert found.arrays["v"][-1] == 99_999.0


@needs_memfd
def test_closed_channels_leave_no_descriptors() -> None:
    before = descriptors()
    for _ in range(5):
        with channels(shared=True) as (one, two, a, _):
            carry(one, a, two, "x", 1, {}, {"v": np.zeros(100_000)})
            # This one is never read.
            one.message("x", 2, {}, {"v": np.zeros(900_000)}).send(a)
    gc.collect()
    assert descriptors() == before


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", id="http"),
        pytest.param(bytes(64), id="zeros"),
        pytest.param(messages._PREFIX.pack(b"NEPM", 2**31, 0, 0, 0), id="huge-header"),
        pytest.param(messages._PREFIX.pack(b"NEPM", 5, 0, 0, 0) + HEADER, id="cut-header"),
        pytest.param(messages._PREFIX.pack(b"NEPM", 7, 100, 3, 0) + HEADER, id="no-descriptor"),
        pytest.param(messages._PREFIX.pack(b"NEPM", 7, 100, 1, 9) + HEADER, id="unknown-arena"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with channels(shared=True) as (_, two, a, _b):
        a.sendall(data + b"\x90" * 10)
        with pytest.raises(ProtocolError):
            two.read()


@needs_memfd
def test_an_arena_smaller_than_announced_is_refused() -> None:
    with channels(shared=True) as (_, two, a, _b):
        fd = os.memfd_create("small")
        os.ftruncate(fd, 4096)
        socket.send_fds(a, [messages._PREFIX.pack(b"NEPM", 7, 10**6, 3, 0) + HEADER], [fd])
        os.close(fd)
        with pytest.raises(ProtocolError, match="1000000 bytes were announced in arena 0, which has 4096"):
            two.read()


def test_the_other_side_closes() -> None:
    with channels(shared=False) as (one, two, a, b):
        one.message("last", 1, {}, {"v": np.arange(3)}).send(a)
        a.close()
        assert two.read()[0].kind == "last"
        with pytest.raises(Closed):
            two.read()
        with pytest.raises(Closed):
            two.message("x", 2, {}, {}).send(b)


def test_the_other_side_closes_within_a_message() -> None:
    with channels(shared=False) as (one, _, a, b), channels(shared=False) as (_, two, c, _d):
        one.message("first", 1, {}).send(a)
        one.message("cut", 2, {}, {"v": np.zeros(40_000)}).send(a)
        data = b.recv(200_000)
        threading.Thread(target=lambda: (c.sendall(data[:100_000]), c.close())).start()
        seen: list[str] = []

        def read_on() -> None:
            while True:
                seen.extend(m.kind for m in two.read())

        with pytest.raises(Closed):
            read_on()
        assert seen == ["first"]
