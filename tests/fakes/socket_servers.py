"""Servers of our own on a socket, that answer as a test says."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

Talk = Callable[[socket.socket], None]


@contextlib.contextmanager
def listening(file: Path, talk: Talk, times: int = 1) -> Iterator[None]:
    """Serve `times` connections by `talk`, one after another."""
    file.parent.mkdir(exist_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(file))
    listener.listen()

    def serve() -> None:
        for _ in range(times):
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(5)
                talk(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        thread.join(10)
        listener.close()
        file.unlink()


def exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more = connection.recv(num_bytes - len(data))
        if not more:
            raise OSError("closed")
        data += more
    return data


def saying(data: bytes) -> Talk:
    def talk(connection: socket.socket) -> None:
        connection.sendall(data)
        connection.recv(4096)
        connection.recv(4096)

    return talk
