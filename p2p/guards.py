"""What keeps py-libp2p 0.8.1 alive among strangers: one guard for each fault. Runs in: agent.

The faults and their measurements are in LIBP2P.md (numbered there; "new" ones were found in reading
0.8.1).

 1 inbound slots and tasks never freed      GuardedSwarm._do_handle_inbound_connection
 2 an exception in a handler kills the host GuardedSwarmConn, GuardedManager
 3 one malformed frame kills the host       the same; GuardedPubsub
 4 a raising validator kills the host       GuardedManager (and p2p.gossip uses async ones only)
 5 plaintext accepted                       p2p.host passes noise alone
 6 frozen peers never noticed               GuardedYamux._measure_rtt_loop
 7 a killed sender looks like a clean end   p2p.framing: lengths everywhere
 8 a reader that stalls breaks the writer   p2p.blobs drains at once; PeerStream writes 65,507 bytes
 9 gossip drops in silence                  wider queues here, pacing in p2p.gossip, and a count
11 the host's nursery dies                  p2p.swarm restarts it
new: a cancelled write cuts a frame in two and breaks the connection for all
GuardedYamux._write_frame
new: both sides write, neither reads: deadlock                                 the same
new: unread data is unbounded; so is the number of streams                     GuardedYamux,
GuardedSwarmConn
new: addresses from strangers are stored and dialled                           GuardedSwarm,
install()
new: a frame that arrives in more than 100 TCP segments breaks the connection  GuardedTcpStream
"""

from __future__ import annotations

import contextlib
import logging
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import libp2p
import trio
from libp2p.abc import IHost, IMuxedConn, IMuxedStream, INetConn, INetStream
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError, IOException
from libp2p.network import swarm as swarm_module
from libp2p.network.connection import swarm_connection
from libp2p.network.connection.exceptions import RawConnError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.pubsub import gossipsub as gossipsub_module
from libp2p.pubsub import pubsub as pubsub_module
from libp2p.pubsub.pb import rpc_pb2
from libp2p.stream_muxer import muxer_multistream
from libp2p.stream_muxer.yamux import yamux
from libp2p.tools.anyio_service.api import Service
from libp2p.tools.anyio_service.trio_manager import TrioManager
from libp2p.tools.anyio_service.utils import get_task_name
from libp2p.transport.tcp import tcp
from multiaddr import Multiaddr

from p2p.contain import contain
from p2p.errors import UnsupportedLibp2pError
from p2p.tcp_stream import GuardedTcpStream, tcp_stream_of

GUARDED_VERSION: Final = "0.8.1"
MAX_UNREAD_BYTES: Final = 16 << 20  # of one connection; four blob chunks in flight are 4 MiB
MAX_INBOUND_STREAMS: Final = 64  # handled at a time on one connection
MAX_OPEN_STREAMS: Final = 1024  # on one connection, half-closed ones included
MAX_DEFERRED_FRAMES: Final = 256  # 12 bytes each
WRITE_DEADLINE_S: Final = 30.0  # for one frame of 64 KiB: 2 KB/s
MAX_TOPIC_CHARS: Final = 128
MAX_SUBSCRIPTIONS_PER_PEER: Final = 64
SUBSCRIPTION_QUEUE: Final = 256  # messages of a topic that wait for us; 32 drop bursts
GOSSIP_PER_FORWARDER_S: Final = 20.0  # the whole swarm should send about one message a second
GOSSIP_BURST: Final = 100.0

_HEADER: Final = struct.Struct(yamux.YAMUX_HEADER_FORMAT)
_DEFERRED_FLAGS: Final = yamux.FLAG_ACK | yamux.FLAG_RST | yamux.FLAG_FIN
_log = logging.getLogger("p2p.guards")


def install() -> None:
    """Put the guards in place; doing so twice is harmless.

    Raises:
        UnsupportedLibp2pError: The installed libp2p is another version.
    """
    if libp2p.__version__ != GUARDED_VERSION:
        raise UnsupportedLibp2pError(
            f"libp2p {libp2p.__version__} is installed; p2p/guards.py is for {GUARDED_VERSION}",
            hint=f"Install libp2p=={GUARDED_VERSION}, or rerun the probes and revise the guards.",
        )
    tcp.TrioTCPStream = GuardedTcpStream
    muxer_multistream.Yamux = GuardedYamux
    swarm_connection.SwarmConn = GuardedSwarmConn
    # Fault 9: a burst longer than the queue is lost in silence.
    pubsub_module.SUBSCRIPTION_CHANNEL_SIZE = SUBSCRIPTION_QUEUE
    # New: signed records fill the peer store with addresses from strangers, cost two signature
    # checks a message, and tell everyone our own addresses. They are not read, and ours names no
    # address.
    for module in (pubsub_module, gossipsub_module):
        module.maybe_consume_signed_record = _ignore_signed_record
        module.env_to_send_in_RPC = _empty_signed_record
    # It logs through the root logger, whose functions install a handler of their own.
    swarm_connection.logging = logging.getLogger("libp2p.network.connection")
    # What strangers send would fill the log with tracebacks; the guards log what matters.
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)


def _ignore_signed_record(_rpc: rpc_pb2.RPC, _host: IHost, _peer_id: ID) -> bool:
    return True


def _empty_signed_record(host: IHost) -> tuple[bytes, bool]:
    return host.get_peerstore().get_local_record().marshal_envelope(), False


class GuardedYamux(yamux.Yamux):  # type: ignore[misc] # libp2p is untyped
    """A multiplexer that notices dead peers and can be neither cut, locked nor flooded."""

    _ping_id: int

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
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
            with trio.move_on_after(self.swarm.ping_every_s):
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
        await trio.lowlevel.checkpoint()

    def _may_defer(self, data: bytes) -> bool:
        is_full = len(self._deferred) >= MAX_DEFERRED_FRAMES
        if len(data) != _HEADER.size or self._nursery is None or is_full:
            return False
        _, kind, flags, _, _ = _HEADER.unpack(data)
        if kind == yamux.TYPE_PING:
            return bool(flags & yamux.FLAG_ACK)
        return kind == yamux.TYPE_WINDOW_UPDATE and bool(flags & _DEFERRED_FLAGS)

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
        async with self._write_lock:
            with trio.move_on_after(WRITE_DEADLINE_S) as scope:
                scope.shield = True
                await self.secured_conn.write(data)
        if scope.cancelled_caught:
            tcp_stream_of(self).abort()
            raise ConnectionClosedError(
                "connection closed: a frame could not be written", transport="tcp"
            )

    async def _read_data_body(self, length: int) -> bytes:
        """Read a frame's body. New: stock code lets a peer fill the memory past its window."""
        if length + sum(map(len, self.stream_buffers.values())) > MAX_UNREAD_BYTES:
            _log.warning("closing a connection that floods peer=%s", self.peer_id)
            raise trio.TooSlowError  # what stock code closes the connection for
        body: bytes = await super()._read_data_body(length)
        return body


class GuardedSwarmConn(swarm_connection.SwarmConn):  # type: ignore[misc] # libp2p is untyped
    """A connection whose stream handlers may fail. Fault 2."""

    _num_inbound = 0

    async def _handle_muxed_stream(self, muxed_stream: IMuxedStream) -> None:
        if len(self.muxed_conn.streams) > MAX_OPEN_STREAMS:
            tcp_stream_of(self.muxed_conn).abort()
        if self._num_inbound >= MAX_INBOUND_STREAMS:
            await muxed_stream.reset()
            return
        self._num_inbound += 1
        try:
            with contain("stream", peer_id=str(self.muxed_conn.peer_id)) as outcome:
                await super()._handle_muxed_stream(muxed_stream)
            if outcome.error is not None:
                with contain("reset", level=logging.DEBUG):
                    await muxed_stream.reset()
        finally:
            self._num_inbound -= 1


class GuardedSwarm(swarm_module.Swarm):  # type: ignore[misc] # libp2p is untyped
    """Dials and listens, without the leak of fault 1, and dials nobody whom a stranger named."""

    ping_every_s = 5.0
    ping_timeout_s = 10.0

    def __init__(self, *args: Any, is_banned: Callable[[str], bool], **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_banned = is_banned
        self.auto_connector.maybe_connect = self._connect_nobody

    @staticmethod
    async def _connect_nobody() -> None:
        await trio.lowlevel.checkpoint()

    def _schedule_auto_connect(self) -> None:
        """Do nothing: p2p.dialer decides whom to dial."""

    async def add_conn(self, muxed_conn: IMuxedConn, direction: str = "unknown") -> INetConn:
        """Take a connection whose other end has proven who it is, unless that is a banned peer."""
        if self.is_banned(str(muxed_conn.peer_id)):
            tcp_stream_of(muxed_conn).abort()
            raise SwarmException(f"peer {muxed_conn.peer_id} is banned")
        return await super().add_conn(muxed_conn, direction)

    async def _do_handle_inbound_connection(
        self, stream: ReadWriteCloser, maddr: Multiaddr, _failure_event: object
    ) -> None:
        """Hold the inbound slot while the connection lives; stock code: while the host does."""
        raw_conn = RawConnection(stream, False)
        with contain("inbound handshake", level=logging.DEBUG) as outcome:
            muxed_conn: Any = await self.upgrade_inbound_raw_conn(raw_conn, maddr)
        if outcome.error is not None:
            await raw_conn.close()
            return
        await muxed_conn.event_closed.wait()


class GuardedPubsub(pubsub_module.Pubsub):  # type: ignore[misc] # libp2p is untyped
    """Publish and subscribe among strangers: bounded, counted. Faults 3, 4 and 9."""

    def __init__(self, *args: Any, on_sent: Callable[[str, int], None], **options: Any) -> None:
        super().__init__(*args, **options)
        # New: counting from the second of the start, a restarted host reuses numbers that peers
        # remember.
        self.counter = time.time_ns()
        self.num_dropped = 0
        self._on_sent = on_sent
        self._tokens: dict[ID, tuple[float, float]] = {}

    async def push_msg(self, msg_forwarder: ID, msg: rpc_pb2.Message) -> None:
        """Verify, deliver and forward a message, unless its forwarder sends too many."""
        if msg_forwarder != self.my_id and not self._may_forward(msg_forwarder):
            self.num_dropped += 1
            return
        await super().push_msg(msg_forwarder, msg)

    def _may_forward(self, forwarder: ID) -> bool:
        """Bound what one neighbour can make us verify: 20 messages a second after 100."""
        now = trio.current_time()
        tokens, at = self._tokens.get(forwarder, (GOSSIP_BURST, now))
        tokens = min(GOSSIP_BURST, tokens + (now - at) * GOSSIP_PER_FORWARDER_S)
        self._tokens[forwarder] = (max(0.0, tokens - 1.0), now)
        return tokens >= 1.0

    def _handle_dead_peer(self, peer_id: ID) -> None:
        self._tokens.pop(peer_id, None)
        super()._handle_dead_peer(peer_id)

    def handle_subscription(self, origin_id: ID, sub_message: rpc_pb2.RPC.SubOpts) -> None:
        """Note what a neighbour listens to, unless the topic's name is absurd."""
        if len(sub_message.topicid) <= MAX_TOPIC_CHARS:
            super().handle_subscription(origin_id, sub_message)

    def notify_subscriptions(self, publish_message: rpc_pb2.Message) -> None:
        """Deliver a message here, counting it where the queue is full."""
        for topic in publish_message.topicIDs:
            if topic in self.topic_ids:
                try:
                    self.subscribed_topics_send[topic].send_nowait(publish_message)
                except trio.WouldBlock:
                    self.num_dropped += 1

    async def write_msg(self, stream: INetStream, rpc_msg: rpc_pb2.RPC) -> bool:
        """Write to one neighbour, accounting for the messages in it."""
        is_sent: bool = await super().write_msg(stream, rpc_msg)
        if is_sent:
            for message in rpc_msg.publish:
                self._on_sent(message.topicIDs[0] if message.topicIDs else "", len(message.data))
        return is_sent


class GuardedGossipSub(gossipsub_module.GossipSub):  # type: ignore[misc] # libp2p is untyped
    """The gossip router."""

    async def publish(self, msg_forwarder: ID, pubsub_msg: rpc_pb2.Message) -> None:
        """Forward a message to the mesh."""
        await super().publish(msg_forwarder, pubsub_msg)
        # New: the list is pruned by the adaptive mode alone, which is off.
        self.recent_message_deliveries.clear()


class GuardedManager(TrioManager):  # type: ignore[misc] # libp2p is untyped
    """Runs a libp2p service whose single tasks may fail. Faults 2, 3 and 4.

    Daemon tasks (heartbeat, queues) still end the service: without them it would live and do
    nothing.
    """

    def run_task(
        self,
        async_fn: Callable[..., Awaitable[Any]],
        *args: Any,
        daemon: bool = False,
        name: str | None = None,
        _internal: bool = False,
    ) -> None:
        """Run `async_fn` in the background; unless it is a daemon, what it raises is contained."""

        async def contained(*arguments: Any) -> None:
            with contain(get_task_name(async_fn, name)):
                await async_fn(*arguments)

        fn = async_fn if daemon or _internal else contained
        super().run_task(
            fn, *args, daemon=daemon, name=get_task_name(async_fn, name), _internal=_internal
        )


@contextlib.asynccontextmanager
async def running_service(service: Service) -> AsyncIterator[None]:
    """Run a libp2p service under a GuardedManager while the block runs."""
    async with trio.open_nursery() as nursery:
        manager = GuardedManager(service)
        service._manager = manager
        nursery.start_soon(manager.run)
        await manager.wait_started()
        try:
            yield
        finally:
            await manager.stop()
