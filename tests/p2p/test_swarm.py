"""Real swarms on loopback: finding each other, gossip, requests, bans, restarts."""

from __future__ import annotations

import socket

import pytest
import trio

from p2p.errors import (
    AddressError,
    FramingError,
    ListenError,
    PeerUnreachableError,
    RequestRefusedError,
    RequestTimeoutError,
)
from p2p.swarm import Swarm, SwarmConfig, open_swarm
from p2p.swarm_types import Ban, PeerView
from p2p.tcp_stream import tcp_stream_of
from tests.p2p.support import (
    Listener,
    ask,
    is_connected,
    new_identity,
    publish_until_heard,
    quick_config,
    serve_double,
    swarm,
    trio_test,
    until,
)

pytestmark = [pytest.mark.slow, pytest.mark.system]


@trio_test
async def test_two_that_know_only_a_third_meet_when_told() -> None:
    async with swarm() as hub, swarm(*hub.listen_addrs) as one, swarm(*hub.listen_addrs) as other:
        await until(lambda: is_connected(hub, one) and is_connected(hub, other))
        assert not is_connected(one, other)
        other.remember(one.peer_id, one.listen_addrs)
        await until(lambda: is_connected(one, other) and is_connected(other, one))
        (view,) = [peer for peer in other.peers() if peer.peer_id == one.peer_id]
        assert view.direction == "outbound"
        assert view.addr == one.listen_addrs[0].rpartition("/p2p/")[0]
        await until(lambda: all(peer.rtt_s is not None for peer in other.peers()))
        (view,) = [peer for peer in one.peers() if peer.peer_id == other.peer_id]
        assert view.direction == "inbound"
        assert not view.is_relayed
        assert view.connected_s >= 0.0


@trio_test
async def test_requests_are_answered_refused_or_late() -> None:
    async with swarm() as server, swarm(*server.listen_addrs) as client:
        release = trio.Event()

        async def respond(peer_id: str, payload: bytes) -> bytes:
            assert peer_id == client.peer_id
            if payload == b"refuse":
                raise RequestRefusedError("not today")
            if payload == b"raise":
                raise ValueError("a bug")
            if payload == b"late":
                await release.wait()
            return payload * 2

        server.serve("/test/double/1", respond, max_request_bytes=100, purpose="double")
        assert await ask(client, server.peer_id, b"ab") == b"abab"
        assert await ask(client, server.peer_id, b"") == b""
        with pytest.raises(RequestRefusedError, match="not today"):
            await ask(client, server.peer_id, b"refuse")
        with pytest.raises(RequestRefusedError, match="reset"):
            await ask(client, server.peer_id, b"raise")
        with pytest.raises(RequestRefusedError, match="reset"):
            await ask(client, server.peer_id, b"x" * 101)
        with pytest.raises(FramingError, match="102"):
            await ask(client, server.peer_id, b"x" * 51)
        with pytest.raises(RequestTimeoutError):
            await ask(client, server.peer_id, b"late", timeout_s=0.2)
        with pytest.raises(RequestRefusedError, match="does not speak"):
            await client.request(
                server.peer_id, "/no/1", b"", timeout_s=5.0, max_response_bytes=1, purpose="ask"
            )
        release.set()
        assert await ask(client, server.peer_id, b"ab") == b"abab"
        statistics = server.statistics()
        assert statistics.failed_handlers == 1
        assert statistics.refused_requests == 2
        assert statistics.host_restarts == 0
        assert client.statistics().received_bytes_by_purpose["ask"] == 8
        assert server.statistics().sent_bytes_by_purpose["double"] == 4 + 0 + 102 + 8 + 4


@trio_test
async def test_many_cancelled_requests_leave_the_connection_whole() -> None:
    """Deadlines in the middle of writes must not cut frames in two, nor use up streams."""
    async with swarm() as server, swarm(*server.listen_addrs) as client:

        async def respond(_peer_id: str, payload: bytes) -> bytes:
            return payload

        server.serve("/test/echo/1", respond, max_request_bytes=1 << 21, purpose="echo")
        await until(lambda: is_connected(client, server))

        async def ask_briefly(timeout_s: float) -> None:
            with trio.move_on_after(timeout_s):
                await client.request(
                    server.peer_id,
                    "/test/echo/1",
                    bytes(1 << 20),
                    timeout_s=10.0,
                    max_response_bytes=1 << 21,
                    purpose="echo",
                )

        for round_number in range(30):
            async with trio.open_nursery() as nursery:
                for number in range(10):
                    nursery.start_soon(ask_briefly, 0.002 * (number + 1) + 0.0007 * round_number)
        answer = await client.request(
            server.peer_id,
            "/test/echo/1",
            b"still here",
            timeout_s=10.0,
            max_response_bytes=100,
            purpose="echo",
        )
        assert answer == b"still here"
        assert client.statistics().dropped_peers == 0


def shrink_socket_buffers(one: Swarm) -> None:
    """Make writers wait for readers early, as a slow line does."""
    assert one._host is not None
    for conn in one._host._network.get_connections():
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            tcp_stream_of(conn.muxed_conn).stream.setsockopt(socket.SOL_SOCKET, option, 65536)


@trio_test
async def test_both_directions_at_once_do_not_lock_up() -> None:
    """Both sides write as much as they can while both open streams."""
    async with swarm() as one, swarm(*one.listen_addrs) as other:

        async def respond(_peer_id: str, payload: bytes) -> bytes:
            return payload

        for each in (one, other):
            each.serve("/test/echo/1", respond, max_request_bytes=1 << 20, purpose="echo")
        await until(lambda: is_connected(one, other) and is_connected(other, one))
        shrink_socket_buffers(one)
        shrink_socket_buffers(other)

        async def flood(source: Swarm, target: Swarm) -> None:
            for _ in range(4):
                answer = await source.request(
                    target.peer_id,
                    "/test/echo/1",
                    bytes(1 << 20),
                    timeout_s=15.0,
                    max_response_bytes=1 << 20,
                    purpose="echo",
                )
                assert len(answer) == 1 << 20

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(flood, one, other)
                nursery.start_soon(flood, other, one)


@trio_test
async def test_simultaneous_dials_end_connected() -> None:
    async with swarm() as one, swarm() as other:
        for each in (one, other):
            serve_double(each)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.connect, other.listen_addrs[0])
            nursery.start_soon(other.connect, one.listen_addrs[0])
        await until(lambda: is_connected(one, other) and is_connected(other, one))
        assert await ask(one, other.peer_id) == b"xx"
        assert await ask(other, one.peer_id) == b"xx"
        assert len(one.peers()) == len(other.peers()) == 1


@trio_test
async def test_who_is_not_there_is_unreachable() -> None:
    async with swarm() as one:
        stranger = new_identity().peer_id
        with pytest.raises(PeerUnreachableError, match="no address"):
            await ask(one, stranger)
        async with swarm() as gone:
            addr = gone.listen_addrs[0]
        with pytest.raises(PeerUnreachableError):
            await one.connect(addr)
        imposter = addr.rpartition("/")[0] + "/" + stranger
        async with open_swarm(new_identity(), SwarmConfig(listen=(addr.rpartition("/p2p/")[0],))):
            with pytest.raises(PeerUnreachableError):
                await one.connect(imposter)
        assert one.peers() == ()


@trio_test
async def test_a_peer_that_comes_back_is_met_again() -> None:
    events: list[str] = []
    async with swarm() as one:
        one.on_peer_connected(lambda view: events.append(f"+{view.peer_id}"))
        identity = new_identity()
        async with open_swarm(identity, quick_config()) as other:
            await one.connect(other.listen_addrs[0])
            port_addr = other.listen_addrs[0].rpartition("/p2p/")[0]
        assert events == [f"+{identity.peer_id}"]
        await until(lambda: one.statistics().dropped_peers == 1)
        assert one.peers() == ()
        async with open_swarm(identity, SwarmConfig(listen=(port_addr,))) as other:
            await until(lambda: is_connected(one, other))
        assert events[1] == f"+{identity.peer_id}"


@trio_test
async def test_a_banned_peer_is_refused() -> None:
    async with swarm() as one, swarm(*one.listen_addrs) as other, swarm() as third:
        serve_double(one)
        assert await ask(other, one.peer_id) == b"xx"
        one.ban(other.peer_id, "two votes at one height")
        await until(lambda: not is_connected(one, other) and not is_connected(other, one))
        assert one.banned() == {other.peer_id: Ban("two votes at one height", None)}
        with pytest.raises((PeerUnreachableError, RequestRefusedError)):
            await ask(other, one.peer_id)
        one.remember(other.peer_id, other.listen_addrs)
        with pytest.raises(PeerUnreachableError, match="banned"):
            await ask(one, other.peer_id)
        await third.connect(one.listen_addrs[0])
        assert await ask(third, one.peer_id) == b"xx"


@trio_test
async def test_a_callback_of_events_may_raise() -> None:
    async with swarm() as one:
        seen: list[PeerView] = []

        def raise_it(view: PeerView) -> None:
            seen.append(view)
            raise RuntimeError("a bug")

        one.on_peer_connected(raise_it)
        async with swarm(*one.listen_addrs):
            await until(lambda: seen)
        assert one.statistics().failed_handlers == 1
        assert one.statistics().host_restarts == 0


@trio_test
async def test_a_host_that_dies_is_replaced_in_place() -> None:
    async with swarm() as server, swarm(*server.listen_addrs) as client:
        serve_double(server)
        at_server = Listener()
        await at_server.subscribe(server)
        assert await ask(client, server.peer_id) == b"xx"
        before = server.listen_addrs
        connected: list[PeerView] = []
        server.on_peer_connected(connected.append)

        async def crash() -> None:
            await trio.lowlevel.checkpoint()
            raise RuntimeError("an unknown fault of libp2p")

        host = server._host
        assert host is not None
        host._network.manager.run_daemon_task(crash)
        await until(lambda: server.statistics().host_restarts == 1)
        assert server.peers() == ()
        assert server.statistics().dropped_peers == 1
        with pytest.raises(PeerUnreachableError):
            await ask(server, client.peer_id)
        await until(lambda: connected)
        assert server.listen_addrs == before
        assert await ask(client, server.peer_id) == b"xx"
        await publish_until_heard(client, b"again", at_server)


@trio_test
async def test_bad_addresses_are_named_at_once() -> None:
    for config in (
        SwarmConfig(listen=("/ip4/127.0.0.1/udp/1",)),
        SwarmConfig(bootstrap=("example.org:4001",)),
        SwarmConfig(bootstrap=("/ip4/127.0.0.1/tcp/4001",)),
    ):
        with pytest.raises(AddressError) as caught:
            async with open_swarm(new_identity(), config):
                pass
        assert (config.bootstrap or config.listen)[0] in str(caught.value)
    async with swarm() as one:
        with pytest.raises(AddressError):
            await one.connect("/ip4/127.0.0.1/tcp/1")


@trio_test
async def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(ListenError, match=r"192\.0\.2\.1"):
        async with open_swarm(new_identity(), SwarmConfig(listen=("/ip4/192.0.2.1/tcp/4001",))):
            pass


@trio_test
async def test_errors_of_the_block_come_out_as_they_are() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with swarm():
            raise KeyError("mine")


@trio_test
async def test_wildcards_are_listed_as_interfaces() -> None:
    async with open_swarm(new_identity(), SwarmConfig()) as one, swarm() as other:
        assert all("/0.0.0.0/" not in addr and "/tcp/0/" not in addr for addr in one.listen_addrs)
        loopback = [addr for addr in one.listen_addrs if addr.startswith("/ip4/127.0.0.1/")]
        await other.connect(loopback[0])


@trio_test
async def test_the_number_of_connections_is_bounded() -> None:
    config = SwarmConfig(listen=("/ip4/127.0.0.1/tcp/0",), max_connections=4)
    async with open_swarm(new_identity(), config) as one, trio.open_nursery() as nursery:
        opened = 0

        async def visit() -> None:
            nonlocal opened
            async with swarm(*one.listen_addrs):
                opened += 1
                await trio.sleep_forever()

        for _ in range(6):
            nursery.start_soon(visit)
        await until(lambda: opened == 6 and len(one.peers()) == 3)
        with trio.move_on_after(1.0):
            await until(lambda: len(one.peers()) > 3)
        assert len(one.peers()) == 3  # a quarter is kept for those whom we dial
        async with swarm() as other:
            await one.connect(other.listen_addrs[0])
            assert len(one.peers()) == 4
        nursery.cancel_scope.cancel()
