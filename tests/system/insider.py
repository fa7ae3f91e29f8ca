"""A member that means harm: it has a key, is connected, and breaks the rules from the inside.

    python -m tests.system.insider KIND PEER_ADDR RUN_ID

It prints its peer id when it is connected, does one kind of harm, prints `done`, holds what it
holds until its stdin ends. The harm is made with the product's own network, without its limits.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import msgspec
import trio
from blake3 import blake3
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import PUBSUB_SIGNING_PREFIX
from libp2p.utils import encode_varint_prefixed

from p2p.errors import P2PError
from p2p.framing import encode_frame
from p2p.host import Host
from p2p.identity import Identity
from p2p.swarm import Swarm, SwarmConfig, open_swarm
from volunteer.rounds.records import Contribution, encode_body, encode_envelope, signed_bytes

CONNECT_S = 20.0
HARM_S = 60.0
STREAM_S = 3.0
MODULE = "dense"
PUBSUB = "/meshsub/1.2.0"
PROTOCOLS = (
    "/allmende/sync/1",
    "/allmende/blob/1",
    "/allmende/peers/1",
    "/allmende/kad/1.0.0",
    "/allmende/hello/1",
    "/ipfs/ping/1.0.0",
    PUBSUB,
    "/unknown/1",
)
NUM_ANNOUNCEMENTS = 5_000
MESSAGES_A_FRAME = 50
NUM_FRAMES_A_TOPIC = 30
MAX_GOSSIP_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Insider:
    """Who does it, and to whom."""

    identity: Identity
    swarm: Swarm
    victim: str
    """Peer id."""
    run_id: str

    @property
    def host(self) -> Host:
        assert self.swarm._host is not None
        return self.swarm._host

    @property
    def topics(self) -> tuple[str, str]:
        return tuple(  # type: ignore[return-value]
            f"allmende/1/{self.run_id}/{MODULE}/{name}" for name in ("records", "heartbeats")
        )

    async def send(self, protocol: str, *pieces: bytes) -> None:
        """Send on a stream of its own and read what comes, until it is over or too long."""
        with trio.move_on_after(STREAM_S), contextlib.suppress(P2PError):
            async with self.host.open_stream(self.victim, protocol, timeout_s=STREAM_S) as stream:
                for piece in pieces:
                    await stream.write(piece)
                while await stream.read_some(65_536):
                    pass

    async def gossip(self, frame: bytes) -> None:
        """Send a frame of gossip; nothing is answered."""
        async with self.host.open_stream(self.victim, PUBSUB, timeout_s=STREAM_S) as stream:
            await stream.write(frame)

    def frame_of(self, topic: str, payloads: list[bytes], first_number: int) -> bytes:
        """Return a frame of messages that libp2p signs as it should."""
        pubsub = self.host.pubsub
        messages = []
        for number, payload in enumerate(payloads, first_number):
            message = rpc_pb2.Message(
                data=payload,
                topicIDs=[topic],
                from_id=pubsub.my_id.to_bytes(),
                seqno=number.to_bytes(8, "big"),
            )
            signed = PUBSUB_SIGNING_PREFIX.encode() + message.SerializeToString()
            message.key = pubsub.host.get_public_key().serialize()
            message.signature = pubsub.sign_key.sign(signed)
            messages.append(message)
        frame: bytes = encode_varint_prefixed(rpc_pb2.RPC(publish=messages).SerializeToString())
        return frame

    def announcement(self, number: int, *, is_signed: bool = True) -> bytes:
        """Return a contribution's record, each on another base."""
        record = Contribution(
            run_id=self.run_id,
            module_id=MODULE,
            round_index=1,
            author=self.swarm.peer_id,
            base=blake3(b"base %d" % number).hexdigest(),
            vote=False,
            blob_id=blake3(b"blob %d" % number).hexdigest(),
            blob_bytes=1000,
            codec="int4",
            codec_version=1,
            tokens=1000,
        )
        body = encode_body(record)
        signature = self.identity.sign(signed_bytes(body)) if is_signed else bytes(64)
        return encode_envelope(body, signature)


def wrong_frames(chance: random.Random) -> Iterator[bytes]:
    """Bytes that no peer sends: random, cut short, too long, and well formed but wrong."""
    for _ in range(5):
        yield chance.randbytes(chance.randint(1, 4096))
    yield b"\x00\x00"
    yield (100).to_bytes(4, "big") + bytes(10)
    yield b"\xff\xff\xff\xff" + bytes(1 << 20)
    yield encode_frame(b"")
    yield encode_frame(msgspec.msgpack.encode({"kind": "sync", "version": 99}))
    yield encode_frame(msgspec.msgpack.encode({"type": "sync", "version": 1, "run_id": "0" * 64}))
    yield encode_frame(b"\x01" + bytes(36))
    yield encode_frame(b"\x81" * 4000)
    yield encode_varint_prefixed(chance.randbytes(300))
    yield encode_varint_prefixed(rpc_pb2.RPC().SerializeToString()) * 50


async def harm_streams(insider: Insider) -> None:
    """Every wrong frame on every protocol."""
    chance = random.Random(11)
    for protocol in PROTOCOLS:
        for frame in wrong_frames(chance):
            await insider.send(protocol, frame)


async def harm_topics(insider: Insider) -> None:
    """On every topic, messages whose wrapping is right and whose content is not."""
    chance = random.Random(12)
    number = 0
    for topic in (*insider.topics, "allmende/1/unheard-of", "x" * 4000):
        good = insider.announcement(1)
        payloads = [
            b"",
            chance.randbytes(500),
            chance.randbytes(MAX_GOSSIP_BYTES + 1000),
            good[: len(good) // 2],
            good + b"\x00",
            insider.announcement(2, is_signed=False),
            good.replace(insider.run_id.encode(), b"0" * 64),
            msgspec.msgpack.encode([2, b"body", bytes(64)]),
            msgspec.msgpack.encode({"version": 1, "run_id": insider.run_id}),
            b"\x81" * 4000,
        ]
        for _ in range(NUM_FRAMES_A_TOPIC):
            await insider.gossip(insider.frame_of(topic, payloads, number))
            number += len(payloads)


async def harm_announcements(insider: Insider) -> None:
    """5,000 announcements, every one of them valid."""
    for start in range(0, NUM_ANNOUNCEMENTS, MESSAGES_A_FRAME):
        payloads = [insider.announcement(n) for n in range(start, start + MESSAGES_A_FRAME)]
        await insider.gossip(insider.frame_of(insider.topics[0], payloads, start))


KINDS: dict[str, Callable[[Insider], Awaitable[None]]] = {
    "streams": harm_streams,
    "topics": harm_topics,
    "announcements": harm_announcements,
}


async def main(kind: str, addr: str, run_id: str) -> None:
    """Do one kind of harm; being thrown out ends it."""
    identity = Identity(os.urandom(32))
    config = SwarmConfig(listen=(), bootstrap=(addr,), mdns=False, dht=False)
    async with open_swarm(identity, config) as swarm:
        victim = addr.rpartition("/p2p/")[2]
        with trio.fail_after(CONNECT_S):
            await swarm.connect(addr)
        say(identity.peer_id)
        with trio.move_on_after(HARM_S), contextlib.suppress(P2PError):
            await KINDS[kind](Insider(identity, swarm, victim, run_id))
        say("done")
        await trio.to_thread.run_sync(sys.stdin.read)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
