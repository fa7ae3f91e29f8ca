"""Frames that are sorted where they lie: however they are cut, and whoever sends them."""

from __future__ import annotations

import struct
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from libp2p.stream_muxer.yamux import yamux

from p2p.frame_session import FrameSession
from p2p.guarded_yamux import MAX_UNREAD_BYTES, GuardedYamux
from p2p.swarm import open_swarm
from tests.p2p.support import new_identity, quick_config, trio_test

HEADER = struct.Struct(yamux.YAMUX_HEADER_FORMAT)
STREAM, OTHER, UNKNOWN = 1, 3, 9
MAX_ECHO_BYTES = 1 << 20


class Mux:
    """What the session knows of a multiplexer."""

    def __init__(self) -> None:
        ids = (STREAM, OTHER)
        self.streams = {i: SimpleNamespace(recv_window=1 << 18, send_window=0) for i in ids}
        self.stream_buffers = {i: bytearray() for i in ids}
        self.stream_events = {i: trio.Event() for i in ids}
        self.announced = 0

    def verify_room(self, num_bytes: int) -> None:
        self.announced += num_bytes


class Raw:
    """Gives messages as a socket does, already decrypted."""

    def __init__(self, messages: list[bytes]) -> None:
        self._messages = messages
        self.stream = self

    def take_message(self) -> bytes | None:
        """Every other message has come together with the one before."""
        return self._messages.pop(0) if len(self._messages) % 2 else None

    async def read_message(self) -> bytes:
        await trio.lowlevel.checkpoint()
        return self._messages.pop(0)


def session_of(messages: list[bytes], mux: Mux) -> FrameSession:
    plain = SimpleNamespace(decrypt_with_ad=lambda _ad, data: data)
    noise = SimpleNamespace(cipher_state_encrypt=plain, cipher_state_decrypt=plain)
    conn = SimpleNamespace(
        noise_state=SimpleNamespace(noise_protocol=noise),
        read_writer=SimpleNamespace(read_write_closer=Raw(messages)),
    )
    session = SimpleNamespace(conn=conn, _drain=lambda _n: b"")
    return FrameSession(cast("Any", session), mux)


def frame(kind: int, flags: int, stream_id: int, body: bytes = b"", length: int = -1) -> bytes:
    return HEADER.pack(0, kind, flags, stream_id, len(body) if length < 0 else length) + body


def data_frame(stream_id: int, body: bytes) -> bytes:
    return frame(yamux.TYPE_DATA, 0, stream_id, body)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces: list[bytes] = []
    while data:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(data[:size])
        data = data[size:]
    return pieces


@given(st.lists(st.integers(1, 70), min_size=1, max_size=8))
def test_however_messages_are_cut_data_and_windows_arrive_and_the_rest_is_libp2ps(
    sizes: list[int],
) -> None:
    mux = Mux()
    ping = frame(yamux.TYPE_PING, yamux.FLAG_SYN, 0, length=77)
    last = frame(yamux.TYPE_DATA, yamux.FLAG_FIN, STREAM, b"last")
    wire = b"".join(
        (
            data_frame(STREAM, b"first"),
            data_frame(UNKNOWN, b"dropped"),
            frame(yamux.TYPE_WINDOW_UPDATE, 0, OTHER, length=1000),
            ping,
            data_frame(OTHER, b"x" * 200),
            data_frame(STREAM, b" and second"),
            last,
        )
    )
    session = session_of(cut(wire, sizes), mux)

    async def main() -> None:
        assert await session.read(HEADER.size) == ping
        assert await session.read(HEADER.size) == last[: HEADER.size]
        assert await session.read_body(4) == b"last"

    trio.run(main)
    assert mux.stream_buffers[STREAM] == b"first and second"
    assert mux.stream_buffers[OTHER] == b"x" * 200
    assert mux.streams[OTHER].send_window == 1000
    assert mux.streams[STREAM].recv_window == (1 << 18) - len(b"first and second")
    assert mux.stream_events[STREAM].is_set()
    assert mux.announced == len(b"first and second") + 200 + len(b"dropped")


def test_a_frame_that_is_too_large_is_left_to_libp2p_which_ends_the_connection() -> None:
    mux = Mux()
    wire = frame(yamux.TYPE_DATA, 0, STREAM, length=yamux.MAX_WINDOW_SIZE + 1)
    assert trio.run(session_of([wire], mux).read, HEADER.size) == wire
    assert mux.announced == 0


def test_what_was_read_makes_room_again() -> None:
    reported: list[object] = []
    swarm = SimpleNamespace(note_misdeed=lambda *what: reported.append(what))
    buffers = {STREAM: bytearray()}
    mux = cast("Any", SimpleNamespace(_most_unread=0, stream_buffers=buffers, swarm=swarm))
    mux.peer_id = "peer"
    for _ in range(100):
        GuardedYamux.verify_room(mux, 1 << 20)
    assert not reported, "all of it has been read meanwhile"
    buffers[STREAM] += bytes(MAX_UNREAD_BYTES - 5)
    with pytest.raises(trio.TooSlowError):
        GuardedYamux.verify_room(mux, MAX_UNREAD_BYTES)
    assert len(reported) == 1


@pytest.mark.slow
@trio_test
async def test_py_libp2p_without_guards_gets_its_bytes_back() -> None:
    async def echo(_peer_id: str, data: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return data

    async with open_swarm(new_identity(), quick_config()) as one:
        protocol = "/test/echo/1"
        one.serve(protocol, echo, max_request_bytes=MAX_ECHO_BYTES, purpose="echo")
        words = (one.listen_addrs[0], protocol, str(MAX_ECHO_BYTES - 1))
        argv = [sys.executable, "-m", "tests.p2p.stock_peer", *words]
        done = await trio.run_process(argv, capture_stdout=True, capture_stderr=True, check=False)
        assert done.stdout == b"the same\n", done.stderr
