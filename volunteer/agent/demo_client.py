"""One question to another agent over its control socket.

Runs in: demo.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import trio

from volunteer.errors import ControlError, NoAgentError
from volunteer.locations import Locations
from volunteer.messages import (
    MAX_LINE_BYTES,
    ControlRequest,
    control_reply_decoder,
    encode_line,
    parse_line,
)

_T = TypeVar("_T")
DEADLINE_S = 10.0


async def ask(locations: Locations, verb: str, reply_type: type[_T], args: Mapping[str, Any]) -> _T:
    """Ask the agent of `locations` and return its answer.

    Raises:
        NoAgentError: nothing listens there.
        ControlError: it refused, or answered too late or not at all.
    """
    try:
        with trio.fail_after(DEADLINE_S):
            line = await _exchange(locations, encode_line(ControlRequest(verb=verb, args={**args})))
    except (FileNotFoundError, ConnectionError) as error:
        raise NoAgentError from error
    except (trio.TooSlowError, trio.BrokenResourceError) as error:
        raise ControlError(f"the agent did not answer within {DEADLINE_S:.0f} s") from error
    try:
        reply = parse_line(line, control_reply_decoder)
        if reply.fault is None:
            return msgspec.convert(reply.result, reply_type)
    except ValueError as error:
        raise ControlError(f"the agent's answer is not understood: {error}") from error
    raise ControlError(reply.fault.message, hint=reply.fault.hint)


async def _exchange(locations: Locations, request: bytes) -> bytes:
    sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    async with trio.SocketStream(await _connected(sock, locations)) as stream:
        await stream.send_all(request)
        buffer = bytearray()
        while b"\n" not in buffer and len(buffer) <= MAX_LINE_BYTES:
            data = await stream.receive_some(65536)
            if not data:
                break
            buffer += data
    return bytes(buffer)


async def _connected(sock: trio.socket.SocketType, locations: Locations) -> trio.socket.SocketType:
    try:
        await sock.connect(str(locations.control_socket))
    except BaseException:
        sock.close()
        raise
    return sock
