"""A child process that takes commands on stdin and gives events on stdout, a line each.

Runs in: agent. Its log (stderr) goes to a file of its own. A child ends when its stdin ends, and on
Linux dies with the agent whatever happens to it, so no orphan holds the device.
"""

from __future__ import annotations

import logging
import math
import os
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import trio

from volunteer.logs import MAX_LOG_BYTES, open_log
from volunteer.messages import MAX_LINE_BYTES, encode_line, parse_line

log = logging.getLogger(__name__)
E = TypeVar("E")
_READ_BYTES = 65536
END_DEADLINE_S = 5.0
"""A child that says no more is killed if it has not ended by itself within this."""


class Child(Generic[E]):
    """One started process."""

    def __init__(self, process: trio.Process, decoder: msgspec.json.Decoder[E], name: str) -> None:
        """Wrap a process whose stdin and stdout are pipes."""
        self._process = process
        self._decoder = decoder
        self._name = name
        self._outbox, self._queue = trio.open_memory_channel[bytes](math.inf)

    @classmethod
    async def start(
        cls, argv: Sequence[str], log_file: Path, decoder: msgspec.json.Decoder[E], name: str
    ) -> Child[E]:
        """Start `argv`; OSError if that is not possible."""
        with os.fdopen(open_log(log_file, MAX_LOG_BYTES), "ab") as stderr:
            process = await trio.lowlevel.open_process(
                list(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
            )
        return cls(process, decoder, name)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def send(self, message: msgspec.Struct) -> None:
        """Queue one command; lost if the child ends first."""
        self._outbox.send_nowait(encode_line(message))

    async def run(self, on_event: Callable[[E], Awaitable[None]]) -> int:
        """Pass commands and events on until the child ends; return its exit status.

        Cancellation: the child is killed, and has ended when this returns.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                await self._read(on_event)
                # It has closed its stdout, or wrote what it must not: it has little time to end.
                with trio.move_on_after(END_DEADLINE_S):
                    await self._process.wait()
                self.kill()
                status = await self._process.wait()
                nursery.cancel_scope.cancel()
        finally:
            self.kill()
            with trio.CancelScope(shield=True):
                await self._process.wait()
                await self._close_pipes()
        return status

    def kill(self) -> None:
        """End it at once, if it still runs."""
        if self._process.returncode is None:
            self._process.kill()

    async def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                await trio.aclose_forcefully(pipe)

    async def _write(self) -> None:
        assert self._process.stdin is not None
        async for line in self._queue:
            try:
                await self._process.stdin.send_all(line)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return

    async def _read(self, on_event: Callable[[E], Awaitable[None]]) -> None:
        assert self._process.stdout is not None
        buffer = bytearray()
        while True:
            data = await self._process.stdout.receive_some(_READ_BYTES)
            if not data:
                return
            buffer += data
            *lines, rest = buffer.split(b"\n")
            buffer = bytearray(rest)
            if len(buffer) > MAX_LINE_BYTES:
                log.error("child=%s wrote a line of over %d bytes", self._name, MAX_LINE_BYTES)
                self.kill()
                return
            for line in lines:
                await self._take_line(bytes(line), on_event)

    async def _take_line(self, line: bytes, on_event: Callable[[E], Awaitable[None]]) -> None:
        try:
            event = parse_line(line, self._decoder)
        except ValueError as error:
            log.error("child=%s wrote a line that is no event: %s", self._name, error)
            return
        await on_event(event)
