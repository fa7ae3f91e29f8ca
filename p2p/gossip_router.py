"""To whom gossip goes, and when: libp2p's gossipsub, with fewer copies. Runs in: agent.

PROTOCOL.md section 5. A message goes to the two to four neighbours of the mesh, and is offered to
some others, who ask for it if it did not reach them. Part of the guards (p2p/guards.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any, Final

import trio
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.pubsub import gossipsub as gossipsub_module
from libp2p.pubsub.mcache import MessageCache
from libp2p.pubsub.pb import rpc_pb2

from p2p.gossip_packing import PACKED_PROTOCOL

HISTORY: Final = 5  # seconds for which a message can be asked for
OFFERS: Final = 3  # neighbours outside the mesh to whom a message is offered, or a quarter of them
HOLD_BACK_S: Final = (0.05, 0.35)  # for a message to come from others too, to be sent them no more

_CHANCE: Final = secrets.SystemRandom()


class _LateOffers(MessageCache):  # type: ignore[misc] # libp2p is untyped
    """The messages of the last seconds."""

    is_offering = False

    def window(self, topic: str) -> list[bytes]:
        """List those that came since the last heartbeat; to be offered: before it."""
        entries = self.history[1] if self.is_offering else self.history[0]
        return [entry.mid for entry in entries if topic in entry.topics]


class GuardedGossipSub(gossipsub_module.GossipSub):  # type: ignore[misc] # libp2p is untyped
    """The gossip router."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.mcache = _LateOffers(1, HISTORY)
        self.known_to: dict[bytes, set[ID]] = {}
        """Of each message that is on its way through here: who has sent it to us."""

    def add_peer(self, peer_id: ID, protocol_id: TProtocol | None) -> None:
        """Note how to speak to a neighbour: packed gossip says what gossipsub 1.2 says."""
        is_packed = protocol_id == PACKED_PROTOCOL
        super().add_peer(peer_id, gossipsub_module.PROTOCOL_ID_V12 if is_packed else protocol_id)

    async def publish(self, msg_forwarder: ID, pubsub_msg: rpc_pb2.Message) -> None:
        """Send a message to the mesh: our own at once, others' after a moment.

        New: of two neighbours that get a message from a third one, each would send it to the other.
        Now one of them has it from the other before it would.
        """
        if self.pubsub is not None and msg_forwarder != self.pubsub.my_id:
            await trio.sleep(_CHANCE.uniform(*HOLD_BACK_S))  # noqa: TID251 -- others go first
        await super().publish(msg_forwarder, pubsub_msg)
        # New: the list is pruned by the adaptive mode alone, which is off.
        self.recent_message_deliveries.clear()

    def gossip_heartbeat(self) -> dict[ID, dict[str, list[bytes]]]:
        """Choose to whom of those outside the mesh to offer which messages.

        New: those of the second before. What has just come is still on its way to them: stock code
        offers it, they ask for it, and get it twice.
        """
        self.mcache.is_offering = True
        try:
            offers: dict[ID, dict[str, list[bytes]]] = super().gossip_heartbeat()
        finally:
            self.mcache.is_offering = False
        return offers

    def _get_adaptive_gossip_peers_count(self, topic: str, total_peers: int) -> int:
        """Say to how many: stock code takes six at least, which is everybody in a small swarm."""
        return max(OFFERS, total_peers // 4)

    def _get_peers_to_send(
        self,
        topic_ids: Iterable[str],
        msg_forwarder: ID,
        origin: ID,
        msg_id: bytes | None = None,
    ) -> Iterable[ID]:
        """Choose whom to send a message to; nobody who is known to have it.

        New: our own goes to two at least. Where all others' meshes were full, ours is empty.
        """
        known_to = self.known_to.get(msg_id or b"", set())
        chosen = set(super()._get_peers_to_send(topic_ids, msg_forwarder, origin, msg_id))
        if self.pubsub is not None and origin == self.pubsub.my_id:
            for topic in self.pubsub.peer_topics.keys() & set(topic_ids):
                num_lacking = self.degree_low - len(chosen)
                chosen.update(
                    self._get_in_topic_gossipsub_peers_from_minus(topic, num_lacking, chosen)
                )
        return chosen - known_to

    def _get_in_topic_gossipsub_peers_from_minus(
        self,
        topic: str,
        num_to_select: int,
        minus: Iterable[ID],
        backoff_check: bool = False,
    ) -> list[ID]:
        """Choose neighbours at random.

        New: who may not be asked into the mesh for a while is offered messages all the same. Stock
        code leaves it out: who came where all meshes were full heard nothing for a minute.
        """
        has_to_wait = backoff_check and not self.mcache.is_offering
        chosen: list[ID] = super()._get_in_topic_gossipsub_peers_from_minus(
            topic, num_to_select, minus, has_to_wait
        )
        return chosen

    async def handle_graft(self, graft_msg: rpc_pb2.ControlGraft, sender_peer_id: ID) -> None:
        """Take a neighbour into the mesh of a topic, if there is room.

        New: stock code takes everybody in, and throws as many out at its next heartbeat, as all its
        neighbours do at the same time: some were left with nobody for the minute in which they may
        not come back, and grafts and prunes never ended.
        """
        mesh = self.mesh.get(graft_msg.topicID, frozenset())
        if sender_peer_id not in mesh and len(mesh) >= self.degree_high:
            await self.emit_prune(graft_msg.topicID, sender_peer_id, False, False)
            return
        await super().handle_graft(graft_msg, sender_peer_id)

    async def _emit_idontwant_for_message(self, msg_id: bytes, topic_ids: Iterable[str]) -> None:
        """Send no IDONTWANT: for messages of 500 bytes these cost more than the copies they save.

        Those of others are heeded.
        """
        await trio.lowlevel.checkpoint()
