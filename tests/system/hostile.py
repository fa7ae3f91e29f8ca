"""Sends what no peer sends to a TCP port: run inside a namespace, as a script of its own.

    python hostile.py KIND HOST PORT [SOURCE ...]

It prints `up` when everything is sent or held, holds what it holds until its stdin ends, and then
prints how many connections it had. Standard library only; nothing here knows the protocol beyond
the greeting that every libp2p host sends first.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import sys
from collections.abc import Callable, Iterator

GREETING = b"\x13/multistream/1.0.0\n"
NUM_CONNECTS = 300
NUM_SILENT = 100
NUM_GARBAGE = 40
OVERSIZED_BYTES = 8 << 20
TIMEOUT_S = 5.0


class Attacker:
    """Dials one port from one or several addresses of this machine."""

    def __init__(self, host: str, port: int, sources: list[str]) -> None:
        self._target = (host, port)
        self._sources: Iterator[str] = itertools.cycle(sources or ["0.0.0.0"])
        self.num_connected = 0
        self.held: list[socket.socket] = []

    def dial(self) -> socket.socket | None:
        """Connect; None where that is refused."""
        try:
            connection = socket.create_connection(
                self._target, TIMEOUT_S, source_address=(next(self._sources), 0)
            )
        except OSError:
            return None
        self.num_connected += 1
        return connection

    def send(self, *pieces: bytes) -> None:
        """Send on a connection of its own until it is refused, and see how that ends."""
        connection = self.dial()
        if connection is None:
            return
        with connection, contextlib.suppress(OSError):
            for piece in pieces:
                connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass


def send_random(attacker: Attacker) -> None:
    chance = random.Random(7)
    for _ in range(NUM_GARBAGE):
        attacker.send(chance.randbytes(chance.randint(1, 4096)))


def send_random_after_greeting(attacker: Attacker) -> None:
    chance = random.Random(8)
    for _ in range(NUM_GARBAGE):
        attacker.send(GREETING, chance.randbytes(chance.randint(1, 4096)))


def send_truncated(attacker: Attacker) -> None:
    whole = GREETING + b"\x07/noise\n" + b"\x00\x20" + bytes(32)
    for length in range(1, len(whole)):
        attacker.send(whole[:length])


def send_oversized(attacker: Attacker) -> None:
    zeros = [bytes(65536)] * (OVERSIZED_BYTES // 65536)
    for head in (b"", GREETING, GREETING + b"\x07/noise\n", GREETING + b"\x07/noise\n\xff\xff"):
        for length in (b"\xff\xff\xff\xff\x07", b"\xff" * 9 + b"\x01"):
            attacker.send(head + length, *zeros)


def connect_often(attacker: Attacker) -> None:
    for _ in range(NUM_CONNECTS):
        attacker.send()


def hold_silent(attacker: Attacker) -> None:
    for _ in range(NUM_SILENT):
        connection = attacker.dial()
        if connection is not None:
            attacker.held.append(connection)


KINDS: dict[str, Callable[[Attacker], None]] = {
    "random": send_random,
    "random after the greeting": send_random_after_greeting,
    "truncated": send_truncated,
    "oversized": send_oversized,
    "connects": connect_often,
    "silent": hold_silent,
}


def main() -> None:
    """Do one kind of harm."""
    kind, host, port, *sources = sys.argv[1:]
    attacker = Attacker(host, int(port), sources)
    KINDS[kind](attacker)
    sys.stdout.write("up\n")
    sys.stdout.flush()
    sys.stdin.read()
    sys.stdout.write(f"{attacker.num_connected}\n")


if __name__ == "__main__":
    main()
