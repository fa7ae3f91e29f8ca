"""Frames on a stream: a length, checked before anything is read, then the bytes. Runs in: agent.

PROTOCOL.md section 2. Every decoder here takes hostile bytes and lets only FramingError escape.
Pure: the stream comes in as a function that returns some bytes, or b"" at its end.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from p2p.errors import FramingError, StreamEndedError

ReadSome = Callable[[int], Awaitable[bytes]]
"""Reads at least 1 and at most n bytes; b"" means that the stream ended."""

LENGTH: Final = struct.Struct(">I")
MAX_REASON_BYTES: Final = 200  # a refusal's reason, UTF-8

_BLOB_REQUEST: Final = struct.Struct(">B32sI")
BLOB_REQUEST_BYTES: Final = _BLOB_REQUEST.size

_MANIFEST_SIZE: Final = struct.Struct("<Q")
HASH_BYTES: Final = 32


class Status(IntEnum):
    """The first byte of every answer."""

    OK = 0  # a frame with the response follows
    REFUSED = 1  # a frame with the reason, UTF-8, follows
    BUSY = 2  # as REFUSED, and asking again later may succeed


class BlobOp(IntEnum):
    """What a blob request asks for."""

    MANIFEST = 1  # size and chunk hashes; the index is 0
    CHUNK = 2  # the chunk at the index


@dataclass(frozen=True, slots=True)
class BlobRequest:
    """One request on the blob protocol."""

    op: BlobOp
    blob_id: str
    """64 lower-case hex digits."""
    chunk_index: int
    """From 0."""


def encode_frame(payload: bytes) -> bytes:
    """Put the length, 4 bytes big-endian, before `payload`."""
    return LENGTH.pack(len(payload)) + payload


def parse_length(header: bytes, *, max_bytes: int) -> int:
    """Read a frame's length.

    Raises:
        FramingError: The header is not 4 bytes, or announces more than `max_bytes`.
    """
    if len(header) != LENGTH.size:
        raise FramingError("the stream ended inside a frame's length")
    (length,) = LENGTH.unpack(header)
    if length > max_bytes:
        raise FramingError(f"a frame of {length} bytes where {max_bytes} are allowed")
    return int(length)


async def read_exactly(read_some: ReadSome, num_bytes: int) -> bytes:
    """Read `num_bytes` bytes.

    Raises:
        StreamEndedError: The stream ended first. (A killed sender looks like a clean end:
            LIBP2P.md, fault 7.)
    """
    buffer = bytearray()
    while len(buffer) < num_bytes:
        piece = await read_some(num_bytes - len(buffer))
        if not piece:
            raise StreamEndedError(f"the stream ended after {len(buffer)} of {num_bytes} bytes")
        buffer += piece
    return bytes(buffer)


async def read_frame(read_some: ReadSome, *, max_bytes: int) -> bytes:
    """Read one frame; its length is checked before its body is read.

    Raises:
        FramingError: The frame is larger than `max_bytes`, or the stream ended inside it.
    """
    header = await read_exactly(read_some, LENGTH.size)
    return await read_exactly(read_some, parse_length(header, max_bytes=max_bytes))


def encode_refusal(status: Status, reason: str) -> bytes:
    """Encode a refusal, its reason cut to 200 bytes of UTF-8."""
    text = reason.encode("utf-8", errors="replace")[:MAX_REASON_BYTES]
    return bytes([status]) + encode_frame(text)


async def read_status(read_some: ReadSome) -> Status:
    """Read the status byte of an answer.

    Raises:
        FramingError: The byte is no status, or the stream ended.
    """
    return _parse_status(await read_exactly(read_some, 1))


async def read_answer_head(read_some: ReadSome) -> tuple[Status, bytes]:
    """Read an answer's status and the length of the frame that follows, not yet checked, at once.

    Raises:
        FramingError: The first byte is no status, or the stream ended.
    """
    head = await read_exactly(read_some, 1 + LENGTH.size)
    return _parse_status(head), head[1:]


def _parse_status(head: bytes) -> Status:
    try:
        return Status(head[0])
    except ValueError as error:
        raise FramingError(f"{head[0]} is no status") from error


async def read_reason(read_some: ReadSome) -> str:
    """Read a refusal's reason, made safe to show: printable characters only.

    Raises:
        FramingError: It is longer than 200 bytes, or the stream ended.
    """
    return spoken(await read_frame(read_some, max_bytes=MAX_REASON_BYTES))


def spoken(reason: bytes) -> str:
    """Make a stranger's reason safe to show: printable characters only."""
    text = reason.decode("utf-8", errors="replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def encode_blob_request(request: BlobRequest) -> bytes:
    """Encode a request of the blob protocol, 37 bytes."""
    return _BLOB_REQUEST.pack(request.op, bytes.fromhex(request.blob_id), request.chunk_index)


def parse_blob_request(data: bytes) -> BlobRequest:
    """Read a request of the blob protocol.

    Raises:
        FramingError: It does not have 37 bytes, or asks for something unknown.
    """
    if len(data) != BLOB_REQUEST_BYTES:
        raise FramingError(f"a blob request has {BLOB_REQUEST_BYTES} bytes, not {len(data)}")
    code, raw_id, chunk_index = _BLOB_REQUEST.unpack(data)
    try:
        op = BlobOp(code)
    except ValueError as error:
        raise FramingError(f"{code} is no blob operation") from error
    if op is BlobOp.MANIFEST and chunk_index != 0:
        raise FramingError("a manifest has no chunk index")
    return BlobRequest(op, raw_id.hex(), chunk_index)


def encode_manifest(size_bytes: int, hashes: tuple[bytes, ...]) -> bytes:
    """Encode a blob's size, 8 bytes little-endian, and its chunk hashes, 32 bytes each."""
    return _MANIFEST_SIZE.pack(size_bytes) + b"".join(hashes)


def parse_manifest(data: bytes) -> tuple[int, tuple[bytes, ...]]:
    """Read a blob's size in bytes and its chunk hashes; whether they fit the id is not checked.

    Raises:
        FramingError: It is not 8 bytes and a multiple of 32.
    """
    body = len(data) - _MANIFEST_SIZE.size
    if body < 0 or body % HASH_BYTES:
        raise FramingError(f"a manifest of {len(data)} bytes")
    (size_bytes,) = _MANIFEST_SIZE.unpack_from(data)
    starts = range(_MANIFEST_SIZE.size, len(data), HASH_BYTES)
    return int(size_bytes), tuple(data[start : start + HASH_BYTES] for start in starts)
