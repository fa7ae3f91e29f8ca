"""A multiplexer that notices dead peers and can be neither cut, locked nor flooded.

Runs in: agent. One of the guards (p2p/guards.py lists them, and puts it in place).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import struct
from typing import Any, Final

import trio
from libp2p.io.exceptions import ConnectionClosedError, IOException
from libp2p.network.connection.exceptions import RawConnError
from libp2p.stream_muxer.yamux import yamux

from p2p.conduct import Misdeed
from p2p.contain import contain
from p2p.frame_session import FrameSession
from p2p.quick_lock import take
from p2p.tcp_stream import tcp_stream_of

MAX_UNREAD_BYTES: Final = 16 << 20  # of one connection; four blob chunks in flight are 4 MiB
MAX_DEFERRED_FRAMES: Final = 256  # 12 bytes each
PINGS_SKIPPED: Final = 8  # at most, where other bytes come: pings measure the round trip
WRITE_DEADLINE_S: Final = 30.0  # for one frame of 64 KiB: 2 KB/s
BODY_DEADLINE_S: Final = 60.0  # for a frame that opens or ends a stream

_HEADER: Final = struct.Struct(yamux.YAMUX_HEADER_FORMAT)
_DEFERRED_FLAGS: Final = yamux.FLAG_ACK | yamux.FLAG_RST | yamux.FLAG_FIN
_JITTER: Final = secrets.SystemRandom()
_log = logging.getLogger("p2p.guarded_yamux")


class GuardedYamux(yamux.Yamux):  # type: ignore[misc] # libp2p is untyped
    """A multiplexer that notices dead peers and can be neither cut, locked nor flooded."""

    _ping_id: int
    secured_conn: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.secured_conn = FrameSession(self.secured_conn, self)
        self._most_unread = 0
        self._deferred: list[bytes] = []
        self._is_writing_deferred = False

    async def start(self) -> None:
        """Run the connection until it ends; whatever ends it, its resources are given back."""
        with contain("yamux", peer_id=str(self.peer_id)) as outcome:  # fault 3
            await super().start()
        if outcome.error is not None:
            await self._cleanup_on_error()

    async def _measure_rtt_loop(self) -> None:
        """Drop the connection of a peer that answers no ping. Fault 6.

        Invariant: a peer from which bytes arrive is alive, however long its answer queues.
        """
        while not self.event_shutting_down.is_set():
            if not await self._is_alive(self.swarm.ping_timeout_s):
                _log.info("dropping a silent peer peer=%s", self.peer_id)
                tcp_stream_of(self).abort()
                return
            await self._wait_silent(self.swarm.ping_every_s)

    async def _wait_silent(self, duration_s: float) -> None:
        """Wait until nothing has come for about so long, or a few times that to measure anew.

        Both ends do, so that of two that would ask each other one asks: its question is an answer.
        """
        pinged_at = trio.current_time()
        while not self.event_shutting_down.is_set():
            silence_s = duration_s * _JITTER.uniform(1, 1.5)
            silent_until = tcp_stream_of(self).last_received_at + silence_s
            due_at = min(silent_until, pinged_at + PINGS_SKIPPED * duration_s)
            if due_at <= trio.current_time():
                return
            with trio.move_on_at(due_at):
                await self.event_shutting_down.wait()

    async def _is_alive(self, timeout_s: float) -> bool:
        answered = self._ping_event = trio.Event()
        self._ping_id = (self._ping_id + 1) & 0xFFFFFFFF
        self._ping_sent_time = heard_at = trio.current_time()
        # Deferred: a write is never cancelled half-way, and may not return from a frozen peer.
        self._defer(_HEADER.pack(0, yamux.TYPE_PING, yamux.FLAG_SYN, 0, self._ping_id))
        while True:
            with trio.move_on_after(timeout_s):
                await answered.wait()
            received_at = tcp_stream_of(self).last_received_at
            if answered.is_set() or self.event_shutting_down.is_set():
                return True
            if received_at <= heard_at:
                return False
            heard_at = received_at

    async def _write_frame(self, data: bytes) -> None:
        """Write a whole frame or end the connection.

        New: a cancelled write (a request's deadline) would leave half a frame in the stream that
        all share. New: the reader answers SYN and PING itself; were it to wait for a writer that
        waits for a peer that does the same, nobody would read again. Frames that carry no data
        (answers, resets, ends of streams) are therefore written by a task of their own, in order.
        """
        if self._may_defer(data):
            self._defer(data)
            return
        await self._write_now(data)
        await trio.lowlevel.checkpoint_if_cancelled()  # others had their turn as it was sent

    def _may_defer(self, data: bytes) -> bool:
        is_full = len(self._deferred) >= MAX_DEFERRED_FRAMES
        if len(data) != _HEADER.size or self._nursery is None or is_full:
            return False
        _, kind, flags, _, _ = _HEADER.unpack(data)
        if kind == yamux.TYPE_PING:
            return bool(flags & yamux.FLAG_ACK)
        # A stream's reader does not wait for its neighbours' writers to tell that it has read.
        return kind == yamux.TYPE_WINDOW_UPDATE and (not flags or bool(flags & _DEFERRED_FLAGS))

    def _defer(self, data: bytes) -> None:
        if self.event_shutting_down.is_set():
            return
        self._deferred.append(data)
        if not self._is_writing_deferred:
            self._is_writing_deferred = True
            self._nursery.start_soon(self._write_deferred)

    async def _write_deferred(self) -> None:
        try:
            # The reader sees the same errors and cleans up.
            with contextlib.suppress(IOException, RawConnError):
                while self._deferred:
                    frames = b"".join(self._deferred)
                    self._deferred.clear()
                    await self._write_now(frames)
        finally:
            self._is_writing_deferred = False

    async def _write_now(self, data: bytes) -> None:
        await take(self._write_lock)
        try:
            with trio.move_on_after(WRITE_DEADLINE_S) as scope:
                scope.shield = True
                await self.secured_conn.write(data)
        finally:
            self._write_lock.release()
        if scope.cancelled_caught:
            tcp_stream_of(self).abort()
            raise ConnectionClosedError(
                "connection closed: a frame could not be written", transport="tcp"
            )

    def verify_room(self, num_bytes: int) -> None:
        """Refuse a frame past what may be unread. New: a peer could fill the memory.

        Raises:
            TooSlowError: What stock code closes the connection for.
        """
        self._most_unread += num_bytes  # what is read meanwhile is looked at only where it matters
        if self._most_unread > MAX_UNREAD_BYTES:
            self._most_unread = num_bytes + sum(map(len, self.stream_buffers.values()))
        if self._most_unread > MAX_UNREAD_BYTES:
            self.swarm.note_misdeed(str(self.peer_id), Misdeed.UNREAD_FLOOD)
            raise trio.TooSlowError

    async def _read_data_body(self, length: int) -> bytes:
        """Read the body of a frame that opens or ends a stream."""
        self.verify_room(length)
        with trio.fail_after(BODY_DEADLINE_S):
            body: bytes = await self.secured_conn.read_body(length)
        return body
