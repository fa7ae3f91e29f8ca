"""The control socket's client: one for the verbs (blocking), one for the view (asyncio).

Runs in: tui and command line. One JSON line a request, one a reply. The agent is another process,
perhaps of another version, so every reply is checked: all that escapes is ControlError.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tui.wording import clean
from volunteer.errors import ControlError, NoAgentError
from volunteer.messages import (
    CONTROL_VERSION,
    MAX_LINE_BYTES,
    ControlReply,
    ControlRequest,
    control_reply_decoder,
    encode_line,
    parse_line,
)

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncGenerator, Mapping

DEADLINE_S = 5.0
# The agent answers from memory within milliseconds; a machine that swaps may take seconds.
CHANGE_DEADLINE_S = 20.0
# Pausing is answered when the trainer and the aggregator are gone: up to 6 s, on a slow disk more.

_T = TypeVar("_T")
_REPLACE_HINT = "stop the agent with `allmende stop`, then start it again"


def parse_reply(line: bytes, reply_type: type[_T], *, any_version: bool = False) -> _T:
    """Return the result that one reply line carries.

    Args:
        line: as it came, newline included.
        reply_type: what the verb answers with.
        any_version: accept an agent of another version (to be able to stop it).

    Raises:
        ControlError: a fault, another version, or not understood.
    """
    try:
        reply = parse_line(line, control_reply_decoder)
    except (ValueError, RecursionError) as error:
        # msgspec says RecursionError to a reply of a thousand brackets.
        raise _not_understood(error) from error
    if reply.version != CONTROL_VERSION and not any_version:
        raise ControlError(
            f"the agent speaks control version {reply.version}, this program {CONTROL_VERSION}",
            hint=_REPLACE_HINT,
        )
    return _result(reply, reply_type)


def _result(reply: ControlReply, reply_type: type[_T]) -> _T:
    if reply.fault is not None:
        fault = reply.fault
        error = ControlError(clean(fault.message), hint=clean(fault.hint))
        error.exit_code = fault.exit_code if fault.exit_code in (1, 2, 3) else 1
        raise error
    try:
        return msgspec.convert(reply.result, reply_type)
    except ValueError as error:
        raise _not_understood(error) from error


def _not_understood(error: Exception) -> ControlError:
    return ControlError(
        f"the agent's answer is not understood: {clean(str(error))}", hint=_REPLACE_HINT
    )


def _no_agent(error: OSError | None = None) -> NoAgentError:
    if isinstance(error, PermissionError):
        return NoAgentError(
            "the agent's control socket may not be opened by this user",
            hint="run this as the user who started the agent",
        )
    return NoAgentError()


def verify_socket(socket_file: Path) -> None:
    """Check that the socket exists and is ours: another user must not play our agent.

    Raises:
        NoAgentError: there is none.
        ControlError: it belongs to another user, or this system has no unix sockets.
    """
    if not hasattr(socket, "AF_UNIX") or not hasattr(os, "getuid"):
        raise ControlError(
            "the control connection is not there yet for Windows",
            hint="Linux and macOS work; under Windows use WSL 2",
        )
    try:
        owner = os.lstat(socket_file).st_uid
    except OSError as error:
        raise _no_agent(error) from error
    if owner not in (os.getuid(), 0) and os.getuid() != 0:
        raise ControlError(
            f"{socket_file} belongs to another user",
            hint="remove it, or set ALLMENDE_HOME to a folder of your own",
        )


class ControlClient:
    """Blocking client with one connection, for the command line."""

    def __init__(self, socket_file: Path, *, deadline_s: float = DEADLINE_S) -> None:
        """Connect to nothing yet.

        Args:
            socket_file: the agent's control socket.
            deadline_s: for each request, from sending it to its whole reply.
        """
        self._socket_file = socket_file
        self._deadline_s = deadline_s
        self._socket: socket.socket | None = None
        self._pending = b""

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def request(
        self,
        verb: str,
        reply_type: type[_T],
        args: Mapping[str, Any] | None = None,
        *,
        any_version: bool = False,
    ) -> _T:
        """Send one request and return what it is answered with.

        Raises:
            NoAgentError: nothing answers at the socket.
            ControlError: refused, too late, or not understood.
        """
        deadline = time.monotonic() + self._deadline_s
        try:
            connection = self._connect()
            connection.settimeout(self._deadline_s)
            connection.sendall(encode_line(ControlRequest(verb=verb, args=dict(args or {}))))
            line = self._read_line(connection, deadline)
        except TimeoutError as error:
            raise ControlError(
                f"the agent has not answered within {self._deadline_s:g} s",
                hint="it may be busy: try again; its log is in `agent.log`",
            ) from error
        except OSError as error:
            raise _no_agent(error) from error
        return parse_reply(line, reply_type, any_version=any_version)

    def wait_closed(self, deadline_s: float) -> None:
        """Wait until the agent closes the connection, which its end does.

        Raises:
            ControlError: it has not within `deadline_s`.
        """
        deadline = time.monotonic() + deadline_s
        try:
            while self._socket is not None and self._receive(self._socket, deadline):
                pass
        except TimeoutError as error:
            raise ControlError(
                f"the agent is still ending after {deadline_s:g} s",
                hint="it saves its work first: look again with `allmende status`",
            ) from error
        except OSError:
            return

    def _connect(self) -> socket.socket:
        if self._socket is None:
            verify_socket(self._socket_file)
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.settimeout(self._deadline_s)
            self._socket.connect(str(self._socket_file))
        return self._socket

    def _read_line(self, connection: socket.socket, deadline: float) -> bytes:
        while b"\n" not in self._pending:
            if len(self._pending) > MAX_LINE_BYTES:
                raise ControlError("the agent's answer is too long", hint=_REPLACE_HINT)
            received = self._receive(connection, deadline)
            if not received:
                raise NoAgentError("the agent closed the connection without an answer")
            self._pending += received
        line, _, self._pending = self._pending.partition(b"\n")
        return line + b"\n"

    @staticmethod
    def _receive(connection: socket.socket, deadline: float) -> bytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0.0:
            raise TimeoutError
        connection.settimeout(left_s)
        return connection.recv(65536)


class AsyncControlClient:
    """Client for the view: one connection, kept open; requests one after the other."""

    def __init__(self, socket_file: Path, *, deadline_s: float = DEADLINE_S) -> None:
        """Connect to nothing yet."""
        self._socket_file = socket_file
        self._deadline_s = deadline_s
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def request(
        self,
        verb: str,
        reply_type: type[_T],
        args: Mapping[str, Any] | None = None,
        *,
        any_version: bool = False,
    ) -> _T:
        """Send one request and return what it is answered with.

        Raises:
            NoAgentError: nothing answers at the socket.
            ControlError: refused, too late, or not understood.

        Cancellation: the connection is closed, so that no late reply is taken for another's.
        """
        import asyncio

        is_answered = False
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._send(verb, args)
                line = await self._read_line()
            is_answered = True
            return parse_reply(line, reply_type, any_version=any_version)
        except TimeoutError as error:
            raise ControlError(f"no answer within {self._deadline_s:g} s") from error
        except OSError as error:
            raise _no_agent(error) from error
        finally:
            if not is_answered:
                self.close()

    async def watch(self, reply_type: type[_T]) -> AsyncGenerator[_T | None, None]:
        """Yield the agent's statuses as they come, and None once for each silence.

        A silence is `deadline_s` without a line. The connection serves nothing else afterwards.

        Raises:
            NoAgentError: nothing answers, or the agent has gone.
            ControlError: refused or not understood.
        """
        try:
            await self._send("watch", None)
            while True:
                line = await self._next_line()
                if line is None:
                    yield None
                    line = await self._read_line()
                yield parse_reply(line, reply_type)
        except OSError as error:
            raise _no_agent(error) from error
        finally:
            self.close()

    async def wait_closed(self) -> None:
        """Wait until the agent closes the connection."""
        try:
            while self._reader is not None and await self._reader.read(65536):
                pass
        except OSError:
            return

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def _send(self, verb: str, args: Mapping[str, Any] | None) -> None:
        import asyncio

        if self._writer is None:
            verify_socket(self._socket_file)
            self._reader, self._writer = await asyncio.open_unix_connection(
                str(self._socket_file), limit=MAX_LINE_BYTES
            )
        self._writer.write(encode_line(ControlRequest(verb=verb, args=dict(args or {}))))
        await self._writer.drain()

    async def _read_line(self) -> bytes:
        assert self._reader is not None
        try:
            line = await self._reader.readline()
        except ValueError as error:
            raise ControlError("the agent's answer is too long", hint=_REPLACE_HINT) from error
        if not line.endswith(b"\n"):
            raise NoAgentError("the agent has gone")
        return line

    async def _next_line(self) -> bytes | None:
        import asyncio

        try:
            # readline takes nothing from the buffer before it has a whole line: no byte is lost.
            async with asyncio.timeout(self._deadline_s):
                return await self._read_line()
        except TimeoutError:
            return None
