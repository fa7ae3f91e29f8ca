"""Gossip between real swarms on loopback."""

from __future__ import annotations

import pytest
import trio
from libp2p.abc import INetStream
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V12
from libp2p.pubsub.pb.rpc_pb2 import ControlGraft, ControlPrune, Message
from libp2p.pubsub.pubsub import PUBSUB_SIGNING_PREFIX

from p2p.errors import MessageTooLargeError
from p2p.gossip_packing import PACKED_PROTOCOL
from p2p.gossip_router import OFFERS
from p2p.swarm import Swarm
from tests.p2p.support import (
    TOPIC,
    Listener,
    host_of,
    publish_until_heard,
    swarm,
    trio_test,
    until,
)

pytestmark = [pytest.mark.slow, pytest.mark.system]


def signed_message(author: Swarm, number: int) -> Message:
    pubsub = host_of(author).pubsub
    message = Message(
        data=b"message %d" % number,
        topicIDs=[TOPIC],
        from_id=pubsub.my_id.to_bytes(),
        seqno=number.to_bytes(8, "big"),
    )
    signed = PUBSUB_SIGNING_PREFIX.encode() + message.SerializeToString()
    message.signature = pubsub.sign_key.sign(signed)
    return message


@trio_test
async def test_gossip_reaches_all_and_refused_messages_are_not_forwarded() -> None:
    async with swarm() as hub, swarm(*hub.listen_addrs) as one, swarm(*hub.listen_addrs) as other:
        at_hub, at_one, at_other = Listener(), Listener(), Listener()
        await at_hub.subscribe(hub)
        await at_one.subscribe(one)
        await at_other.subscribe(other, is_lenient=True)
        await publish_until_heard(one, b"hello", at_hub, at_other)
        assert {author for author, _ in at_other.heard} == {one.peer_id}
        await one.publish(TOPIC, b"bad", purpose="talk")
        await publish_until_heard(one, b"after", at_hub, at_other)
        await until(lambda: hub.statistics().refused_messages == 1)
        assert b"bad" in at_hub.judged
        assert b"bad" not in at_other.judged
        assert all(payload != b"bad" for _, payload in at_hub.heard + at_other.heard)
        assert at_one.heard == []  # one's own messages do not come back
        assert one.statistics().sent_bytes_by_purpose["talk"] > 0
        assert other.statistics().received_bytes_by_purpose["talk"] > 0


@trio_test
async def test_gossip_sizes_are_checked_on_both_sides() -> None:
    async with swarm() as hub, swarm(*hub.listen_addrs) as one:
        at_hub = Listener()
        await at_hub.subscribe(hub)
        with pytest.raises(MessageTooLargeError):
            await hub.publish(TOPIC, b"x" * 1001, purpose="talk")
        with pytest.raises(MessageTooLargeError):
            await one.publish(TOPIC, b"x" * 65_537, purpose="talk")
        await publish_until_heard(one, b"hello", at_hub)
        await one.publish(TOPIC, b"x" * 1001, purpose="talk")  # one does not know the topic's limit
        await until(lambda: hub.statistics().refused_messages == 1)
        assert all(len(payload) <= 1000 for payload in at_hub.judged)


@trio_test
async def test_a_raising_callback_is_counted_and_gossip_goes_on() -> None:
    async with swarm() as hub, swarm(*hub.listen_addrs) as one:
        heard: list[bytes] = []

        async def accept(_author: str, payload: bytes) -> bool:
            if payload.startswith(b"first"):
                raise ValueError(payload)
            return True

        async def on_message(_author: str, payload: bytes) -> None:
            if payload.startswith(b"second"):
                raise KeyError(payload)
            heard.append(payload)

        await hub.subscribe(TOPIC, accept, on_message, max_bytes=100)
        while hub.statistics().failed_handlers < 2 or not heard:
            for payload in (b"first", b"second", b"third"):
                await one.publish(TOPIC, payload, purpose="talk")
            with trio.move_on_after(0.3):
                await until(lambda: heard and hub.statistics().failed_handlers >= 2)
        assert hub.statistics().host_restarts == 0


@trio_test
async def test_a_full_outbox_drops_the_oldest() -> None:
    async with swarm() as one:
        for number in range(200):
            await one.publish(TOPIC, b"%d" % number, purpose="talk")
        assert 130 <= one.statistics().dropped_messages <= 136


@trio_test
async def test_what_is_subscribed_to_while_a_neighbour_is_greeted_is_told_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or that neighbour would send nothing of it for as long as it is connected."""
    async with swarm() as hub, swarm() as leaf:
        at_hub, at_leaf = Listener(), Listener()
        pubsub = host_of(hub).pubsub
        stock = pubsub.host.new_stream

        async def new_stream(peer_id: ID, protocols: list[str]) -> INetStream:
            stream: INetStream = await stock(peer_id, protocols)
            if protocols == pubsub.protocols:
                write = stream.write

                async def write_late(data: bytes) -> None:
                    monkeypatch.setattr(stream, "write", write)
                    await at_hub.subscribe(hub)  # the frame that is written was made before
                    await write(data)

                monkeypatch.setattr(stream, "write", write_late)
            return stream

        monkeypatch.setattr(pubsub.host, "new_stream", new_stream)
        await at_leaf.subscribe(leaf)
        await leaf.connect(hub.listen_addrs[0])
        await publish_until_heard(leaf, b"hello", at_hub)
        await publish_until_heard(hub, b"hello", at_leaf)


@trio_test
async def test_a_full_mesh_takes_nobody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm() as hub:
        await Listener().subscribe(hub)
        router = host_of(hub).pubsub.router
        pruned: list[str] = []

        async def emit_prune(topic: str, peer: ID, _do_px: bool, _is_unsubscribing: bool) -> None:
            await trio.lowlevel.checkpoint()
            pruned.append(str(peer))

        monkeypatch.setattr(router, "emit_prune", emit_prune)
        peers = [ID(bytes([0x12, 0x20]) + bytes([n] * 32)) for n in range(router.degree_high + 1)]
        for peer in (*peers, peers[0]):  # who is in it may say so again
            await router.handle_graft(ControlGraft(topicID=TOPIC), peer)
        assert router.mesh[TOPIC] == set(peers[:-1])
        assert pruned == [str(peers[-1])]


@trio_test
async def test_what_has_come_from_a_neighbour_is_not_sent_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others' messages are held back for a moment, in which they come from more sides."""
    async with swarm() as hub, swarm() as author:
        at_hub = Listener()
        await at_hub.subscribe(hub)
        pubsub = host_of(hub).pubsub
        neighbours = [ID(bytes([0x12, 0x20]) + bytes([n] * 32)) for n in range(3)]
        pubsub.peer_topics[TOPIC] = pubsub.router.mesh[TOPIC] = set(neighbours)
        monkeypatch.setattr(pubsub, "peers", dict.fromkeys(neighbours))
        sent: list[ID] = []
        monkeypatch.setattr(pubsub.router, "send_rpc", lambda peer, *_args, **_: sent.append(peer))
        message = signed_message(author, 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pubsub.push_msg, neighbours[0], message)
            await until(lambda: at_hub.heard)  # delivered here without a wait
            assert sent == []
            await pubsub.push_msg(neighbours[1], message)
        assert sent == [neighbours[2]]
        await pubsub.push_msg(neighbours[2], message)
        assert (len(sent), len(at_hub.heard)) == (1, 1)
        assert pubsub.router.known_to == {}, "nothing is kept of what is over"


@trio_test
async def test_who_speaks_only_stock_gossipsub_is_spoken_to() -> None:
    async with swarm() as older, swarm() as newer:
        pubsub = host_of(older).pubsub
        pubsub.router.protocols.remove(PACKED_PROTOCOL)
        del pubsub.host.multiselect.handlers[PACKED_PROTOCOL]
        at_older, at_newer = Listener(), Listener()
        await at_older.subscribe(older)
        await at_newer.subscribe(newer)
        await newer.connect(older.listen_addrs[0])
        await publish_until_heard(newer, b"hello", at_older)
        await publish_until_heard(older, b"hello", at_newer)
        streams = host_of(newer).pubsub.peers.values()
        assert {stream.get_protocol() for stream in streams} == {PROTOCOL_ID_V12}


@trio_test
async def test_what_has_just_come_is_not_offered_yet() -> None:
    """It is on its way to everybody: who is offered it would ask for it, and get it twice."""
    async with swarm() as hub:
        await Listener().subscribe(hub)
        pubsub = host_of(hub).pubsub
        router = pubsub.router
        outside = [ID(bytes([0x12, 0x20]) + bytes([n] * 32)) for n in range(2 * OFFERS)]
        pubsub.peer_topics[TOPIC] = set(outside)
        router.peer_protocol.update(dict.fromkeys(outside, PROTOCOL_ID_V12))
        router.mesh[TOPIC] = set()
        message = signed_message(hub, 1)
        router.mcache.put(message)
        assert router.mcache.window(TOPIC) == [message.from_id + message.seqno]
        assert router.gossip_heartbeat() == {}
        router.mcache.shift()
        offers = router.gossip_heartbeat()
        assert len(offers) == OFFERS
        assert all(offer == {TOPIC: [message.from_id + message.seqno]} for offer in offers.values())
        assert router.mcache.window(TOPIC) == [], "a newcomer is sent what is new alone"
        router.mcache.shift()
        assert router.gossip_heartbeat() == {}, "once"


@trio_test
async def test_who_is_in_nobodys_mesh_speaks_and_is_spoken_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All others' meshes were full: for a minute none of them may be asked again."""
    async with swarm() as hub:
        await Listener().subscribe(hub)
        pubsub = host_of(hub).pubsub
        router = pubsub.router
        others = [ID(bytes([0x12, 0x20]) + bytes([n] * 32)) for n in range(5)]
        pubsub.peer_topics[TOPIC] = set(others)
        router.peer_protocol.update(dict.fromkeys(others, PROTOCOL_ID_V12))
        monkeypatch.setattr(pubsub, "peers", dict.fromkeys(others))
        for peer in others:
            await router.handle_prune(ControlPrune(topicID=TOPIC, backoff=60), peer)
        sent: list[ID] = []
        monkeypatch.setattr(router, "send_rpc", lambda peer, *_args, **_: sent.append(peer))
        await pubsub.push_msg(pubsub.my_id, signed_message(hub, 1))
        assert router.mesh[TOPIC] == set()
        assert len(sent) == len(set(sent)) == router.degree_low
        router.mcache.shift()
        assert len(router.gossip_heartbeat()) == OFFERS
