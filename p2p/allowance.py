"""How many bytes may still cross the sockets; without any, the swarm is offline. Runs in: agent.

Pure, but for the events. Bytes are counted where sockets take and give them, so that at most one
piece too many crosses: what has arrived at the system and was not read, and the end of connections.
"""

from __future__ import annotations

import trio


class Allowance:
    """A stock of bytes that somebody fills up."""

    def __init__(self, num_bytes: int | None = None) -> None:
        """Allow `num_bytes`; None: any number."""
        self._left = num_bytes
        self._opened = trio.Event()
        self._closed = trio.Event()
        self._tell()

    @property
    def is_open(self) -> bool:
        """Whether any bytes may go."""
        return self._left is None or self._left > 0

    def set(self, num_bytes: int | None) -> None:
        """Allow so many bytes from now on; None: any number; 0: none."""
        self._left = num_bytes
        self._tell()

    def take(self, num_bytes: int) -> None:
        """Count bytes that have crossed a socket."""
        if self._left is not None:
            self._left -= num_bytes
            self._tell()

    async def wait_open(self) -> None:
        """Wait until some bytes may go."""
        while not self.is_open:
            await self._opened.wait()

    async def wait_closed(self) -> None:
        """Wait until none may."""
        while self.is_open:
            await self._closed.wait()

    def _tell(self) -> None:
        if self.is_open and self._closed.is_set():
            self._closed = trio.Event()
        if not self.is_open and self._opened.is_set():
            self._opened = trio.Event()
        (self._opened if self.is_open else self._closed).set()
