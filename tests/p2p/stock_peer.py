"""py-libp2p without our guards: python -m tests.p2p.stock_peer ADDR PROTOCOL NUM_BYTES.

Connects to ADDR, asks on PROTOCOL for its own NUM_BYTES bytes back, and says whether they came.
"""

from __future__ import annotations

import os
import struct
import sys

import trio
from libp2p import new_host
from libp2p.abc import INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.noise.transport import PROTOCOL_ID
from libp2p.security.noise.transport import Transport as NoiseTransport
from multiaddr import Multiaddr

LENGTH = struct.Struct(">I")


async def read_exactly(stream: INetStream, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        data += await stream.read(num_bytes - len(data))
    return data


async def main(addr: str, protocol: str, num_bytes: int) -> None:
    key_pair = create_new_key_pair(os.urandom(32))
    noise = NoiseTransport(key_pair, noise_privkey=create_noise_key_pair().private_key)
    host = new_host(key_pair=key_pair, sec_opt={PROTOCOL_ID: noise})
    data = os.urandom(num_bytes)
    async with host.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        other = info_from_p2p_addr(Multiaddr(addr))
        await host.connect(other)
        stream = await host.new_stream(other.peer_id, [TProtocol(protocol)])
        await stream.write(LENGTH.pack(num_bytes) + data)
        head = await read_exactly(stream, 1 + LENGTH.size)
        assert head == b"\0" + LENGTH.pack(num_bytes)
        assert await read_exactly(stream, num_bytes) == data
        sys.stdout.write("the same\n")
        sys.stdout.flush()


if __name__ == "__main__":
    trio.run(main, sys.argv[1], sys.argv[2], int(sys.argv[3]))
