"""The control socket: how the terminal program talks to the agent.

Runs in: agent. A unix socket of mode 0600, one JSON line a request, one a reply. Whatever comes in,
the answer is a reply or the end of that connection; the agent goes on.
"""

from __future__ import annotations

import logging
import os
import socket
import sqlite3
import stat
import struct
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from p2p.seldom import SeldomLog
from volunteer.agent.handover import Handover
from volunteer.errors import ControlError, VolunteerError
from volunteer.messages import (
    CONTROL_VERSION,
    MAX_LINE_BYTES,
    ControlFault,
    ControlReply,
    ControlRequest,
    control_request_decoder,
    encode_line,
    parse_line,
)

if TYPE_CHECKING:
    from trio_typing import TaskStatus

log = logging.getLogger(__name__)
_refusals = SeldomLog(log)
Verb = Callable[[Mapping[str, Any]], Awaitable[object]]
WATCH_EVERY_S = 1.0
MAX_CLIENTS = 32
SEND_DEADLINE_S = 10.0
"""A client that does not read for so long is cut off."""


async def serve_control(
    socket_file: Path,
    verbs: Mapping[str, Verb],
    on_client: Callable[[int], None] = lambda pid: None,
    handover: Handover | None = None,
    task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `verbs` until cancelled. The single-instance lock is held, so an old socket is stale.

    Args:
        socket_file: where to listen; created with mode 0600, removed at the end.
        verbs: name -> coroutine function that takes the request's arguments; the special verb
            `watch` answers with `status` every second.
        on_client: told a client's process id as it comes, and every second while it watches.
        handover: has the socket of the program before, and gets it for the next one, if there is
            one: then it is not closed, and who connects waits.
        task_status: told once the socket is there.
    """
    handover = handover or Handover()
    listening = handover.take_listener(socket_file) or _listen(socket_file)
    handover.hold(listening)
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
    limiter = trio.CapacityLimiter(MAX_CLIENTS)

    async def serve_one(stream: trio.SocketStream) -> None:
        try:
            limiter.acquire_on_behalf_of_nowait(stream)
        except trio.WouldBlock:
            _refusals.note("client", "too many clients at a time")
            await trio.aclose_forcefully(stream)
            return
        try:
            await _serve_client(stream, verbs, lambda: _note_client(stream, on_client))
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            pass  # the client went away, or does not read
        finally:
            limiter.release_on_behalf_of(stream)
            await trio.aclose_forcefully(stream)

    try:
        async with trio.open_nursery() as nursery:
            task_status.started()
            await trio.serve_listeners(serve_one, [listener], handler_nursery=nursery)
    finally:
        if not handover.is_wanted:
            _unlink(socket_file)
        handover.release()


def _listen(socket_file: Path) -> socket.socket:
    if not hasattr(socket, "AF_UNIX"):
        raise ControlError("this system has no unix sockets", hint="on Windows, use WSL")
    _remove_stale(socket_file)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The umask is the whole process's: nothing else may run while it is narrow.
        old_mask = os.umask(0o177)
        try:
            sock.bind(str(socket_file))
        finally:
            os.umask(old_mask)
        sock.listen(MAX_CLIENTS)
    except OSError as error:
        sock.close()
        raise ControlError(f"cannot listen on {socket_file}: {error}") from error
    return sock


def _remove_stale(socket_file: Path) -> None:
    try:
        is_socket = stat.S_ISSOCK(socket_file.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise ControlError(f"{socket_file} is in the way", hint="move it elsewhere")
    socket_file.unlink()


def _unlink(socket_file: Path) -> None:
    try:
        socket_file.unlink(missing_ok=True)
    except OSError as error:  # the disk has become read-only: the next start takes it away
        log.warning("%s stays behind: %s", socket_file, error.strerror)


def _note_client(stream: trio.SocketStream, on_client: Callable[[int], None]) -> None:
    """Say whose process is at the other end, where the system tells."""
    if hasattr(socket, "SO_PEERCRED"):
        credentials = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, _, _ = struct.unpack("3i", credentials)
        if pid > 0:  # 0: of another process namespace
            on_client(pid)


async def _serve_client(
    stream: trio.SocketStream, verbs: Mapping[str, Verb], note: Callable[[], None]
) -> None:
    note()
    buffer = bytearray()
    while True:
        while b"\n" not in buffer:
            if len(buffer) > MAX_LINE_BYTES:
                _refusals.note("client", "the request is too long")
                await _send(stream, _fault("the request is too long", exit_code=2))
                return
            data = await stream.receive_some(65536)
            if not data:
                return
            buffer += data
        line, _, rest = bytes(buffer).partition(b"\n")
        buffer = bytearray(rest)
        if not await _answer(stream, line, verbs, note):
            return


async def _answer(
    stream: trio.SocketStream, line: bytes, verbs: Mapping[str, Verb], note: Callable[[], None]
) -> bool:
    """Answer one request; return whether to go on with this client."""
    try:
        request = parse_line(line, control_request_decoder)
    except ValueError as error:
        _refusals.note("client", "the request is not understood")
        await _send(stream, _fault(f"the request is not understood: {error}", exit_code=2))
        return True
    if request.version != CONTROL_VERSION and request.verb != "stop":
        _refusals.note("client", "the request is of another control version")
        message = f"this agent speaks control version {CONTROL_VERSION}, not {request.version}"
        await _send(stream, _fault(message, hint="stop the agent and start it again"))
        return True
    if request.verb == "watch":
        await _watch(stream, verbs["status"], note)
        return False
    await _send(stream, await _call(request, verbs))
    return True


async def _call(request: ControlRequest, verbs: Mapping[str, Verb]) -> ControlReply:
    verb = verbs.get(request.verb)
    if verb is None:
        known = ", ".join(sorted([*verbs, "watch"]))
        return _fault(f"unknown verb {request.verb!r}", hint=f"known: {known}", exit_code=2)
    try:
        return ControlReply(result=await verb(request.args))
    except VolunteerError as error:
        return _fault(str(error), hint=error.hint, exit_code=error.exit_code)
    except sqlite3.Error as error:
        # The books cannot be read just now; whoever trains need not end for that.
        log.error("verb=%s failed: %s", request.verb, error)
        return _fault(f"the books cannot be read: {error}", hint="see the agent's log")


async def _watch(stream: trio.SocketStream, status: Verb, note: Callable[[], None]) -> None:
    """Send the status every second until the client goes away."""
    while True:
        note()
        await _send(stream, ControlReply(result=await status({})))
        with trio.move_on_after(WATCH_EVERY_S):
            # Clients say nothing while they watch: any end of the stream is seen at once.
            if not await stream.receive_some(1024):
                return


async def _send(stream: trio.SocketStream, reply: ControlReply) -> None:
    with trio.fail_after(SEND_DEADLINE_S):
        await stream.send_all(encode_line(reply))


def _fault(message: str, *, hint: str = "", exit_code: int = 1) -> ControlReply:
    return ControlReply(fault=ControlFault(message=message, hint=hint, exit_code=exit_code))
