"""A control socket with verbs that count, and clients of it."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import trio
from trio.testing import MockClock

from tests.fakes.virtual_time import (
    in_nursery,
    run_virtual,
)
from volunteer.agent.control import (
    Verb,
    serve_control,
)
from volunteer.answers import Status
from volunteer.errors import StorageFullError
from volunteer.messages import (
    ControlReply,
    ControlRequest,
    control_reply_decoder,
    encode_line,
    parse_line,
)


class Agent:
    """Verbs that count."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Mapping[str, Any]]] = []
        self.num_statuses = 0
        self.size = 0

    def verbs(self) -> Mapping[str, Verb]:
        async def echo(args: Mapping[str, Any]) -> object:
            await trio.lowlevel.checkpoint()
            self.calls.append(("echo", args))
            return args

        async def status(args: Mapping[str, Any]) -> object:
            await trio.lowlevel.checkpoint()
            self.num_statuses += 1
            return Status(state="contributing", reason="x" * self.size, resumes_when="")

        async def stop(args: Mapping[str, Any]) -> object:
            await trio.lowlevel.checkpoint()
            self.calls.append(("stop", args))
            return {"stopping": True}

        async def full(args: Mapping[str, Any]) -> object:
            await trio.lowlevel.checkpoint()
            raise StorageFullError("no space left", hint="make some")

        async def broken(args: Mapping[str, Any]) -> object:
            await trio.lowlevel.checkpoint()
            raise sqlite3.OperationalError("disk I/O error")

        return {"echo": echo, "status": status, "stop": stop, "full": full, "broken": broken}


class Client:
    """One connection."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._buffer = bytearray()

    async def line(self) -> ControlReply | None:
        """Read one reply; None at the end of the connection."""
        while b"\n" not in self._buffer:
            try:
                data = await self.stream.receive_some(65536)
            except trio.BrokenResourceError:
                return None
            if not data:
                return None
            self._buffer += data
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return parse_line(line, control_reply_decoder)

    async def ask(self, request: bytes) -> ControlReply | None:
        await self.stream.send_all(request)
        return await self.line()

    async def echo(self, **args: Any) -> None:
        """See that the agent still answers."""
        reply = await self.ask(encode_line(ControlRequest(verb="echo", args=args)))
        assert reply is not None
        assert reply.result == args


Connect = Callable[[], Awaitable[Client]]


def serve(
    socket_file: Path,
    body: Callable[[Connect, MockClock], Awaitable[None]],
    agent: Agent | None = None,
) -> None:
    verbs = (agent or Agent()).verbs()

    clients: list[Client] = []

    async def connect() -> Client:
        clients.append(Client(await trio.open_unix_socket(str(socket_file))))
        return clients[-1]

    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        await nursery.start(serve_control, socket_file, verbs)
        try:
            await body(connect, clock)
        finally:
            for client in clients:
                client.stream.socket.close()

    run_virtual(in_nursery(main))
