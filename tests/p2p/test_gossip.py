"""Gossip between real swarms on loopback."""

from __future__ import annotations

import pytest
import trio
from libp2p.abc import INetStream
from libp2p.peer.id import ID
from libp2p.pubsub.pb.rpc_pb2 import ControlGraft

from p2p.errors import MessageTooLargeError
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
