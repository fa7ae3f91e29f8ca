"""What comes from other members as a record: in its one form, or not at all.

Runs in: agent. Pure. PROTOCOL.md section 11.

A record's id is the hash of its bytes, so one content must have one byte form, or its author could
make any number of ids of it. A newer minor version may add fields behind ours, and whole kinds of
records: such a field is passed on with its record and means nothing here, and such a record is
passed on, if its author signed it, and neither kept nor used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from p2p.identity import verify_signature
from volunteer.agent.record_book import SignedRecord, verify_envelope
from volunteer.rounds.records import (
    Hash,
    Height,
    Name,
    Peer,
    Record,
    RecordError,
    encode_body,
    encode_envelope,
    parse_envelope,
    record_id_of,
    signed_bytes,
)

MAX_NEW_FIELDS = 16
MAX_NEW_FIELD_BYTES = 1024
"""All new fields of a record together, names included."""
MAX_NEW_KIND_BYTES = 4096
"""Of a record of an unknown kind: it is passed on unread."""
KNOWN_KINDS = frozenset(str(kind.__struct_config__.tag) for kind in get_args(Record))

_SCALARS = (type(None), bool, int, float, str, bytes)
_PARSE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True, slots=True)
class NewKind:
    """A record of a kind that a newer minor version has; its signature holds."""

    record_id: str
    kind: str
    author: str


class _Kind(msgspec.Struct):
    kind: str


class _Head(msgspec.Struct, forbid_unknown_fields=False):
    """What every record of a new kind begins with, in this order."""

    kind: Name
    run_id: Hash
    module_id: Name
    round_index: Height
    author: Peer


_kind_decoder = msgspec.msgpack.Decoder(_Kind)
_fields_decoder = msgspec.msgpack.Decoder(dict[Name, Any])


def verify_incoming(data: bytes, run_id: str, module_id: str) -> SignedRecord | NewKind:
    """Check what a neighbour sent as a record.

    Raises:
        RecordError: malformed, not in its one form, of another run or module, or not signed by its
            author.
    """
    body = parse_envelope(data).body
    try:
        kind = _kind_decoder.decode(body).kind
    except _PARSE_ERRORS as error:
        raise RecordError(f"malformed record: {error}") from error
    if kind not in KNOWN_KINDS:
        return _verify_new_kind(data, run_id, module_id)
    signed = verify_envelope(data, run_id, module_id)
    verify_one_form(body, signed.record)
    return signed


def verify_one_form(body: bytes, record: Record) -> None:
    """Check that `body` is the one form of `record`, perhaps with new fields behind it.

    Raises:
        RecordError: it is not: another order, longer numbers, a field twice, or new fields that
            are too many, too large, unsorted, or nested.
    """
    known = encode_body(record)
    if body == known:
        return
    num_fields, header = _map_header(body)
    num_known = known[0] & 0x0F
    num_new = num_fields - num_known
    new = body[len(header) + len(known) - 1 :]
    if num_new < 1 or body != header + known[1:] + new:
        raise RecordError("the record is not in its one form")
    if num_new > MAX_NEW_FIELDS or len(new) > MAX_NEW_FIELD_BYTES:
        raise RecordError(f"the record has {num_new} new fields of {len(new)} bytes")
    fields = _verify_fields(_encode_map_header(num_new) + new, skip=0)
    if not fields.keys().isdisjoint(("kind", *record.__struct_fields__)):
        raise RecordError("the record is not in its one form: it has a field twice")


def _verify_new_kind(data: bytes, run_id: str, module_id: str) -> NewKind:
    """Check a record of which nothing is known but how every record begins."""
    envelope = parse_envelope(data)
    body = envelope.body
    if encode_envelope(body, envelope.signature) != data:
        raise RecordError("the envelope is not in its one form")
    if len(body) > MAX_NEW_KIND_BYTES:
        raise RecordError(f"a record of an unknown kind with {len(body)} bytes")
    fields = _verify_fields(body, skip=len(_Head.__struct_fields__))
    if tuple(fields)[: len(_Head.__struct_fields__)] != _Head.__struct_fields__:
        raise RecordError("a record of an unknown kind that does not begin as records do")
    try:
        head = msgspec.convert(fields, _Head)
    except msgspec.ValidationError as error:
        raise RecordError(f"malformed record: {error}") from error
    if (head.run_id, head.module_id) != (run_id, module_id):
        raise RecordError("a record of another run or module")
    if not verify_signature(head.author, signed_bytes(body), envelope.signature):
        raise RecordError("the signature is not its author's")
    return NewKind(record_id_of(body), head.kind, head.author)


def _verify_fields(data: bytes, *, skip: int) -> dict[str, Any]:
    """Parse a flat map in its one form; the names after the first `skip` are sorted."""
    try:
        fields = _fields_decoder.decode(data)
    except _PARSE_ERRORS as error:
        raise RecordError(f"malformed new field: {error}") from error
    if not all(map(_is_flat, fields.values())):
        raise RecordError("a new field holds more than numbers, texts, bytes, and lists of them")
    names = list(fields)[skip:]
    if names != sorted(names) or msgspec.msgpack.encode(fields) != data:
        raise RecordError("the record's new fields are not in their one form")
    return fields


def _is_flat(value: object) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(isinstance(one, _SCALARS) for one in values)


def _map_header(body: bytes) -> tuple[int, bytes]:
    """Return how many fields a map has, and the shortest header that says so."""
    num_fields = body[0] & 0x0F if body[0] & 0xF0 == 0x80 else int.from_bytes(body[1:3], "big")
    return num_fields, _encode_map_header(num_fields)


def _encode_map_header(num_fields: int) -> bytes:
    if num_fields <= 15:
        return bytes([0x80 | num_fields])
    return b"\xde" + num_fields.to_bytes(2, "big")
