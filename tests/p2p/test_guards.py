"""What strangers can send: a host survives it, and serves the next one."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import libp2p
import pytest
import trio
from libp2p.pubsub.pb import rpc_pb2
from libp2p.utils.varint import encode_varint_prefixed

from p2p import guarded_yamux, guards
from p2p.contain import contain
from p2p.errors import P2PError, RequestRefusedError, UnsupportedLibp2pError
from p2p.gossip_guards import GOSSIP_BYTES_BURST
from p2p.gossip_packing import PACKED_PROTOCOL, Packer
from p2p.identity import Identity
from p2p.swarm import Swarm, SwarmConfig, open_swarm
from tests.p2p.support import (
    LOOPBACK,
    ask,
    assert_serving,
    host_of,
    is_connected,
    node,
    port_of,
    swarm,
    trio_test,
    until,
)

pytestmark = [pytest.mark.slow, pytest.mark.system]

GREETING = b"\x13/multistream/1.0.0\n"
PUBSUB = "/meshsub/1.2.0"


def test_another_libp2p_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libp2p, "__version__", "0.9.0")
    with pytest.raises(UnsupportedLibp2pError, match=r"0\.9\.0") as caught:
        guards.install()
    assert "0.8.1" in caught.value.hint


def test_contained_errors_are_quiet_when_strangers_repeat_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="p2p")
    for _ in range(5):
        with contain("what strangers repeat") as outcome:
            raise KeyError("x" * 10_000)
        assert isinstance(outcome.error, KeyError)
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING, *[logging.DEBUG] * 4]
    assert all(len(record.getMessage()) < 400 for record in caplog.records)


async def offer(one: Swarm, security: bytes) -> bytes:
    """Greet the listener and propose a security protocol; give what it says to that."""
    proposal = bytes([len(security) + 1]) + security + b"\n"
    async with await trio.open_tcp_stream("127.0.0.1", port_of(one)) as socket:
        await socket.send_all(GREETING + proposal)
        answer = b""
        while len(answer) < len(GREETING) + 4:
            answer += await socket.receive_some(1000)
    return answer.removeprefix(GREETING)


@trio_test
async def test_plaintext_is_refused() -> None:
    async with swarm() as one:
        assert (await offer(one, b"/noise")).startswith(b"\x07/noise\n"[:4])
        assert await offer(one, b"/plaintext/2.0.0") == b"\x03na\n"
        assert await offer(one, b"/tls/1.0.0") == b"\x03na\n"


@trio_test
async def test_garbage_on_the_port_is_survived() -> None:
    async with swarm() as one:
        noise = b"\x07/noise\n"
        for garbage in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff" * 100,
            os.urandom(5000),
            GREETING + os.urandom(200),
            GREETING + noise + os.urandom(500),
            GREETING + noise + b"\xff\xff" + bytes(70_000),
            b"\xff\xff\xff\x7f",
        ):
            async with await trio.open_tcp_stream("127.0.0.1", port_of(one)) as socket:
                if garbage:
                    await socket.send_all(garbage)
        await assert_serving(one)


@pytest.mark.parametrize(
    "garbage",
    [b"\x32" + b"\xff" * 50, b"\xff" * 12, b"\xff\xff\xff\xff\x0f" + bytes(10), bytes(200), b""],
)
@trio_test
async def test_garbage_on_the_pubsub_protocol_is_survived(garbage: bytes) -> None:
    async with swarm() as one, swarm(*one.listen_addrs) as stranger:
        await until(lambda: is_connected(stranger, one))
        async with host_of(stranger).open_stream(one.peer_id, PUBSUB, timeout_s=5.0) as stream:
            await stream.write(garbage)
        await assert_serving(one)


@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 9, b"\x03\x00", Packer().pack(bytes(1 << 26)), b"\x00\x00\x00\xff\xff" * 50_000],
)
@trio_test
async def test_what_is_packed_to_harm_is_a_misdeed(garbage: bytes) -> None:
    """At last 64 MiB of zeros in 64 KiB, and a long frame of nothing."""
    async with swarm() as one, swarm(*one.listen_addrs) as stranger:
        await until(lambda: is_connected(stranger, one))
        stream = await host_of(stranger).start_stream(one.peer_id, PACKED_PROTOCOL, timeout_s=5.0)
        await stream.write(encode_varint_prefixed(garbage))
        await until(lambda: one.statistics().misdeeds == 1)
        await stream.reset()
        await assert_serving(one)


@trio_test
async def test_what_is_packed_is_charged_for_what_came_and_for_what_it_holds() -> None:
    async with swarm() as one, swarm(*one.listen_addrs) as stranger:
        await until(lambda: is_connected(stranger, one))
        stream = await host_of(stranger).start_stream(one.peer_id, PACKED_PROTOCOL, timeout_s=5.0)
        packer = Packer()
        frame = rpc_pb2.RPC(publish=[rpc_pb2.Message(data=bytes(260_000))]).SerializeToString()
        num_frames = (
            GOSSIP_BYTES_BURST // len(frame) + 30
        )  # and some seconds' allowance; below 100 messages
        for _ in range(num_frames):
            await stream.write(encode_varint_prefixed(packer.pack(frame)))
        await until(lambda: one.statistics().misdeeds > 0)
        await stream.reset()
        await assert_serving(one)


@trio_test
async def test_a_gossiped_message_with_a_false_author_is_survived() -> None:
    async with swarm() as one, swarm(*one.listen_addrs) as stranger:
        heard: list[bytes] = []

        async def accept(_author: str, payload: bytes) -> bool:
            heard.append(payload)
            return True

        async def on_message(_author: str, payload: bytes) -> None:
            heard.append(payload)

        await one.subscribe("t", accept, on_message, max_bytes=100)
        await until(lambda: is_connected(stranger, one))
        async with host_of(stranger).open_stream(one.peer_id, PUBSUB, timeout_s=5.0) as stream:
            for author in (b"", b"\x12\x20" + b"a" * 32, b"\x00\x24\x08\x09\x12\x20" + b"a" * 32):
                message = rpc_pb2.Message(
                    data=b"x",
                    topicIDs=["t"],
                    from_id=author,
                    seqno=b"1",
                    key=b"junk",
                    signature=b"s",
                )
                rpc = rpc_pb2.RPC(publish=[message]).SerializeToString()
                await stream.write(encode_varint_prefixed(rpc))
        await assert_serving(one)
        assert heard == []


async def flood(one: Swarm, peer_id: str, num_bytes: int) -> None:
    """Write to a stream that nobody reads, whatever window was granted."""
    async with host_of(one).open_stream(peer_id, "/test/never/1", timeout_s=5.0) as stream:
        stream._stream.muxed_stream.send_window = 1 << 30
        while one.statistics().wire_sent_bytes < num_bytes:
            await stream.write(bytes(1 << 20))


@trio_test
async def test_a_peer_that_floods_loses_its_connection_alone() -> None:
    """Data that nobody reads must not fill the memory past the bound of one connection."""
    async with swarm() as one, swarm(*one.listen_addrs) as stranger:
        release = trio.Event()

        async def never_read(_peer_id: str, _stream: object) -> None:
            await release.wait()

        host_of(one).set_handler("/test/never/1", never_read)
        await until(lambda: is_connected(stranger, one))
        with pytest.raises(P2PError):
            await flood(stranger, one.peer_id, 4 * guarded_yamux.MAX_UNREAD_BYTES)
        assert stranger.statistics().wire_sent_bytes < 2 * guarded_yamux.MAX_UNREAD_BYTES
        release.set()
        await assert_serving(one)


@trio_test
async def test_more_streams_than_allowed_are_reset() -> None:
    async with swarm() as one, swarm(*one.listen_addrs) as stranger:
        release, num_waiting = trio.Event(), 0

        async def respond(_peer_id: str, _payload: bytes) -> bytes:
            nonlocal num_waiting
            num_waiting += 1
            await release.wait()
            return b"ok"

        one.serve("/test/wait/1", respond, max_request_bytes=10, purpose="wait")
        await until(lambda: is_connected(stranger, one))
        outcomes: list[bytes | RequestRefusedError] = []

        async def ask_once() -> None:
            try:
                outcomes.append(
                    await stranger.request(
                        one.peer_id,
                        "/test/wait/1",
                        b"",
                        timeout_s=10.0,
                        max_response_bytes=2,
                        purpose="w",
                    )
                )
            except RequestRefusedError as refusal:
                outcomes.append(refusal)

        async with trio.open_nursery() as nursery:
            for _ in range(guards.MAX_INBOUND_STREAMS + 10):
                nursery.start_soon(ask_once)
            await until(lambda: len(outcomes) >= 10)
            assert num_waiting <= guards.MAX_INBOUND_STREAMS
            release.set()
        num_refused = sum(isinstance(outcome, RequestRefusedError) for outcome in outcomes)
        assert 10 <= num_refused <= 12  # its gossip stream counts as well
        await assert_serving(one)


@trio_test
async def test_a_frozen_peer_is_dropped(tmp_path: Path) -> None:
    with node("listen", tmp_path) as frozen:
        async with swarm() as one:
            await one.connect(frozen.addr)
            await until(lambda: one.peers()[0].rtt_s is not None)
            frozen.freeze()
            await until(lambda: one.peers() == ())
            await assert_serving(one)


@trio_test
async def test_a_killed_peer_is_dropped_and_its_requests_fail(tmp_path: Path) -> None:
    with node("listen", tmp_path) as killed:
        async with swarm() as one:
            await one.connect(killed.addr)
            killed.process.kill()
            await until(lambda: one.peers() == ())
            with pytest.raises(P2PError):
                await ask(one, killed.peer_id, timeout_s=2.0)


@pytest.mark.timeout(60)
def test_three_hundred_inbound_connections_leave_room_and_nothing_behind() -> None:
    """Stock libp2p holds a slot and a task of every connection for ever."""

    async def run() -> None:
        with trio.fail_after(50):
            config = SwarmConfig(listen=LOOPBACK, max_connections=16)
            async with open_swarm(Identity(os.urandom(32)), config) as one:
                await assert_serving(one)
                await until(lambda: host_of(one).num_connections() == 0)
                num_tasks = trio.lowlevel.current_statistics().tasks_living
                async with swarm() as visitor:
                    for _ in range(300):
                        await visitor.connect(one.listen_addrs[0])
                        visitor.disconnect(one.peer_id)
                        await until(lambda: host_of(one).num_connections() < 8)
                await until(lambda: host_of(one).num_connections() == 0)
                await assert_serving(one)
                await until(
                    lambda: trio.lowlevel.current_statistics().tasks_living <= num_tasks + 5
                )
                assert one.statistics().wire_received_bytes > 300 * 200  # as many handshakes

    trio.run(run)
