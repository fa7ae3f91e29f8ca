"""One request, one response, one stream. Runs in: agent. PROTOCOL.md section 3.

request:  frame
response: status byte; then a frame with the response (OK) or with the reason (REFUSED, BUSY)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import trio

from p2p.errors import (
    FramingError,
    MessageTooLargeError,
    RequestRefusedError,
    RequestTimeoutError,
)
from p2p.framing import (
    Status,
    encode_frame,
    encode_refusal,
    read_frame,
    read_reason,
    read_status,
)
from p2p.host import Host
from p2p.peer_stream import PeerStream
from p2p.swarm_types import Tally

MAX_REQUEST_BYTES: Final = 8 << 20
READ_DEADLINE_S: Final = 20.0
RESPOND_DEADLINE_S: Final = 120.0
WRITE_DEADLINE_S: Final = 120.0

Respond = Callable[[str, bytes], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class _Service:
    respond: Respond
    max_request_bytes: int
    purpose: str


class Requests:
    """The protocols that one swarm answers; they outlive the host."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._services: dict[str, _Service] = {}

    def attach(self, host: Host) -> None:
        """Answer every protocol on a new host."""
        for protocol in self._services:
            self._serve_on(host, protocol)

    def serve(
        self,
        host: Host | None,
        protocol: str,
        respond: Respond,
        *,
        max_request_bytes: int,
        purpose: str,
    ) -> None:
        """Answer `protocol` with `respond`, now and on hosts to come."""
        if max_request_bytes > MAX_REQUEST_BYTES:
            raise MessageTooLargeError(f"a request has at most {MAX_REQUEST_BYTES} bytes")
        self._services[protocol] = _Service(respond, max_request_bytes, purpose)
        if host is not None:
            self._serve_on(host, protocol)

    def _serve_on(self, host: Host, protocol: str) -> None:
        async def answer(peer_id: str, stream: PeerStream) -> None:
            await self._answer(self._services[protocol], peer_id, stream)

        host.set_handler(protocol, answer)

    async def _answer(self, service: _Service, peer_id: str, stream: PeerStream) -> None:
        try:
            with trio.fail_after(READ_DEADLINE_S):
                request = await read_frame(stream.read_some, max_bytes=service.max_request_bytes)
        except (FramingError, trio.TooSlowError):
            self._tally.refused_requests += 1
            raise
        self._tally.received[service.purpose] += len(request)
        answer = await self._respond(service, peer_id, request)
        with trio.fail_after(WRITE_DEADLINE_S):
            await stream.write(answer)

    async def _respond(self, service: _Service, peer_id: str, request: bytes) -> bytes:
        """Encode what `respond` answers; an exception of its own is counted and passed on."""
        try:
            with trio.fail_after(RESPOND_DEADLINE_S):
                response = await service.respond(peer_id, request)
        except RequestRefusedError as refusal:
            self._tally.refused_requests += 1
            return encode_refusal(Status.REFUSED, str(refusal))
        except FramingError:
            self._tally.refused_requests += 1
            raise
        except BaseException as error:
            self._tally.failed_handlers += isinstance(error, Exception)
            raise
        self._tally.sent[service.purpose] += len(response)
        return bytes([Status.OK]) + encode_frame(response)

    async def request(
        self,
        host: Host,
        peer_id: str,
        protocol: str,
        payload: bytes,
        *,
        timeout_s: float,
        max_response_bytes: int,
        purpose: str,
    ) -> bytes:
        """Ask a connected peer.

        Raises:
            PeerUnreachableError: There is no connection, or it broke.
            RequestTimeoutError: No whole answer within `timeout_s`.
            RequestRefusedError: The peer said no, does not speak the protocol, or reset the stream.
            FramingError: The answer is malformed or larger than `max_response_bytes`.
        """
        try:
            with trio.fail_after(timeout_s):
                async with host.open_stream(peer_id, protocol, timeout_s=timeout_s) as stream:
                    await stream.write(encode_frame(payload))
                    self._tally.sent[purpose] += len(payload)
                    response = await _read_response(stream, max_response_bytes)
        except trio.TooSlowError as error:
            raise RequestTimeoutError(
                f"peer {peer_id} did not answer within {timeout_s:.3g} s"
            ) from error
        self._tally.received[purpose] += len(response)
        return response


async def _read_response(stream: PeerStream, max_bytes: int) -> bytes:
    try:
        status = await read_status(stream.read_some)
    except FramingError as error:
        if stream.is_connection_up:
            raise
        raise stream.broken() from error
    if status is not Status.OK:
        raise RequestRefusedError(await read_reason(stream.read_some))
    return await read_frame(stream.read_some, max_bytes=max_bytes)
