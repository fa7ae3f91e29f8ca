"""The swarm's twin: members in one process, whose messages arrive at once or not at all."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import trio

from p2p.blobstore import BlobStore
from p2p.errors import BlobUnavailableError, PeerUnreachableError, RequestRefusedError
from p2p.flow import Priority
from p2p.swarm import PeerView, Swarm
from p2p.swarm_types import DownloadView, PeerVersion

Respond = Callable[[str, bytes], Awaitable[bytes]]
Accept = Callable[[str, bytes], Awaitable[bool]]
OnMessage = Callable[[str, bytes], Awaitable[None]]


@dataclass
class FakeNetwork:
    """All swarms, by peer id."""

    swarms: dict[str, FakeSwarm] = field(default_factory=dict)
    has_gossip: bool = True
    is_cut: bool = False
    """Whether everybody is alone."""
    num_requests: int = 0
    sent_bytes: int = 0

    def join(self, peer_id: str) -> FakeSwarm:
        self.swarms[peer_id] = FakeSwarm(self, peer_id)
        return self.swarms[peer_id]


@dataclass
class FakeSwarm:
    """What the agent uses of a Swarm."""

    network: FakeNetwork
    peer_id: str
    listen_addrs: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/4001",)
    published: list[tuple[str, bytes]] = field(default_factory=list)
    remembered: dict[str, tuple[str, ...]] = field(default_factory=dict)
    banned: dict[str, str] = field(default_factory=dict)
    differing: dict[str, PeerVersion] = field(default_factory=dict)
    protocol: tuple[int, int] = (1, 0)
    is_online: bool = True
    store: BlobStore | None = None
    fetched: dict[str, Priority] = field(default_factory=dict)
    """What was asked for, and how."""
    on_publish: Callable[[str, bytes], None] = lambda topic, payload: None
    _respond: dict[str, Respond] = field(default_factory=dict)
    _topics: dict[str, tuple[Accept, OnMessage]] = field(default_factory=dict)

    @property
    def as_swarm(self) -> Swarm:
        return cast("Swarm", self)

    def peers(self) -> tuple[PeerView, ...]:
        return tuple(
            PeerView(
                peer_id=peer, addr="/memory", direction="outbound", connected_s=1.0, rtt_s=0.01
            )
            for peer in self.network.swarms
            if peer != self.peer_id and peer not in self.banned
        )

    def downloads(self) -> tuple[DownloadView, ...]:
        return ()

    def differing_peers(self) -> dict[str, PeerVersion]:
        return self.differing

    def remember(self, peer_id: str, addrs: Sequence[str]) -> None:
        self.remembered[peer_id] = tuple(addrs)

    def ban(self, peer_id: str, reason: str) -> None:
        self.banned[peer_id] = reason

    async def subscribe(
        self,
        topic: str,
        accept: Accept,
        on_message: OnMessage,
        *,
        max_bytes: int,
        purpose: str = "gossip",
    ) -> None:
        await trio.lowlevel.checkpoint()
        self._topics[topic] = (accept, on_message)

    async def publish(self, topic: str, payload: bytes, *, purpose: str) -> None:
        await trio.lowlevel.checkpoint()
        self.on_publish(topic, payload)
        self.published.append((topic, payload))
        if self.network.is_cut or not self.network.has_gossip:
            return
        for swarm in self.network.swarms.values():
            if swarm is not self:
                await swarm.deliver(topic, self.peer_id, payload)

    async def deliver(self, topic: str, author: str, payload: bytes) -> bool:
        """Hand over one gossiped message; return whether it was accepted."""
        if topic not in self._topics:
            return False
        accept, on_message = self._topics[topic]
        is_accepted = await accept(author, payload)
        if is_accepted:
            await on_message(author, payload)
        return is_accepted

    def serve(
        self, protocol: str, respond: Respond, *, max_request_bytes: int, purpose: str
    ) -> None:
        self._respond[protocol] = respond

    async def request(
        self,
        peer_id: str,
        protocol: str,
        payload: bytes,
        *,
        timeout_s: float,
        max_response_bytes: int,
        purpose: str,
    ) -> bytes:
        await trio.lowlevel.checkpoint()
        self.network.num_requests += 1
        swarm = self.network.swarms.get(peer_id)
        if self.network.is_cut or swarm is None or protocol not in swarm._respond:
            raise PeerUnreachableError(f"nobody at {peer_id}")
        try:
            answer = await swarm._respond[protocol](self.peer_id, payload)
        except ValueError as error:  # the real one resets the stream
            raise RequestRefusedError("reset") from error
        self.network.sent_bytes += len(payload) + len(answer)
        assert len(answer) <= max_response_bytes
        return answer

    async def fetch_blob(
        self,
        blob_id: str,
        *,
        max_bytes: int,
        providers: Callable[[], Sequence[str]],
        store: BlobStore,
        purpose: str,
        deadline_s: float,
        stall_s: float = math.inf,
        gone_s: float = math.inf,
        priority: Priority = Priority.URGENT,
    ) -> None:
        self.fetched[blob_id] = priority
        await trio.lowlevel.checkpoint()
        for peer in () if self.network.is_cut else providers():
            swarm = self.network.swarms.get(peer)
            if swarm is not None and swarm.store is not None and swarm.store.has(blob_id):
                store.add_bytes(swarm.store.file_of(blob_id).read_bytes())
                return
        raise BlobUnavailableError(f"nobody has {blob_id}")
