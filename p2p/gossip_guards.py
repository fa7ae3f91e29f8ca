"""Publish and subscribe among strangers: bounded, counted, and paid for. Runs in: agent.

The part of the guards (p2p/guards.py) that concerns gossip: faults 3, 4 and 9 of LIBP2P.md. What a
neighbour sends is charged to it before it is parsed, and again before anything is verified; what is
sent to a neighbour stays below what it allows, so that nobody is punished for passing on a flood.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from typing import Any, Final

import trio
from google.protobuf.message import DecodeError
from libp2p.abc import INetStream
from libp2p.exceptions import ParseError
from libp2p.io.exceptions import IOException, MessageTooLarge
from libp2p.network.connection.exceptions import RawConnError
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from libp2p.pubsub import pubsub as pubsub_module
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.validators import signature_validator
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from p2p.conduct import Misdeed
from p2p.contain import contain
from p2p.gossip_packing import PACKED_PROTOCOL, PackedStream, Unpacker, most_packed_bytes
from p2p.token_buckets import TokenBuckets

MAX_TOPIC_CHARS: Final = 128
MAX_SUBSCRIPTIONS_PER_PEER: Final = 64
GOSSIP_PER_FORWARDER_S: Final = 20.0  # the whole swarm should send about one message a second
GOSSIP_BURST: Final = 100.0
GOSSIP_BYTES_PER_S: Final = 512 << 10
GOSSIP_BYTES_BURST: Final = 16 << 20  # more than a burst of the largest messages
GOSSIP_FRAME_BYTES: Final = 2 << 10  # what a frame costs whatever is in it
GOSSIP_ENTRY_BYTES: Final = 1 << 10  # what a subscription or a word about the mesh costs
GOSSIP_SENT_PER_S: Final = 15.0  # to one neighbour: well below what it allows
GOSSIP_SENT_BURST: Final = 60.0


class GuardedPubsub(pubsub_module.Pubsub):  # type: ignore[misc] # libp2p is untyped
    """Publish and subscribe among strangers: bounded, counted. Faults 3, 4 and 9."""

    def __init__(
        self,
        *args: Any,
        on_sent: Callable[[str, int], None],
        on_received: Callable[[str, int], None],
        note_misdeed: Callable[..., None],
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        # New: counting from the second of the start, a restarted host reuses numbers that peers
        # remember.
        self.counter = time.time_ns()
        self.num_dropped = 0
        self._on_sent = on_sent
        self._on_received = on_received
        self._note_misdeed = note_misdeed
        self._may_take = TokenBuckets(per_s=GOSSIP_PER_FORWARDER_S, burst=GOSSIP_BURST)
        self._may_take_bytes = TokenBuckets(per_s=GOSSIP_BYTES_PER_S, burst=GOSSIP_BYTES_BURST)
        self._may_send = TokenBuckets(per_s=GOSSIP_SENT_PER_S, burst=GOSSIP_SENT_BURST)

    async def continuously_read_stream(self, stream: INetStream) -> None:
        """Take frames from one neighbour until its stream ends.

        New: stock code starts a task for each message, of which a frame may hold thousands.
        """
        peer = stream.muxed_conn.peer_id
        most_bytes = self.max_inbound_rpc_size
        unpacker = None
        if stream.get_protocol() == PACKED_PROTOCOL:
            unpacker, most_bytes = Unpacker(), most_packed_bytes(most_bytes)
        with contextlib.suppress(StreamError, IOException, RawConnError):  # it ended
            while self.manager.is_running:
                try:
                    frame = await read_varint_prefixed_bytes_limited(stream, most_bytes)
                    num_bytes = len(frame)
                    is_over = self._is_over(peer, num_bytes + GOSSIP_FRAME_BYTES)
                    if unpacker is not None:  # also what is ignored: what follows depends on it
                        frame = unpacker.unpack(frame, self.max_inbound_rpc_size)
                        is_over |= self._is_over(peer, max(0, len(frame) - num_bytes))
                    if not is_over:
                        await self._take_frame(peer, frame, num_bytes)
                except (MessageTooLarge, ParseError, DecodeError):
                    self._note_misdeed(str(peer), Misdeed.GOSSIP_MALFORMED)
                    raise

    async def _take_frame(self, peer: ID, frame: bytes, num_bytes: int) -> None:
        """Act on a frame that came as `num_bytes` bytes, which are paid for."""
        rpc = rpc_pb2.RPC()
        rpc.ParseFromString(frame)
        control = rpc.control
        words = (control.ihave, control.iwant, control.graft, control.prune)
        num_entries = len(rpc.subscriptions) + sum(len(entries) for entries in words)
        if self._is_over(peer, num_entries * GOSSIP_ENTRY_BYTES):
            return
        for message in rpc.publish[: self._num_allowed(peer, len(rpc.publish))]:
            if self._is_subscribed_to_msg(message):
                if not self._is_msg_seen(message):  # further copies are nobody's payload
                    self._on_received(*_share_of(message, num_bytes / len(frame)))
                self.manager.run_task(self.push_msg, peer, message)
        for subscription in rpc.subscriptions[:MAX_SUBSCRIPTIONS_PER_PEER]:
            self.handle_subscription(peer, subscription)
        if rpc.HasField("control"):
            await self.router.handle_rpc(rpc, peer)

    def _is_over(self, peer: ID, cost_bytes: int) -> bool:
        """Charge a neighbour for what it makes us do; tell whether that is too much."""
        if not self._may_take_bytes.take(str(peer), trio.current_time(), cost_bytes):
            return False
        self.num_dropped += 1
        self._note_misdeed(str(peer), Misdeed.GOSSIP_FLOOD)
        return True

    def _num_allowed(self, peer: ID, num_messages: int) -> int:
        """Bound what one neighbour can make us verify: 20 messages a second after 100."""
        lacking = self._may_take.take(str(peer), trio.current_time(), num_messages)
        num_refused = math.ceil(lacking)
        if num_refused:
            self.num_dropped += num_refused
            self._note_misdeed(str(peer), Misdeed.GOSSIP_FLOOD, num_refused)
        return num_messages - num_refused

    async def push_msg(self, msg_forwarder: ID, msg: rpc_pb2.Message) -> None:
        """Verify, deliver and forward a message; a false signature is the forwarder's misdeed."""
        msg_id = self.get_message_id(msg)
        known_to = self.router.known_to.get(msg_id)
        if known_to is not None:  # it is being judged, or held back
            known_to.add(msg_forwarder)
            return
        if self._is_msg_seen(msg):
            return
        if msg_forwarder != self.my_id and not self._is_signed(msg_forwarder, msg):
            self._note_misdeed(str(msg_forwarder), Misdeed.GOSSIP_UNSIGNED)
            return
        self.router.known_to[msg_id] = {msg_forwarder}
        try:
            await super().push_msg(msg_forwarder, msg)
        finally:
            del self.router.known_to[msg_id]

    def _is_signed(self, msg_forwarder: ID, msg: rpc_pb2.Message) -> bool:
        with contain("signature", peer_id=str(msg_forwarder), level=logging.DEBUG):
            return bool(signature_validator(msg))
        return False

    async def _handle_new_peer(self, peer_id: ID) -> None:
        """Open the stream to a neighbour, and say on it what we listen to.

        New: what was subscribed to while the first frame was being written was told to nobody: the
        frame was older, and the peer not yet among those who are told. It sent us nothing of it,
        for as long as the connection lasted.
        """
        topics_before = frozenset(self.topic_ids)
        await super()._handle_new_peer(peer_id)
        queue = self.peer_queues.get(peer_id)
        for topic in self.topic_ids - topics_before if queue is not None else ():
            packet, announce = self._build_announce_rpc(topic, subscribe=True)
            self._enqueue_or_retry_announce(peer_id, queue, packet, announce)

    def _handle_dead_peer(self, peer_id: ID) -> None:
        # What it may send is not forgotten: or it would only have to come back.
        self._may_send.forget(str(peer_id))
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
        """Write to one neighbour what it will take, accounting for the messages in it."""
        peer_id = str(stream.muxed_conn.peer_id)
        lacking = self._may_send.take(peer_id, trio.current_time(), len(rpc_msg.publish))
        allowed = rpc_msg
        if lacking:
            allowed = rpc_pb2.RPC()  # the queues of other neighbours hold the same object
            allowed.CopyFrom(rpc_msg)
            del allowed.publish[len(rpc_msg.publish) - math.ceil(lacking) :]
            self.num_dropped += math.ceil(lacking)
        is_sent: bool = await super().write_msg(stream, allowed)
        if is_sent:
            fraction = stream.packed_fraction if isinstance(stream, PackedStream) else 1.0
            for message in allowed.publish:
                self._on_sent(*_share_of(message, fraction))
        return is_sent


def _share_of(message: rpc_pb2.Message, packed_fraction: float) -> tuple[str, int]:
    """Return a message's topic, and what of the frame on the wire was its payload."""
    topic = message.topicIDs[0] if message.topicIDs else ""
    return topic, round(len(message.data) * min(1.0, packed_fraction))
