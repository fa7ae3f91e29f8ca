"""Packed gossip: the same frames, in fewer bytes, from strangers."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from libp2p.abc import INetStream
from libp2p.exceptions import ParseError
from libp2p.network.stream.exceptions import StreamReset
from libp2p.utils.varint import decode_varint_with_size, encode_varint_prefixed

from p2p import gossip_packing
from p2p.gossip_packing import (
    WINDOW_BITS,
    PackedStream,
    Packer,
    Unpacker,
    most_packed_bytes,
)

MOST = 4096
FRAMES = st.lists(st.binary(max_size=MOST), max_size=20)


class Written:
    """A stream that keeps what is written, fails when told to, and can be cut."""

    def __init__(self, error: Exception | None = None) -> None:
        self.data: list[bytes] = []
        self.error = error
        self.before: Callable[[], object] = lambda: None
        self.num_aborts = 0
        self.muxed_conn = self

    async def write(self, data: bytes) -> None:
        self.before()
        await trio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        self.data.append(data)

    def abort(self) -> None:
        self.num_aborts += 1


@pytest.fixture(autouse=True)
def _sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip_packing, "tcp_stream_of", lambda connection: connection)


def packed_stream(under: Written) -> PackedStream:
    return PackedStream(cast("INetStream", under))


@given(FRAMES)
@settings(max_examples=30)
def test_frames_arrive_as_they_were(frames: list[bytes]) -> None:
    packer, unpacker = Packer(), Unpacker()
    assert [unpacker.unpack(packer.pack(frame), MOST) for frame in frames] == frames


def test_what_was_said_before_costs_next_to_nothing() -> None:
    """A copy of a record costs its two signatures and what is new in it."""
    topic = b"allmende/1/" + os.urandom(32).hex().encode() + b"/dense/records"
    packer = Packer()
    first, second = (len(packer.pack(topic + os.urandom(128))) for _ in range(2))
    assert first >= len(topic) // 2 + 128
    assert second <= 128 + 16


def test_a_second_implementation_reads_the_text() -> None:
    """RFC 1951, with the window that PROTOCOL.md names; nothing else is needed."""
    reader = zlib.decompressobj(wbits=-WINDOW_BITS)
    packer = Packer()
    for frame in (b"", b"one", b"one two", os.urandom(20_000), b"one two"):
        assert reader.decompress(packer.pack(frame) + b"\x00\x00\xff\xff") == frame


@pytest.mark.parametrize("garbage", [b"\xff" * 9, b"\x03\x00", zlib.compress(b"x" * 99)])
def test_what_is_not_packed_is_refused(garbage: bytes) -> None:
    with pytest.raises(ParseError):
        Unpacker().unpack(garbage, MOST)


def test_no_more_is_unpacked_than_may_be() -> None:
    assert len(Unpacker().unpack(Packer().pack(bytes(MOST)), MOST)) == MOST
    bomb = Packer().pack(bytes(1 << 26))
    assert len(bomb) < 1 << 17
    with pytest.raises(ParseError, match="too large"):
        Unpacker().unpack(bomb, MOST)


def test_what_unpacks_to_nothing_is_no_frame() -> None:
    """Empty blocks cost time and no byte: 260,000 bytes of some took 18 ms of the event loop."""
    nothing = b"\x00\x00\x00\xff\xff" * 20
    assert zlib.decompressobj(-WINDOW_BITS).decompress(nothing) == b""
    with pytest.raises(ParseError, match="for a frame of 0"):
        Unpacker().unpack(nothing, MOST)


@pytest.mark.parametrize("num_bytes", [0, 1, 40, MOST, 262_144])
def test_what_does_not_pack_is_still_within_bounds(num_bytes: int) -> None:
    packer, unpacker = Packer(), Unpacker()
    for _ in range(3):
        frame = os.urandom(num_bytes)
        packed = packer.pack(frame)
        assert len(packed) <= most_packed_bytes(num_bytes)
        assert unpacker.unpack(packed, num_bytes) == frame


def test_many_that_write_at_once_are_understood() -> None:
    under = Written()
    frames = {os.urandom(1) * n for n in range(1, 20)}

    async def main() -> None:
        stream = packed_stream(under)
        async with trio.open_nursery() as nursery:
            for frame in frames:
                nursery.start_soon(stream.write, encode_varint_prefixed(frame))
        assert 0.0 < stream.packed_fraction <= 1.0

    trio.run(main)
    unpacker = Unpacker()
    bodies = [data[decode_varint_with_size(data)[1] :] for data in under.data]
    assert {unpacker.unpack(body, MOST) for body in bodies} == frames


@pytest.mark.parametrize(
    ("error", "num_aborts"), [(OSError("late"), 1), (StreamReset("by the neighbour"), 0)]
)
def test_a_frame_that_was_not_written_ends_the_connection(
    error: Exception, num_aborts: int
) -> None:
    """The neighbour could not make sense of the next one, and would be taken for hostile here."""
    under = Written(error)

    async def main() -> None:
        with pytest.raises(type(error)):
            await packed_stream(under).write(encode_varint_prefixed(b"frame"))

    trio.run(main)
    assert under.num_aborts == num_aborts


def test_cancelling_a_write_ends_the_connection() -> None:
    under = Written()

    async def main() -> None:
        with trio.CancelScope() as scope:
            under.before = scope.cancel
            await packed_stream(under).write(encode_varint_prefixed(b"frame"))

    trio.run(main)
    assert (under.data, under.num_aborts) == ([], 1)


def test_it_stands_for_the_stream_below() -> None:
    below: Any = SimpleNamespace(muxed_conn="connection", get_protocol=lambda: "protocol")
    stream = PackedStream(below)
    assert (stream.muxed_conn, stream.get_protocol()) == ("connection", "protocol")
