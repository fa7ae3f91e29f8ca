"""What members say to each other besides signed records: heartbeats and the sync exchange.

Runs in: agent. Pure. MessagePack; every message is size-checked before it is parsed, and every list
has a bound. PROTOCOL.md sections 12 and 13 describe these for a second implementation: an unknown
field is a newer minor version's, and is passed over.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from p2p.swarm_types import PROTOCOL_MAJOR
from volunteer.rounds.records import Hash, Height, Name

WIRE_VERSION = PROTOCOL_MAJOR
MAX_HEARTBEAT_BYTES = 4096
MAX_SYNC_BYTES = 1024 * 1024
PAGE_BYTES = 384 * 1024
"""Envelopes in one answer; the rest is asked for again."""
MAX_HAVE = 4096
MAX_WANT = 512

RawId = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Version = Annotated[int, msgspec.Meta(ge=1, le=2**16)]
_Addr = Annotated[str, msgspec.Meta(max_length=200)]


class WireError(ValueError):
    """These bytes are not a message of this version."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """One member's state, gossiped now and then (timing.heartbeat_period_s)."""

    version: _Version = WIRE_VERSION
    run_id: Hash
    module_id: Name
    tip: Hash
    round_index: Height
    state_hash: Hash
    is_contributing: bool
    tokens_per_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
    loss: float | None
    addrs: Annotated[tuple[_Addr, ...], msgspec.Meta(max_length=8)]
    """Where its author listens, so that two peers that know only a third one can meet."""


class SyncRequest(msgspec.Struct, frozen=True, kw_only=True, tag="sync"):
    """Anti-entropy with one neighbour: what I have from `from_height` on."""

    version: _Version = WIRE_VERSION
    run_id: Hash
    module_id: Name
    from_height: Height
    have: Annotated[tuple[RawId, ...], msgspec.Meta(max_length=MAX_HAVE)]
    tip: Hash
    has_closed: bool
    """Whether the round on `tip` is over for me (ROUNDS.md rule 25)."""


class RecordsRequest(msgspec.Struct, frozen=True, kw_only=True, tag="records"):
    """These records, please."""

    version: _Version = WIRE_VERSION
    run_id: Hash
    module_id: Name
    ids: Annotated[tuple[RawId, ...], msgspec.Meta(max_length=MAX_WANT)]


class PushRecords(msgspec.Struct, frozen=True, kw_only=True, tag="push"):
    """Records that you said you want."""

    version: _Version = WIRE_VERSION
    run_id: Hash
    module_id: Name
    envelopes: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_HAVE)]


class SyncReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to each of the three."""

    version: _Version = WIRE_VERSION
    envelopes: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_HAVE)] = ()
    """By height, the lowest first."""
    has_more: bool = False
    want: Annotated[tuple[RawId, ...], msgspec.Meta(max_length=MAX_WANT)] = ()
    tip: Hash | None = None
    has_closed: bool = False


SyncMessage = SyncRequest | RecordsRequest | PushRecords
_M = TypeVar("_M", Heartbeat, SyncMessage, SyncReply)
_heartbeat_decoder = msgspec.msgpack.Decoder(Heartbeat)
_request_decoder: msgspec.msgpack.Decoder[SyncMessage] = msgspec.msgpack.Decoder(SyncMessage)
_reply_decoder = msgspec.msgpack.Decoder(SyncReply)


def parse_heartbeat(data: bytes) -> Heartbeat:
    """Parse a heartbeat.

    Raises:
        WireError: too large, malformed or of another version.
    """
    return _checked(data, _heartbeat_decoder, MAX_HEARTBEAT_BYTES)


def parse_sync_message(data: bytes) -> SyncMessage:
    """Parse one of the three requests; WireError as for `parse_heartbeat`."""
    return _checked(data, _request_decoder, MAX_SYNC_BYTES)


def parse_sync_reply(data: bytes) -> SyncReply:
    """Parse an answer; WireError as for `parse_heartbeat`."""
    return _checked(data, _reply_decoder, MAX_SYNC_BYTES)


def _checked(data: bytes, decoder: msgspec.msgpack.Decoder[_M], most_bytes: int) -> _M:
    if len(data) > most_bytes:
        raise WireError(f"{len(data)} bytes, at most {most_bytes} allowed")
    try:
        message = decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(str(error)) from error
    if message.version != WIRE_VERSION:
        raise WireError(f"version {message.version}; this program speaks {WIRE_VERSION}")
    return message


def encode(message: Heartbeat | SyncMessage | SyncReply) -> bytes:
    """Return the message's bytes."""
    return msgspec.msgpack.encode(message)
