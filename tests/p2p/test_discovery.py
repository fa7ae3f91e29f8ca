"""Finding members of a namespace: neighbours that are asked, the DHT, and starting over."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import base58
import pytest
import trio
from libp2p.kad_dht.pb.kademlia_pb2 import Message, Record

from p2p.addresses import parse_address
from p2p.errors import P2PError, RequestRefusedError
from p2p.kad_wire import KAD_PROTOCOL, encode_multiaddr, encode_varint_frame
from p2p.members import MAX_SAMPLE, Members
from p2p.peer_exchange import PEERS_PROTOCOL, encode_request, tag_of
from p2p.peer_stream import PeerStream
from p2p.swarm import Swarm, open_swarm
from tests.p2p.support import (
    assert_serving,
    host_of,
    is_connected,
    new_identity,
    node,
    quick_config,
    swarm,
    trio_test,
    until,
)

pytestmark = [pytest.mark.slow, pytest.mark.system]

RUN = "a run"


def all_meet(swarms: list[Swarm]) -> bool:
    return all(is_connected(one, other) for one in swarms for other in swarms if one is not other)


@contextlib.asynccontextmanager
async def several(number: int, *bootstrap: str, **changes: object) -> AsyncIterator[list[Swarm]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(swarm(*bootstrap, **changes)) for _ in range(number)]


@trio_test
async def test_five_that_know_one_find_one_another_and_need_it_no_more(tmp_path: Path) -> None:
    with node("hub", tmp_path, RUN) as hub:
        async with several(5, hub.addr, namespace=RUN) as others:
            await until(lambda: all_meet(others))
            hub.process.kill()
            lost = hub.peer_id
            await until(lambda: all(lost not in {p.peer_id for p in o.peers()} for o in others))
            assert all_meet(others)
            assert sum(o.statistics().found_peers_by_way.get("exchange", 0) for o in others) > 0
            assert all(one.statistics().misdeeds == 0 for one in others)


@trio_test
async def test_members_of_another_namespace_are_not_told() -> None:
    async with (
        swarm(namespace="else") as hub,
        several(2, *hub.listen_addrs, namespace=RUN) as ours,
        several(2, *hub.listen_addrs, namespace="yet another") as theirs,
        swarm(*hub.listen_addrs) as nobodys,
    ):
        await until(lambda: all_meet(ours) and all_meet(theirs) and nobodys.peers())
        for one in ours:
            assert not any(is_connected(one, other) for other in [*theirs, nobodys])


def providers_at(one: Swarm) -> set[str]:
    """List who has announced itself for our namespace at one peer."""
    dht = one._discovery._dht
    assert dht is not None
    if dht._kad is None:
        return set()
    return {str(found.peer_id) for found in dht._kad.provider_store.get_providers(dht._key)}


@trio_test
async def test_six_find_one_another_in_the_table_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Members, "sample", lambda *_args, **_options: [])  # neighbours tell nothing
    async with trio.open_nursery() as nursery:
        hubs: list[Swarm] = []
        of_hub = trio.CancelScope()

        async def run_hub() -> None:
            with of_hub:
                async with swarm(namespace=RUN, dht=True) as hub:
                    hubs.append(hub)
                    await trio.sleep_forever()

        nursery.start_soon(run_hub)
        await until(lambda: hubs)
        async with several(5, *hubs[0].listen_addrs, namespace=RUN, dht=True) as others:
            await until(lambda: all_meet(others))
            names = {one.peer_id for one in others}
            await until(lambda: names <= providers_at(hubs[0]))
            of_hub.cancel()
            await until(lambda: all(len(one.peers()) == 4 for one in others))
            await until(lambda: names - {others[0].peer_id} <= providers_at(others[0]))
            async with swarm(*others[0].listen_addrs, namespace=RUN, dht=True) as newcomer:
                await until(lambda: all_meet([newcomer, *others]))
                assert newcomer._discovery.table_size() > 0
            for one in others:
                assert one.statistics().misdeeds == 0
                assert one.statistics().host_restarts == 0


@trio_test
async def test_a_peer_with_a_new_port_is_found_again() -> None:
    identity = new_identity()
    async with swarm(namespace=RUN) as hub, swarm(*hub.listen_addrs, namespace=RUN) as one:
        config = quick_config(*hub.listen_addrs, namespace=RUN)
        async with open_swarm(identity, config) as first:
            await until(lambda: all_meet([hub, one, first]))
            old_addr = first.listen_addrs[0]
        await until(lambda: not one.peers() or len(one.peers()) == 1)
        async with open_swarm(identity, config) as again:
            assert again.listen_addrs[0] != old_addr
            await until(lambda: all_meet([hub, one, again]))


@trio_test
async def test_who_is_alone_tries_everybody_again_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="p2p.discovery")
    identity = new_identity()
    async with open_swarm(identity, quick_config()) as hub:
        addr = hub.listen_addrs[0]
    listen = addr.rpartition("/p2p/")[0]
    async with swarm(addr, alone_after_s=0.5, redial_at_most_every_s=1000.0) as one:
        await until(lambda: one._dialer._failures)
        one._dialer._try_again_at = dict.fromkeys(one._book.peers(), math.inf)  # long failures
        async with open_swarm(identity, quick_config(listen=(listen,))) as hub:
            await until(lambda: is_connected(one, hub))
            assert "trying everybody" in caplog.text
        await until(lambda: not one.peers())
        texts = [record.getMessage() for record in caplog.records]
        assert 1 <= len(texts) <= 2


async def question(stream: PeerStream, payload: bytes) -> bytes:
    """Write, and read until the other side ends or resets the stream."""
    answer = b""
    with contextlib.suppress(P2PError):
        await stream.write(payload)
        while piece := await stream.read_some(65536):
            answer += piece
    return answer


def kad_garbage() -> list[bytes]:
    rng = random.Random(1)
    peers = [
        Message.Peer(id=os.urandom(38), addrs=[os.urandom(rng.randrange(40)) for _ in range(40)])
        for _ in range(20)
    ]
    kind = Message.MessageType
    messages = [
        Message(type=kind.PUT_VALUE, key=b"k", record=Record(key=b"k", value=b"v" * 2000)),
        Message(type=kind.GET_VALUE, key=b"k"),
        Message(type=kind.ADD_PROVIDER, key=b"k", providerPeers=peers),
        Message(type=kind.FIND_NODE, key=b"k" * 1000),
        Message(type=kind.FIND_NODE, closerPeers=peers, senderRecord=os.urandom(100)),
        Message(type=kind.GET_PROVIDERS),
    ]
    return [
        *(encode_varint_frame(message.SerializeToString()[:4000]) for message in messages),
        *(encode_varint_frame(os.urandom(rng.randrange(300))) for _ in range(5)),
        b"\xff" * 12,
        b"\xff\xff\xff\x7f",
        bytes(200),
        b"\x05ab",
    ]


@trio_test
async def test_garbage_to_the_table_is_survived_and_ends_in_a_ban() -> None:
    async with swarm(namespace=RUN, dht=True) as one:
        async with swarm(*one.listen_addrs) as stranger:
            await until(lambda: is_connected(stranger, one))
            with contextlib.suppress(P2PError):
                for garbage in kad_garbage() * 3:
                    host = host_of(stranger)
                    async with host.open_stream(one.peer_id, KAD_PROTOCOL, timeout_s=5.0) as stream:
                        with trio.move_on_after(0.2):
                            await question(stream, garbage)
            await until(lambda: stranger.peer_id in one.banned())
        dht = one._discovery._dht
        assert dht is not None
        assert dht._kad is not None
        assert dht._kad.provider_store.providers == {}
        assert dht._kad.value_store.size() == 0
        await assert_serving(one)


@trio_test
async def test_garbage_from_the_table_is_survived() -> None:
    """Whoever is asked may answer anything, or nothing."""
    async with swarm(namespace=RUN, dht=True) as one:
        garbage = iter(kad_garbage() * 100)

        async def answer(_peer_id: str, stream: PeerStream) -> None:
            await stream.read_some(1)
            await stream.write(next(garbage))

        async with swarm(*one.listen_addrs) as liar:
            host_of(liar).set_handler(KAD_PROTOCOL, answer)
            await until(lambda: is_connected(liar, one))
            dht = one._discovery._dht
            assert dht is not None
            for _ in range(5):
                with trio.move_on_after(2.0):
                    await dht.look()
        assert one.statistics().host_restarts == 0
        await assert_serving(one)


@trio_test
async def test_a_provider_is_believed_about_itself_alone() -> None:
    async with swarm(namespace=RUN, dht=True) as one, swarm(*one.listen_addrs) as stranger:
        await until(lambda: is_connected(stranger, one))
        claims = ["/ip4/8.8.8.8/tcp/53", "/ip4/127.0.0.1/tcp/4001", "/ip4/0.0.0.0/tcp/1"]
        kind = Message.MessageType
        for peer_id in (stranger.peer_id, new_identity().peer_id):
            provider = Message.Peer(
                id=base58.b58decode(peer_id),
                addrs=[encode_multiaddr(parse_address(claim)) for claim in claims],
            )
            asked = Message(type=kind.ADD_PROVIDER, key=b"k" * 34, providerPeers=[provider])
            host = host_of(stranger)
            async with host.open_stream(one.peer_id, KAD_PROTOCOL, timeout_s=5.0) as stream:
                with trio.move_on_after(1.0):
                    await question(stream, encode_varint_frame(asked.SerializeToString()))
        dht = one._discovery._dht
        assert dht is not None
        assert dht._kad is not None
        (provider_kept,) = dht._kad.provider_store.get_providers(b"k" * 34)
        assert str(provider_kept.peer_id) == stranger.peer_id
        kept = {str(addr) for addr in provider_kept.addrs}
        # Where it is seen, with the ports that it named; nobody else's machine.
        assert kept == {"/ip4/127.0.0.1/tcp/53", "/ip4/127.0.0.1/tcp/4001"}


async def exchange(one: Swarm, peer_id: str, payload: bytes) -> bytes:
    return await one.request(
        peer_id,
        PEERS_PROTOCOL,
        payload,
        timeout_s=5.0,
        max_response_bytes=1 << 16,
        purpose="test",
    )


@trio_test
async def test_garbage_to_the_peer_exchange_is_survived() -> None:
    tag = tag_of(RUN)
    lines = b"\n".join([b"/ip4/127.0.0.1/tcp/1"] * 5000)
    async with swarm(namespace=RUN) as one, swarm(*one.listen_addrs) as stranger:
        await until(lambda: is_connected(stranger, one))
        for garbage in (b"", b"x", tag + b"\xff\xfe", tag + lines[:4000], tag + lines, b"x" * 9999):
            with pytest.raises(RequestRefusedError):
                await exchange(stranger, one.peer_id, garbage)
        assert await exchange(stranger, one.peer_id, tag + b"\n\nno address\n/ip4/1") != b""
        assert one.statistics().failed_handlers == 0
        await assert_serving(one)


@trio_test
async def test_who_asks_too_often_is_refused() -> None:
    async with swarm(namespace=RUN) as one, swarm(*one.listen_addrs) as stranger:
        await until(lambda: is_connected(stranger, one))
        request = encode_request(tag_of("else"), [])

        async def ask_for_ever() -> None:
            while True:
                await exchange(stranger, one.peer_id, request)

        with pytest.raises(RequestRefusedError, match="too often"):
            await ask_for_ever()
        assert one.statistics().misdeeds == 1


@trio_test
async def test_a_liar_cannot_fill_the_book_or_name_oneself() -> None:
    async with swarm(namespace=RUN) as one:
        fakes = [f"/ip4/192.0.2.1/tcp/1/p2p/{new_identity().peer_id}" for _ in range(60)]
        answers = iter([b"\xff", b"x" * 20_000, "\n".join(fakes).encode()])
        mine = one.listen_addrs[0].encode()

        async def respond(_peer_id: str, _payload: bytes) -> bytes:
            return next(answers, mine)

        async with swarm() as liar:
            liar.serve(PEERS_PROTOCOL, respond, max_request_bytes=4096, purpose="test")
            await one.connect(liar.listen_addrs[0])
            await until(lambda: one.statistics().num_known_peers > 50)
            await until(lambda: next(answers, None) is None)
            assert one.statistics().num_known_peers == 61
            assert one.peer_id not in one._book.peers()
        await assert_serving(one)


def test_members_are_told_in_random_samples_and_bounded() -> None:
    members, tag = Members(), tag_of(RUN)
    address = parse_address("/ip4/127.0.0.1/tcp/1")
    peers = [new_identity().peer_id for _ in range(200)]
    for number, peer_id in enumerate(peers):
        members.note(tag, peer_id, [address], float(number))

    def sample(asker_host: str = "127.0.0.1", *, now_s: float = 200.0, seed: int = 0) -> set[str]:
        told = members.sample(
            tag,
            peers[-1],
            asker_host,
            now_s=now_s,
            is_connected=lambda peer_id: peer_id == peers[-2],
            chance=random.Random(seed),
        )
        return {one.peer_id for one in told if one.peer_id is not None}

    assert len(sample()) == MAX_SAMPLE
    assert sample(seed=1) != sample(seed=2)
    assert not sample() & {*peers[:72], peers[-1]}  # pushed out, and oneself
    assert sample("192.168.1.1") == set()  # loopback is told on this machine alone
    assert sample(now_s=1e6) == {peers[-2]}  # the rest has not been heard for long
    members.forget(peers[-2])
    assert sample(now_s=1e6) == set()
    for number in range(100):
        members.note(tag_of(f"{number}"), peers[0], [address], 0.0)
    assert sample() == set()
    assert members.addresses_of(peers[0]) == (address,)
    assert members.peers() == (peers[0],)
