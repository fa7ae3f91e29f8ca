"""Measure the least that an exchange can cost where everyone gets every contribution.

python packaging/benchmarks/hivemind/floor.py [--parameters 25] [--peers 4] [--codec fp32] [...]

One process a peer does what the program's work amounts to, and nothing else: no event loop, no
yamux, no records, no votes, no second process. Over loopback: encode the pseudo-gradient, write and
sync it, send it to everybody encrypted in frames of noise's size, decrypt and hash what comes,
write it, sum it up in fp64 in list order, take the outer step, write and sync the state, hash it,
move the local weights. `--memory` leaves the disk out. What agents cost above that is their own.

Linux only; a turn ends when the last peer is through. CPU is user and system time of all peers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from torch import Tensor

from volunteer.messages import Outcome
from volunteer.run import CodecSpec, OuterSpec
from volunteer.training import compression
from volunteer.training.aggregation import next_state_slices
from volunteer.training.child_process import keep_freed_memory
from volunteer.training.compression_base import EncodedGradient
from volunteer.training.state import SharedState

FRAME_BYTES = 65_519
"""Of plain text; noise's longest message is 65,535 bytes, 16 of them its tag."""
TAG_BYTES = 16
ROUND = 100
PARTS = ("contribute", "exchange", "apply", "rebase")


@contextmanager
def timed(costs: dict[str, float], part: str) -> Iterator[None]:
    """Add the CPU seconds of the block, of all threads."""
    before = _cpu_s()
    try:
        yield
    finally:
        costs[part] = costs.get(part, 0.0) + _cpu_s() - before


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Peer:
    """One peer's vectors, its sockets to the others, and its folder."""

    def __init__(
        self, options: argparse.Namespace, me: int, sockets: Sequence[socket.socket], folder: Path
    ) -> None:
        """Make the vectors."""
        self._codec = CodecSpec(id=options.codec)
        self._is_on_disk = not options.memory
        self._me, self._sockets, self._folder = me, sockets, folder
        num = options.parameters * 10**6
        generator = torch.Generator().manual_seed(1)
        weights = torch.randn(num, generator=generator)
        self._state = SharedState(weights_P=weights, momentum_P=torch.zeros(num))
        self._theta_P, self._base_P = weights.clone(), weights.clone()
        self._residual_P = torch.zeros(num)
        self._received: list[list[Tensor]] = []

    def train(self) -> None:
        """Move the local weights; not timed."""
        noise = torch.randn(2**16) * 1e-3
        for start in range(0, len(self._theta_P), len(noise)):
            piece = self._theta_P[start : start + len(noise)]
            piece -= noise[: len(piece)]

    def exchange(self) -> dict[str, float]:
        """Take part in one exchange; return CPU seconds by part."""
        costs: dict[str, float] = {}
        with timed(costs, "contribute"):
            self._residual_P += self._base_P
            self._residual_P -= self._theta_P
            own = compression.encode(self._residual_P, self._codec, ROUND)
            compression.subtract_decoded(own, self._residual_P)
            self._base_P.copy_(self._theta_P)
            parts = [bytes_of(each) for each in own.tensors]
            self._keep("own", parts)
        with timed(costs, "exchange"):
            blobs = self._all_to_all(own, parts)
        with timed(costs, "apply"):
            self._apply(blobs)
        with timed(costs, "rebase"):
            self._theta_P -= self._base_P
            self._theta_P += self._state.weights_P
            self._base_P.copy_(self._state.weights_P)
        return costs

    def _all_to_all(
        self, own: EncodedGradient, parts: Sequence[memoryview]
    ) -> list[EncodedGradient]:
        sender = threading.Thread(target=self._send_all, args=(parts,))
        sender.start()
        if not self._received:  # later turns write to the same memory
            self._received = [[torch.empty_like(e) for e in own.tensors] for _ in self._sockets]
        blobs = [own]
        for number, sock in enumerate(self._sockets):
            tensors = self._received[number]
            count = 0
            for tensor in tensors:
                count = self._receive(sock, bytes_of(tensor), count)
            self._keep(f"from{number}", [bytes_of(each) for each in tensors])
            blobs.append(
                compression.from_tensors(tuple(tensors), self._codec, own.num_elements, ROUND)
            )
        sender.join()
        return blobs

    def _send_all(self, parts: Sequence[memoryview]) -> None:
        cipher = ChaCha20Poly1305(bytes(32))
        for sock in self._sockets:
            count = 0
            for part in parts:
                for start in range(0, len(part), FRAME_BYTES):
                    frame = part[start : start + FRAME_BYTES]
                    sock.sendall(cipher.encrypt(count.to_bytes(12, "little"), frame, None))
                    count += 1

    def _receive(self, sock: socket.socket, place: memoryview, count: int) -> int:
        cipher, hasher = ChaCha20Poly1305(bytes(32)), blake3()
        buffer = memoryview(bytearray(FRAME_BYTES + TAG_BYTES))
        for start in range(0, len(place), FRAME_BYTES):
            length = min(FRAME_BYTES, len(place) - start)
            frame = buffer[: length + TAG_BYTES]
            sock.recv_into(frame, len(frame), socket.MSG_WAITALL)
            plain = cipher.decrypt(count.to_bytes(12, "little"), frame, None)
            place[start : start + length] = plain
            hasher.update(plain)
            count += 1
        hasher.digest()
        return count

    def _apply(self, blobs: Sequence[EncodedGradient]) -> None:
        outcomes = [_equal(len(blobs)) for _ in blobs]
        hasher = blake3()
        for piece in next_state_slices(self._state, blobs, outcomes, OuterSpec().at_round(ROUND)):
            stop = piece.start + len(piece.weights_S)
            self._state.weights_P[piece.start : stop] = piece.weights_S
            self._state.momentum_P[piece.start : stop] = piece.momentum_S
            hasher.update(bytes_of(piece.weights_S))
            hasher.update(bytes_of(piece.momentum_S))
        hasher.digest()
        vectors = (self._state.momentum_P, self._state.weights_P)
        self._keep("state", [bytes_of(each) for each in vectors])

    def _keep(self, name: str, parts: Sequence[memoryview]) -> None:
        if not self._is_on_disk:
            return
        with (self._folder / f"{self._me}-{name}").open("wb") as stream:
            for part in parts:
                stream.write(part)
            stream.flush()
            os.fsync(stream.fileno())


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.numpy().view("u1").reshape(-1).data


def _equal(count: int) -> Outcome:
    return Outcome(
        contribution_id="", weight=1.0 / count, norm=1.0, clip_scale=1.0, refused_reason=""
    )


def run_peer(
    options: argparse.Namespace,
    me: int,
    sockets: Sequence[socket.socket],
    folder: Path,
    pipe: Connection,
) -> None:
    """Be a peer: a turn for each word that comes."""
    torch.set_num_threads(1)
    keep_freed_memory()
    peer = Peer(options, me, sockets, folder)
    while True:
        peer.train()
        pipe.send(None)
        if not pipe.recv():
            return
        pipe.send(peer.exchange())


def connect_all(peers: int) -> list[list[socket.socket]]:
    """Return for each peer its sockets to the others, over TCP on loopback."""
    ends: list[list[socket.socket]] = [[] for _ in range(peers)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        for first in range(peers):
            for second in range(first + 1, peers):
                ends[first].append(socket.create_connection(server.getsockname()))
                ends[second].append(server.accept()[0])
    return ends


def measure(options: argparse.Namespace) -> Iterator[tuple[float, dict[str, float]]]:
    """Yield of each turn the seconds, and the CPU seconds of all peers by part."""
    context = multiprocessing.get_context("fork")
    ends = connect_all(options.peers)
    pipes, processes = [], []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for me in range(options.peers):
            here, there = context.Pipe()
            process = context.Process(
                target=run_peer, args=(options, me, ends[me], Path(folder), there), daemon=True
            )
            process.start()
            pipes.append(here)
            processes.append(process)
        for _ in range(options.turns + 1):
            for pipe in pipes:
                pipe.recv()
            began_at = time.monotonic()
            for pipe in pipes:
                pipe.send(True)
            costs = [pipe.recv() for pipe in pipes]
            took_s = time.monotonic() - began_at
            yield took_s, {part: sum(each[part] for each in costs) for part in PARTS}
        for pipe in pipes:
            pipe.recv()
            pipe.send(False)
        for process in processes:
            process.join()


def main(arguments: Sequence[str]) -> int:
    """Print each turn, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=25, metavar="MILLIONS")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--codec", default="fp32")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="nothing is written to the disk")
    parser.add_argument("--folder", type=Path, help="for the files; default: temporary")
    options = parser.parse_args(arguments)
    turns = []
    for number, (seconds, costs) in enumerate(measure(options)):
        words = {"s": round(seconds, 3), **{k: round(v, 3) for k, v in costs.items()}}
        print(json.dumps(words), "warming up" if number == 0 else "", flush=True)
        if number:
            turns.append((seconds, costs))
    cpu = {part: median(costs[part] for _, costs in turns) for part in PARTS}
    print(
        f"{options.parameters} M x {options.peers}, {options.codec}"
        f"{', memory only' if options.memory else ''}: {median(s for s, _ in turns):.2f} s,"
        f" CPU {sum(cpu.values()):.2f} s ("
        + ", ".join(f"{part} {seconds:.2f}" for part, seconds in cpu.items())
        + ")"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
