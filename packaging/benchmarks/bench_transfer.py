"""Time one blob from one process to another, and beside it plain TCP and py-libp2p untouched.

python packaging/benchmarks/bench_transfer.py [--mib 100] [--turns 5] [--pairs 1] [--only blob ...]

Over loopback, in turns, medians. `tcp`: a plain socket, nothing encrypted, nothing kept. `libp2p`:
stock host, noise and yamux, writes of 1 MiB, nothing kept. `blob`: what the agent does; hashed,
encrypted, asked for in chunks, verified, on the disk. With --pairs 3, three fetch at once from one.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import trio
from libp2p.abc import IHost, INetStream

from p2p.blobstore import BlobStore
from p2p.identity import load_or_create_identity
from p2p.swarm import Swarm, SwarmConfig, open_swarm
from volunteer.training.child_process import keep_freed_memory

KINDS = ("tcp", "libp2p", "blob")
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
PIECE_BYTES = 1 << 20
STOCK_PROTOCOL = "/bench/1"
DEADLINE_S = 300.0


def cpu_s() -> float:
    """Return the user and system seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def say(words: object) -> None:
    """Tell the program that started this one."""
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


async def hear() -> None:
    """Wait for a line from the program that started this one."""
    await trio.to_thread.run_sync(sys.stdin.readline)


class Giving:
    """What the giving side does, whatever the kind: say where, wait, say what it cost."""

    async def until_done(self, where: object) -> None:
        """Say where; between two lines from outside the transfer happens."""
        say(where)
        await hear()
        begun_cpu_s = cpu_s()
        await hear()
        say(cpu_s() - begun_cpu_s)


# ----------------------------------------------------------------------------------------- tcp


async def give_tcp(folder: Path, mib: int) -> None:
    """Send zeros to whoever connects."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    piece = bytes(PIECE_BYTES)

    async def send(stream: trio.SocketStream) -> None:
        for _ in range(mib):
            await stream.send_all(piece)
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, send, listeners)
        await Giving().until_done(listeners[0].socket.getsockname()[1])
        nursery.cancel_scope.cancel()


async def take_tcp(where: int, folder: Path, mib: int) -> None:
    """Read it all."""
    await hear()
    begun_s, begun_cpu_s, left = time.perf_counter(), cpu_s(), mib * PIECE_BYTES
    stream = await trio.open_tcp_stream("127.0.0.1", where)
    while left:
        left -= len(await stream.receive_some(PIECE_BYTES))
    say((time.perf_counter() - begun_s, cpu_s() - begun_cpu_s))


# -------------------------------------------------------------------------------------- libp2p


@asynccontextmanager
async def stock_host() -> AsyncIterator[IHost]:
    """Run py-libp2p as it comes, but for plaintext."""
    from libp2p import new_host
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
    from libp2p.security.noise.transport import PROTOCOL_ID
    from libp2p.security.noise.transport import Transport as NoiseTransport
    from multiaddr import Multiaddr

    key_pair = create_new_key_pair(os.urandom(32))
    noise = NoiseTransport(key_pair, noise_privkey=create_noise_key_pair().private_key)
    host = new_host(key_pair=key_pair, sec_opt={PROTOCOL_ID: noise})
    async with host.run([Multiaddr(LOOPBACK)]):
        yield host


async def give_libp2p(folder: Path, mib: int) -> None:
    """Write zeros to whoever opens a stream."""
    piece = bytes(PIECE_BYTES)
    async with stock_host() as host:

        async def send(stream: INetStream) -> None:
            for _ in range(mib):
                await stream.write(piece)
            await stream.close()

        host.set_stream_handler(STOCK_PROTOCOL, send)
        await Giving().until_done(str(host.get_addrs()[0]))


async def take_libp2p(where: str, folder: Path, mib: int) -> None:
    """Read it all."""
    from libp2p.peer.peerinfo import info_from_p2p_addr
    from multiaddr import Multiaddr

    async with stock_host() as host:
        other = info_from_p2p_addr(Multiaddr(where))
        await host.connect(other)
        await hear()
        begun_s, begun_cpu_s, left = time.perf_counter(), cpu_s(), mib * PIECE_BYTES
        stream = await host.new_stream(other.peer_id, [STOCK_PROTOCOL])
        while left:
            left -= len(await stream.read(PIECE_BYTES))
        say((time.perf_counter() - begun_s, cpu_s() - begun_cpu_s))


# ---------------------------------------------------------------------------------------- blob


@asynccontextmanager
async def own_swarm(folder: Path, name: str) -> AsyncIterator[Swarm]:
    """Run what an agent runs."""
    config = SwarmConfig(listen=(LOOPBACK,), mdns=False, dht=False)
    async with open_swarm(load_or_create_identity(folder / f"{name}.key"), config) as swarm:
        yield swarm


async def give_blob(folder: Path, mib: int) -> None:
    """Serve a blob of random bytes."""
    store = BlobStore(folder / "given")
    blob_id = store.add_bytes(os.urandom(mib * PIECE_BYTES))
    async with own_swarm(folder, "giving") as swarm:
        swarm.serve_blobs(store, lambda _blob_id: True, lambda _blob_id: "blob")
        await Giving().until_done((swarm.listen_addrs[0], blob_id))


async def take_blob(where: tuple[str, str], folder: Path, mib: int) -> None:
    """Fetch it."""
    address, blob_id = where
    name = f"taken-{os.getpid()}"
    async with own_swarm(folder, name) as swarm:
        await swarm.connect(address)
        await hear()
        begun_s, begun_cpu_s = time.perf_counter(), cpu_s()
        await swarm.fetch_blob(
            blob_id,
            max_bytes=mib * PIECE_BYTES,
            providers=lambda: [peer.peer_id for peer in swarm.peers()],
            store=BlobStore(folder / name),
            purpose="blob",
            deadline_s=DEADLINE_S,
        )
        say((time.perf_counter() - begun_s, cpu_s() - begun_cpu_s))


GIVE: dict[str, Callable[..., Awaitable[None]]] = {
    "tcp": give_tcp,
    "libp2p": give_libp2p,
    "blob": give_blob,
}
TAKE: dict[str, Callable[..., Awaitable[None]]] = {
    "tcp": take_tcp,
    "libp2p": take_libp2p,
    "blob": take_blob,
}

# ------------------------------------------------------------------------------------- program


def start(*words: object) -> subprocess.Popen[str]:
    """Start one side."""
    argv = [sys.executable, __file__, *map(str, words)]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def tell(process: subprocess.Popen[str]) -> None:
    """Send a line to one side."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def answer_of(process: subprocess.Popen[str]) -> Any:  # noqa: ANN401 -- JSON
    """Return what one side says next."""
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def measure(kind: str, mib: int, pairs: int) -> tuple[float, float, float]:
    """Return seconds, and the CPU seconds of the giving and of all taking sides."""
    with tempfile.TemporaryDirectory() as name:
        giving = start("--give", kind, "--folder", name, "--mib", mib)
        where = json.dumps(answer_of(giving))
        taking = [
            start("--take", kind, "--folder", name, "--mib", mib, "--where", where)
            for _ in range(pairs)
        ]
        try:
            time.sleep(3.0)  # noqa: TID251 - until imports and handshakes are over
            for process in (giving, *taking):
                tell(process)
            taken = [answer_of(process) for process in taking]
            tell(giving)
            given_cpu_s = answer_of(giving)
        finally:
            for process in (giving, *taking):
                process.kill()
                process.communicate()
    return max(s for s, _ in taken), given_cpu_s, sum(cpu for _, cpu in taken)


def main(arguments: Sequence[str]) -> int:
    """Run everything, or one side of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=100)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=1, help="how many fetch at once from one")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--give", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--take", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--where", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.give or options.take:
        keep_freed_memory()  # as the agent does
        gc.freeze()
    if options.give:
        trio.run(GIVE[options.give], options.folder, options.mib)
        return 0
    if options.take:
        trio.run(TAKE[options.take], options.where, options.folder, options.mib)
        return 0
    results: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in options.only}
    for _ in range(options.turns):
        for kind in options.only:
            results[kind].append(measure(kind, options.mib, options.pairs))
    print(f"{options.mib} MiB to {options.pairs}, medians of {options.turns}")
    print("kind     MB/s in all   CPU s per 100 MB: giving  taking")
    for kind, rows in results.items():
        mb = options.mib * options.pairs * PIECE_BYTES / 1e6
        seconds, giving, taking = (median(row[i] for row in rows) for i in range(3))
        print(f"{kind:8} {mb / seconds:11.0f}   {100 * giving / mb:24.3f} {100 * taking / mb:7.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
