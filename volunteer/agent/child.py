"""A child process that takes commands on stdin and gives events on stdout, a line each.

Runs in: agent. Its log (stderr) goes to a file of its own. A child ends when its stdin ends, and on
Linux dies with the agent whatever happens to it, so no orphan holds the device. One that a signal
from outside has stopped (`kill -STOP`) is woken: it holds memory, and whoever waits for it waits.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import psutil
import trio

from volunteer.logs import MAX_LOG_BYTES, open_log
from volunteer.messages import MAX_LINE_BYTES, encode_line, parse_line

log = logging.getLogger(__name__)
E = TypeVar("E")
_READ_BYTES = 65536
END_DEADLINE_S = 5.0
"""A child that says no more is killed if it has not ended by itself within this."""
LOOK_EVERY_S = 5.0
LOOKS_UNTIL_WOKEN = 4
"""Whoever stops a process for a moment has it stopped: it is woken after 15 to 20 s."""


class Child(Generic[E]):
    """One started process."""

    def __init__(self, process: trio.Process, decoder: msgspec.json.Decoder[E], name: str) -> None:
        """Wrap a process whose stdin and stdout are pipes."""
        self._process = process
        self._decoder = decoder
        self._name = name
        self._outbox, self._queue = trio.open_memory_channel[bytes](math.inf)
        self.is_frozen = False
        """Whether a signal from outside has stopped it."""
        self.was_killed = False
        """Whether this agent has killed it."""

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

        Cancellation: the child is killed, and has ended when this returns, unless the system does
        not let it end (a driver that hangs): that is waited for no longer than `END_DEADLINE_S`.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                nursery.start_soon(self._keep_awake)
                await self._read(on_event)
                # It has closed its stdout, or wrote what it must not: it has little time to end.
                with trio.move_on_after(END_DEADLINE_S):
                    await self._process.wait()
                self.kill()
                status = await self._process.wait()
                nursery.cancel_scope.cancel()
        finally:
            self.kill()
            with trio.move_on_after(END_DEADLINE_S) as deadline:
                deadline.shield = True
                await self._process.wait()
            if self._process.returncode is None:
                log.error("child=%s pid=%d was killed and does not end", self._name, self.pid)
            with trio.CancelScope(shield=True):
                await self._close_pipes()
        return status

    def kill(self) -> None:
        """End it at once, if it still runs."""
        if self._process.returncode is None:
            self.was_killed = True
            self._process.kill()

    def wake(self) -> None:
        """Let it go on, if a signal has stopped it."""
        with contextlib.suppress(psutil.Error):  # it has just ended
            psutil.Process(self.pid).resume()
        self.is_frozen = False

    async def _keep_awake(self) -> None:
        looks = 0
        while True:
            await trio.sleep(LOOK_EVERY_S)  # noqa: TID251 - a period
            self.is_frozen = self._is_stopped()
            looks = looks + 1 if self.is_frozen else 0
            if looks == 1:
                log.warning("child=%s was stopped by a signal from outside", self._name)
            elif looks >= LOOKS_UNTIL_WOKEN:
                log.warning("child=%s woken: `allmende pause` is the way to stop it", self._name)
                self.wake()
                looks = 0

    def _is_stopped(self) -> bool:
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:  # it has just ended
            return False

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
