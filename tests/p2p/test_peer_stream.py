"""Writing several frames at once: the same bytes in frames, and never more than the peer allows."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from libp2p.stream_muxer.yamux.yamux import YAMUX_HEADER_FORMAT
from trio.testing import MockClock, wait_all_tasks_blocked

from p2p import stream_window
from p2p.errors import RequestRefusedError
from p2p.peer_stream import BATCH_BYTES, WORTH_S, WRITE_BYTES, PeerStream

HEADER = struct.Struct(YAMUX_HEADER_FORMAT)


class FakeConnection:
    """Takes frames apart again."""

    def __init__(self) -> None:
        self.writes: list[list[int]] = []
        """The lengths of the frames of each write."""
        self.content = b""

    async def _write_frame(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        lengths = []
        while data:
            version, kind, flags, stream_id, length = HEADER.unpack_from(data)
            assert (version, kind, flags, stream_id) == (0, 0, 0, 7)
            body = data[HEADER.size : HEADER.size + length]
            assert len(body) == length
            self.content += body
            lengths.append(length)
            data = data[HEADER.size + length :]
        self.writes.append(lengths)


class FakeStream:
    """A net stream over a multiplexed one, both in one."""

    stream_id = 7
    closed = send_closed = False

    def __init__(self, window: int) -> None:
        self.conn = FakeConnection()
        self.send_window = window
        self.muxed_stream = self
        self.window_opened: trio.Event | None = None
        self.muxed_conn = SimpleNamespace(event_shutting_down=trio.Event())
        self.plain_writes: list[int] = []

    async def write(self, data: bytes) -> None:
        """Do what libp2p does: wait for a window, then write."""
        await trio.lowlevel.checkpoint()
        self.plain_writes.append(len(data))
        self.conn.content += data
        self.send_window += 10 * WRITE_BYTES


def written(window: int, num_bytes: int, **facts: Any) -> FakeStream:
    stream = FakeStream(window)
    for name, value in facts.items():
        setattr(stream, name, value)
    content = bytes(i % 251 for i in range(num_bytes))
    trio.run(PeerStream(stream, "peer").write, content, clock=MockClock(autojump_threshold=0))
    assert stream.conn.content == content
    return stream


def test_what_fits_the_window_goes_in_batches_of_whole_frames() -> None:
    stream = written(16 << 20, BATCH_BYTES + 2 * WRITE_BYTES + 5)
    assert stream.conn.writes == [[WRITE_BYTES] * 6, [WRITE_BYTES, WRITE_BYTES, 5]]
    assert stream.plain_writes == []
    assert stream.send_window == (16 << 20) - (BATCH_BYTES + 2 * WRITE_BYTES + 5)


def test_who_waits_for_room_is_woken_up_and_writes_whole_frames() -> None:
    stream = FakeStream(1)
    content = bytes(2 * WRITE_BYTES)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(PeerStream(stream, "peer").write, content)
            await wait_all_tasks_blocked()
            assert stream.conn.content == b""
            stream.send_window += len(content)
            stream_window.note_opened(stream)

    with_no_time_passing = MockClock()
    trio.run(main, clock=with_no_time_passing)
    assert stream.conn.writes == [[WRITE_BYTES, WRITE_BYTES]]


def test_a_peer_that_reads_nothing_is_given_up() -> None:
    stream = FakeStream(0)
    clock = MockClock(autojump_threshold=0)
    with pytest.raises(RequestRefusedError):
        trio.run(PeerStream(stream, "peer").write, b"1", clock=clock)
    assert stream.conn.content == b""


@pytest.mark.parametrize(
    ("window", "first"),
    [
        (1, [1]),
        (WRITE_BYTES, [WRITE_BYTES]),
        (2 * WRITE_BYTES, [WRITE_BYTES, WRITE_BYTES]),
        (3 * WRITE_BYTES - 1, [WRITE_BYTES, WRITE_BYTES]),
    ],
)
def test_of_little_room_what_fits_is_sent_after_a_while(window: int, first: list[int]) -> None:
    stream = FakeStream(window)
    content = bytes(BATCH_BYTES)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(PeerStream(stream, "peer").write, content)
            await trio.sleep(1.5 * WORTH_S)  # noqa: TID251 - virtual time
            assert stream.conn.writes[0] == first
            assert len(stream.conn.content) <= window
            stream.send_window += 2 * BATCH_BYTES
            stream_window.note_opened(stream)

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert stream.conn.content == content


@pytest.mark.parametrize("ended", ["closed", "send_closed"])
def test_an_ended_stream_is_libp2ps_affair(ended: str) -> None:
    stream = written(16 << 20, 2 * WRITE_BYTES, **{ended: True})
    assert stream.plain_writes == [WRITE_BYTES, WRITE_BYTES]
    assert stream.conn.writes == []


def test_a_small_message_is_one_frame() -> None:
    assert written(16 << 20, 300).conn.writes == [[300]]
