"""What strangers can take up: places, bytes, streams and gossip, on real hosts."""

from __future__ import annotations

import gc
import socket

import psutil
import pytest
import trio
from libp2p.io.exceptions import IOException
from libp2p.peer.id import ID
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import PUBSUB_SIGNING_PREFIX
from libp2p.utils import encode_varint_prefixed

from p2p.errors import ListenError, P2PError, PeerUnreachableError
from p2p.framing import encode_frame
from p2p.gossip_guards import GOSSIP_BURST, GOSSIP_SENT_BURST
from p2p.guards import MAX_INBOUND_STREAMS
from p2p.swarm import Swarm, open_swarm
from p2p.swarm_types import Ban
from p2p.tcp_stream import HANDSHAKE_READ_BYTES, MAX_HANDSHAKE_BYTES, GuardedTcpStream
from tests.p2p.support import (
    TOPIC,
    Listener,
    ask,
    assert_serving,
    host_of,
    is_connected,
    new_identity,
    port_of,
    publish_until_heard,
    quick_config,
    serve_double,
    swarm,
    trio_test,
    until,
)

pytestmark = [pytest.mark.slow, pytest.mark.system]

PUBSUB = "/meshsub/1.2.0"


async def open_silent(one: Swarm) -> trio.SocketStream:
    return await trio.open_tcp_stream("127.0.0.1", port_of(one))


async def assert_closed(stream: trio.SocketStream) -> None:
    """Read until the other side has closed."""
    try:
        while await stream.receive_some(4096):
            pass
    except trio.BrokenResourceError:
        pass


@trio_test
async def test_a_hundred_silent_sockets_neither_block_nor_stay() -> None:
    async with swarm(handshake_timeout_s=2.0) as one:
        admission = host_of(one)._network.admission
        started_at = trio.current_time()
        silent = [await open_silent(one) for _ in range(100)]
        for _ in range(5):
            await assert_serving(one)
        served_after_s = trio.current_time() - started_at
        for stream in silent:
            await assert_closed(stream)
            await stream.aclose()
        await until(lambda: admission.num_half_open == 0 and admission.num_open == 0)
        assert served_after_s < 10.0
        await assert_serving(one)


@trio_test
async def test_who_does_not_finish_the_handshake_is_closed() -> None:
    async with swarm(handshake_timeout_s=0.3) as one:
        for greeting in (b"", b"\x13/multistream/1.0.0\n", b"\x13/multistream/1.0.0\n\x07/noise\n"):
            async with await open_silent(one) as stream:
                if greeting:
                    await stream.send_all(greeting)
                await assert_closed(stream)
        await assert_serving(one)


async def read_for_ever(reader: GuardedTcpStream) -> None:
    while True:
        await reader.read(1000)


@trio_test
async def test_bytes_before_the_handshake_are_bounded() -> None:
    ours, theirs = trio.socket.socketpair()
    reader = GuardedTcpStream(trio.SocketStream(ours))
    async with trio.SocketStream(theirs) as writer, trio.open_nursery() as nursery:
        nursery.start_soon(writer.send_all, bytes(MAX_HANDSHAKE_BYTES * 4))
        with pytest.raises(IOException, match="handshake"):
            await read_for_ever(reader)
        assert reader.num_bytes_received <= MAX_HANDSHAKE_BYTES + HANDSHAKE_READ_BYTES
        reader.is_authenticated = True
        while reader.num_bytes_received < 4 * MAX_HANDSHAKE_BYTES:
            await reader.read(1000)
    await reader.close()


@trio_test
async def test_a_stranger_that_only_talks_is_closed() -> None:
    """Proposals of unknown protocols are answered one by one, but not for ever."""
    async with swarm() as one:
        async with await open_silent(one) as stream, trio.open_nursery() as nursery:
            nursery.start_soon(assert_closed, stream)
            try:
                await stream.send_all(b"\x13/multistream/1.0.0\n")
                for _ in range(100_000):
                    await stream.send_all(b"\x0a/unknown1\n")
            except trio.BrokenResourceError:
                pass
            else:
                pytest.fail("it would have listened for ever")
        await assert_serving(one)


@trio_test
async def test_connections_from_one_address_are_bounded() -> None:
    async with swarm(max_inbound_from_loopback=2) as one, trio.open_nursery() as nursery:

        async def visit() -> None:
            async with swarm(*one.listen_addrs):
                await trio.sleep_forever()

        for _ in range(4):
            nursery.start_soon(visit)
        await until(lambda: len(one.peers()) == 2)
        with trio.move_on_after(0.5):
            await until(lambda: len(one.peers()) > 2)
        assert len(one.peers()) == 2
        nursery.cancel_scope.cancel()


@trio_test
async def test_streams_are_bounded_by_peer_not_by_connection() -> None:
    async with swarm() as one, swarm() as stranger:
        release, num_waiting = trio.Event(), 0

        async def respond(_peer_id: str, _payload: bytes) -> bytes:
            nonlocal num_waiting
            num_waiting += 1
            await release.wait()
            return b"ok"

        one.serve("/test/wait/1", respond, max_request_bytes=10, purpose="wait")
        async with trio.open_nursery() as nursery:  # two connections
            nursery.start_soon(one.connect, stranger.listen_addrs[0])
            nursery.start_soon(stranger.connect, one.listen_addrs[0])
        num_failed = 0

        async def ask_once() -> None:
            nonlocal num_failed
            try:
                await stranger.request(
                    one.peer_id,
                    "/test/wait/1",
                    b"",
                    timeout_s=9.0,
                    max_response_bytes=2,
                    purpose="",
                )
            except P2PError:
                num_failed += 1

        async with trio.open_nursery() as nursery:
            for _ in range(MAX_INBOUND_STREAMS + 20):
                nursery.start_soon(ask_once)
            await until(lambda: num_failed >= 20)
            assert num_waiting <= MAX_INBOUND_STREAMS
            release.set()
        assert one.statistics().misdeeds >= 20
        answered = host_of(one)._network.num_streams_answered
        await until(lambda: answered[stranger.peer_id] <= 3)  # its gossip stays open
        await assert_serving(one)


def signed_message(author: Swarm, number: int, *, is_signed: bool = True) -> rpc_pb2.Message:
    """Make a message as libp2p does, without its limits."""
    pubsub = host_of(author).pubsub
    message = rpc_pb2.Message(
        data=b"flood %d" % number,
        topicIDs=[TOPIC],
        from_id=pubsub.my_id.to_bytes(),
        seqno=number.to_bytes(8, "big"),
    )
    signed = PUBSUB_SIGNING_PREFIX.encode() + message.SerializeToString()
    message.key = pubsub.host.get_public_key().serialize()
    message.signature = pubsub.sign_key.sign(signed if is_signed else b"else")
    return message


async def send_gossip(author: Swarm, peer_id: str, messages: list[rpc_pb2.Message]) -> None:
    frame = encode_varint_prefixed(rpc_pb2.RPC(publish=messages).SerializeToString())
    async with host_of(author).open_stream(peer_id, PUBSUB, timeout_s=5.0) as stream:
        await stream.write(frame)


async def flood(author: Swarm, peer_id: str, num_messages: int) -> None:
    for start in range(0, num_messages, 50):
        messages = [signed_message(author, number) for number in range(start, start + 50)]
        await send_gossip(author, peer_id, messages)


def num_descriptors() -> int:
    return psutil.Process().num_fds()


@trio_test
async def test_a_flood_of_gossip_ends_in_a_ban_and_honest_traffic_goes_on() -> None:
    async with swarm() as one, swarm(*one.listen_addrs) as honest:
        at_one = Listener()
        await at_one.subscribe(one)
        await publish_until_heard(honest, b"before", at_one)
        banned: list[tuple[str, Ban]] = []
        one.on_banned(lambda peer_id, ban: banned.append((peer_id, ban)))
        gc.collect()
        fds_before, rss_before = num_descriptors(), psutil.Process().memory_info().rss
        async with swarm(*one.listen_addrs) as flooder:
            await until(lambda: is_connected(flooder, one))
            with trio.move_on_after(10.0), pytest.raises(P2PError):
                await flood(flooder, one.peer_id, 5000)
            await until(lambda: not is_connected(one, flooder))
            assert [peer_id for peer_id, _ in banned] == [flooder.peer_id]
            assert one.banned()[flooder.peer_id] == banned[0][1]
            with pytest.raises(PeerUnreachableError):
                await one.connect(flooder.listen_addrs[0])
            heard_from_flooder = [a for a, _ in at_one.heard if a == flooder.peer_id]
            assert len(heard_from_flooder) <= GOSSIP_BURST + 20
            await publish_until_heard(honest, b"after", at_one)
        assert is_connected(one, honest)
        await until(lambda: num_descriptors() <= fds_before)
        gc.collect()
        assert psutil.Process().memory_info().rss - rss_before < 30 << 20
        assert one.statistics().host_restarts == 0


@trio_test
async def test_false_signatures_are_counted_against_who_passes_them_on() -> None:
    async with swarm() as one, swarm(*one.listen_addrs) as liar:
        at_one = Listener()
        await at_one.subscribe(one)
        await until(lambda: is_connected(liar, one))
        messages = [signed_message(liar, number, is_signed=False) for number in range(25)]
        await send_gossip(liar, one.peer_id, messages)
        await until(lambda: liar.peer_id in one.banned())
        assert at_one.judged == []
        await assert_serving(one)


@trio_test
async def test_refused_messages_count_against_their_author_alone() -> None:
    async with swarm() as one, swarm(*one.listen_addrs) as hub:
        at_one, at_hub = Listener(), Listener()
        await at_one.subscribe(one)
        await at_hub.subscribe(hub, is_lenient=True)
        async with swarm(*hub.listen_addrs) as author:
            await until(lambda: is_connected(author, hub))
            await publish_until_heard(author, b"good", at_one)
            while not any(payload.startswith(b"bad") for payload in at_one.judged):
                await author.publish(TOPIC, b"bad %d" % len(at_one.judged), purpose="talk")
                with trio.move_on_after(0.3):
                    await until(lambda: one.statistics().refused_messages)
            assert one.statistics().misdeeds == 0  # the hub only passed it on
        misdeeds_before = one.statistics().misdeeds
        while one.statistics().misdeeds == misdeeds_before:
            await hub.publish(TOPIC, b"bad of the hub", purpose="talk")
            with trio.move_on_after(0.3):
                await until(lambda: one.statistics().misdeeds > misdeeds_before)


@trio_test
async def test_what_is_sent_to_a_neighbour_stays_below_what_it_allows() -> None:
    """Or an honest hub would be banned for passing on the floods of others."""
    async with swarm() as hub, swarm(*hub.listen_addrs) as leaf:
        at_leaf = Listener()
        await at_leaf.subscribe(leaf)
        pubsub = host_of(hub).pubsub
        leaf_id = ID.from_base58(leaf.peer_id)
        await until(lambda: leaf_id in pubsub.peers)
        for start in range(0, 1000, 200):
            messages = [signed_message(hub, number) for number in range(start, start + 200)]
            await pubsub.write_msg(pubsub.peers[leaf_id], rpc_pb2.RPC(publish=messages))
        await until(lambda: len(at_leaf.judged) >= GOSSIP_SENT_BURST)
        assert hub.statistics().dropped_messages >= 1000 - GOSSIP_BURST
        assert leaf.statistics().misdeeds == 0
        assert is_connected(leaf, hub)


@trio_test
async def test_bans_survive_restarts_and_end() -> None:
    identity, other = new_identity(), new_identity()
    async with open_swarm(identity, quick_config()) as one:
        one.ban(other.peer_id, "floods", ban_s=1.5)
        one.ban(one.peer_id, "oneself")
        kept = one.banned()
    assert list(kept) == [other.peer_id]
    async with open_swarm(identity, quick_config(banned=kept)) as one:
        serve_double(one)
        assert one.banned() == kept
        config = quick_config(*one.listen_addrs)
        async with open_swarm(other, config) as refused:
            with pytest.raises(P2PError):
                await ask(refused, one.peer_id, timeout_s=0.3)
            assert one.peers() == ()
            await until(lambda: one.banned() == {})
            await until(lambda: is_connected(one, refused))
            assert await ask(refused, one.peer_id) == b"xx"


@trio_test
async def test_the_preferred_port_is_taken_where_it_is_free() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with swarm(preferred_port=port) as one:
        assert port_of(one) == port
        async with swarm(preferred_port=port) as other:  # taken: another one is found
            assert port_of(other) != port
            await other.connect(one.listen_addrs[0])
            await until(lambda: is_connected(one, other))
    async with swarm(preferred_port=port) as one:  # at once again
        assert port_of(one) == port


@trio_test
async def test_a_port_that_was_lost_does_not_keep_the_host_down() -> None:
    """A host that dies finds its port taken by another program."""
    async with swarm() as one:
        port = port_of(one)
        thief = socket.socket()

        async def crash() -> None:
            await host_of(one).close()
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            thief.bind(("127.0.0.1", port))
            thief.listen()
            raise RuntimeError("an unknown fault of libp2p")

        host_of(one)._network.manager.run_daemon_task(crash)
        await until(lambda: one.statistics().host_restarts == 1 and one._host is not None)
        assert port_of(one) != port
        thief.close()
        async with swarm() as other:
            await other.connect(one.listen_addrs[0])


@trio_test
async def test_two_programs_cannot_share_a_port() -> None:
    async with swarm() as one:
        address = one.listen_addrs[0].rpartition("/p2p/")[0]
        with pytest.raises(ListenError):
            async with swarm(listen=(address,)):
                pass


@trio_test
async def test_a_peer_that_does_not_read_is_given_up_and_holds_up_nobody() -> None:
    """Fault 8: its writer fails after 5 s; that must cost the stream alone."""
    async with swarm() as one, swarm(*one.listen_addrs) as lazy:

        async def respond(_peer_id: str, _payload: bytes) -> bytes:
            return bytes(8 << 20)

        one.serve("/test/large/1", respond, max_request_bytes=10, purpose="large")
        await until(lambda: is_connected(lazy, one))
        async with host_of(lazy).open_stream(one.peer_id, "/test/large/1", timeout_s=5.0) as stream:
            await stream.write(encode_frame(b""))
            await assert_serving(one)
            answered = host_of(one)._network.num_streams_answered
            await until(lambda: answered[lazy.peer_id] <= 1)  # its gossip
        assert is_connected(one, lazy)
        await assert_serving(one)
