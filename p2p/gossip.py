"""Small messages to everyone who listens. Runs in: agent.

Gossip may lose any message (LIBP2P.md, fault 9), so nothing may depend on one arriving. What it
guarantees: the author's signature is verified, the size is checked first, `accept` decides before
anything is forwarded, and the same message is delivered at most once within two minutes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import base58
import trio
from libp2p.abc import ISubscriptionAPI
from libp2p.peer.id import ID
from libp2p.pubsub.pb.rpc_pb2 import Message

from p2p.conduct import Misdeed
from p2p.contain import contain
from p2p.errors import MessageTooLargeError
from p2p.host import Host
from p2p.refusals import Accept
from p2p.swarm_types import Tally

MAX_MESSAGE_BYTES: Final = 64 << 10
MAX_QUEUED: Final = 64
SEND_EVERY_S: Final = 0.05  # a neighbour's queue holds 32 messages; faster ones vanish
DEFAULT_PURPOSE: Final = "gossip"

OnMessage = Callable[[str, bytes], Awaitable[None]]


@dataclass(slots=True)
class _Topic:
    accept: Accept
    on_message: OnMessage
    max_bytes: int
    purpose: str


class Gossip:
    """The topics of one swarm; they outlive the host, and `attach` puts them on the next one."""

    def __init__(
        self, own_peer_id: str, tally: Tally, note_misdeed: Callable[[str, Misdeed], None]
    ) -> None:
        self._own_peer_id = own_peer_id
        self._note_misdeed = note_misdeed
        self._tally = tally
        self._topics: dict[str, _Topic] = {}
        self._publish_purposes: dict[str, str] = {}
        self._outbox: deque[tuple[str, bytes]] = deque()
        self._has_mail = trio.Event()
        self._host: Host | None = None
        self._nursery: trio.Nursery | None = None

    async def attach(self, host: Host, nursery: trio.Nursery) -> None:
        """Subscribe to every topic on a new host, with tasks in `nursery`, which ends with it."""
        self._host, self._nursery = host, nursery
        nursery.start_soon(self._send_queued, host)
        for name in tuple(self._topics):
            await self._subscribe_on(host, nursery, name)

    def detach(self) -> None:
        """Note that the host is gone; messages wait in the queue for the next one."""
        if self._host is not None:
            self._tally.dropped_messages += self._host.pubsub.num_dropped
        self._host = self._nursery = None

    def num_dropped_now(self) -> int:
        """Count what the present host has dropped."""
        return 0 if self._host is None else int(self._host.pubsub.num_dropped)

    async def subscribe(
        self, name: str, accept: Accept, on_message: OnMessage, *, max_bytes: int, purpose: str
    ) -> None:
        """Take part in a topic; a second call replaces the callbacks of the first."""
        if max_bytes > MAX_MESSAGE_BYTES:
            raise MessageTooLargeError(
                f"gossip carries at most {MAX_MESSAGE_BYTES} bytes, not {max_bytes}"
            )
        is_new = name not in self._topics
        self._topics[name] = _Topic(accept, on_message, max_bytes, purpose)
        if is_new and self._host is not None and self._nursery is not None:
            await self._subscribe_on(self._host, self._nursery, name)

    def publish(self, name: str, payload: bytes, purpose: str) -> None:
        """Queue a message; the oldest one in the queue makes room when it is full.

        Raises:
            MessageTooLargeError: The payload is larger than the topic allows.
        """
        topic = self._topics.get(name)
        max_bytes = MAX_MESSAGE_BYTES if topic is None else topic.max_bytes
        if len(payload) > max_bytes:
            raise MessageTooLargeError(
                f"{len(payload)} bytes for topic {name}, which takes {max_bytes}"
            )
        self._publish_purposes[name] = purpose
        if len(self._outbox) >= MAX_QUEUED:
            self._outbox.popleft()
            self._tally.dropped_messages += 1
        self._outbox.append((name, payload))
        self._has_mail.set()

    def count_received(self, name: str, num_bytes: int) -> None:
        """Account for the first copy of a message; what further ones cost is overhead."""
        topic = self._topics.get(name)
        if topic is not None:
            self._tally.received[topic.purpose] += num_bytes

    def count_sent(self, name: str, num_bytes: int) -> None:
        """Account for a message that libp2p wrote to one neighbour, ours or forwarded."""
        topic = self._topics.get(name)
        default = DEFAULT_PURPOSE if topic is None else topic.purpose
        self._tally.sent[self._publish_purposes.get(name, default)] += num_bytes

    async def _send_queued(self, host: Host) -> None:
        while True:
            await self._has_mail.wait()
            while self._outbox:
                name, payload = self._outbox.popleft()
                with contain(f"publish {name}"):
                    await host.pubsub.publish(name, payload)
                await trio.sleep(SEND_EVERY_S)  # noqa: TID251 -- pacing
            self._has_mail = trio.Event()

    async def _subscribe_on(self, host: Host, nursery: trio.Nursery, name: str) -> None:
        async def validate(forwarder: ID, message: Message) -> bool:
            return await self._is_accepted(name, str(forwarder), message)

        host.pubsub.set_topic_validator(name, validate, True)  # fault 4: async validators only
        subscription = await host.pubsub.subscribe(name)
        nursery.start_soon(self._deliver, name, subscription)

    async def _is_accepted(self, name: str, forwarder: str, message: Message) -> bool:
        """Decide whether a message whose signature is good is delivered and forwarded."""
        if forwarder == self._own_peer_id:
            return True
        topic = self._topics[name]
        author = _author_of(message)
        is_accepted = False
        if list(message.topicIDs) == [name] and len(message.data) <= topic.max_bytes:
            with contain(f"accept {name}", peer_id=forwarder) as outcome:
                is_accepted = await topic.accept(author, bytes(message.data))
            self._tally.failed_handlers += outcome.error is not None
        self._tally.refused_messages += not is_accepted
        # Who passes on another's message may judge it differently, or not know the author's ban.
        if not is_accepted and author == forwarder:
            self._note_misdeed(author, Misdeed.GOSSIP_REFUSED)
        return is_accepted

    async def _deliver(self, name: str, subscription: ISubscriptionAPI) -> None:
        while True:
            message = await subscription.get()
            author = _author_of(message)
            if author == self._own_peer_id:
                continue
            with contain(f"on_message {name}", peer_id=author) as outcome:
                await self._topics[name].on_message(author, bytes(message.data))
            self._tally.failed_handlers += outcome.error is not None


def _author_of(message: Message) -> str:
    """Give the peer id that signed the message; libp2p has verified it."""
    return str(base58.b58encode(message.from_id), "ascii")
