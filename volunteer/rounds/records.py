"""The signed records that members exchange, and how they become bytes.

Runs in: agent. Pure.

A record is a frozen struct; its bytes are MessagePack; an envelope carries them with the author's
signature. A record's id is the hash of what is signed, so one id is one content. Records are keyed
by (run_id, module_id, round_index); a dense run has the one module `dense`.

ROUNDS.md rules 1-4. Hostile bytes end in `RecordError`, before anything is kept.
"""

from __future__ import annotations

import itertools
from typing import Annotated, ClassVar

import msgspec
from blake3 import blake3

DENSE_MODULE = "dense"
MAX_ENVELOPE_BYTES = 64 * 1024
"""Gossip carries small messages only (p2p/PROTOCOL.md); a commit of 256 ids is about 17 kB."""
MAX_ROUND_INDEX = 2**40
MAX_TOKENS = 2**50
MAX_LISTED = 256
MAX_CARRIES = 64
MAX_HARMFUL = 32
"""Contributions that one verdict may name: a quarter of a large commit's authors and some more."""
_SIGNING_CONTEXT = b"allmende/record/1\x00"

Hash = Annotated[
    str,
    msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z", description="64 hex digits in lower case"),
]
"""Lower-case hex of a 32-byte blake3 hash: a record id, blob id, run id or state hash."""
Peer = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Name = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}\Z",
        description="at most 64 of a-z, 0-9, `_`, `.` and `-`, a letter or digit first",
    ),
]
Height = Annotated[int, msgspec.Meta(ge=0, le=MAX_ROUND_INDEX)]


class RecordError(ValueError):
    """These bytes are not a record of this version."""


class _Record(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=False
):
    """What every record says about where it belongs."""

    run_id: Hash
    module_id: Name
    round_index: Height
    """Height of the record: of `base` for contribution, close and leaving; its own for a commit."""


class Contribution(_Record, frozen=True, kw_only=True, tag="contribution"):
    """One volunteer's compressed pseudo-gradient, and perhaps its vote (the announcement)."""

    author: Peer
    base: Hash
    """The commit it was made on; the run's genesis id for round 0."""
    vote: bool
    """Whether it also votes for `base` (ROUNDS.md rule 21)."""
    blob_id: Hash
    blob_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**36)]
    codec: Name
    codec_version: Annotated[int, msgspec.Meta(ge=1, le=2**16)]
    tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    """Trained tokens whose work it contains, carried ones included."""
    carries: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=MAX_CARRIES)] = ()
    """The author's own earlier contributions folded in, transitively."""
    content_hash: Hash | msgspec.UnsetType = msgspec.UNSET
    """Of the blob's tensors without its header: equal content is seen in the records alone."""
    harmful: (
        Annotated[tuple[Hash, ...], msgspec.Meta(max_length=MAX_HARMFUL)] | msgspec.UnsetType
    ) = msgspec.UNSET
    """As a scorer of `base`: which of its contributions do harm (scoring.py). Not set: no verdict;
    empty: measured, and none does."""


class Commit(_Record, frozen=True, kw_only=True, tag="commit"):
    """The ordered list of contributions that makes round `round_index` out of its parent."""

    parent: Hash
    rank: Annotated[int, msgspec.Meta(ge=0, le=2**20)]
    proposer: Peer
    contributions: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=MAX_LISTED)]
    """Sorted ids, each once."""
    leaving: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=MAX_LISTED)] = ()
    state_hash: Hash
    """Of the shared state after applying the list (also the blob id of the state file)."""
    marked: (
        Annotated[tuple[Hash, ...], msgspec.Meta(min_length=1, max_length=MAX_LISTED)]
        | msgspec.UnsetType
    ) = msgspec.UNSET
    """Those of `contributions` that this commit's own aggregation finds bad (exclusion.py)."""

    @property
    def marks(self) -> tuple[str, ...]:
        """What `marked` names; usually nothing."""
        return () if self.marked is msgspec.UNSET else self.marked


class Close(_Record, frozen=True, kw_only=True, tag="close"):
    """A hint that the round on `base` is over for its author."""

    author: Peer
    base: Hash


class Leaving(_Record, frozen=True, kw_only=True, tag="leaving"):
    """The author goes away on purpose; nobody need wait for it."""

    author: Peer
    base: Hash


Record = Contribution | Commit | Close | Leaving


class Envelope(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A record's bytes with its author's signature, as sent and as kept."""

    VERSION: ClassVar[int] = 1

    version: int
    body: bytes
    signature: bytes


_record_decoder = msgspec.msgpack.Decoder(Record)
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)


def author_of(record: Record) -> str:
    """Return the peer that must have signed `record`."""
    return record.proposer if isinstance(record, Commit) else record.author


def encode_body(record: Record) -> bytes:
    """Return the bytes of `record` that are signed and hashed."""
    return msgspec.msgpack.encode(record)


def signed_bytes(body: bytes) -> bytes:
    """Return what the signature covers: a context, so that no other signature can be replayed."""
    return _SIGNING_CONTEXT + body


def record_id_of(body: bytes) -> str:
    """Return the record's id: lower-case hex of blake3 over the signed bytes."""
    return blake3(signed_bytes(body)).hexdigest()


def encode_envelope(body: bytes, signature: bytes) -> bytes:
    """Return the envelope's bytes."""
    return msgspec.msgpack.encode(
        Envelope(version=Envelope.VERSION, body=body, signature=signature)
    )


def parse_envelope(data: bytes) -> Envelope:
    """Parse an envelope.

    Raises:
        RecordError: too large, malformed, or of another version.
    """
    if len(data) > MAX_ENVELOPE_BYTES:
        raise RecordError(f"envelope of {len(data)} bytes, at most {MAX_ENVELOPE_BYTES} allowed")
    try:
        envelope = _envelope_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"malformed envelope: {error}") from error
    if envelope.version != Envelope.VERSION:
        raise RecordError(f"record version {envelope.version}, this is {Envelope.VERSION}")
    return envelope


def parse_body(body: bytes) -> Record:
    """Parse a record's bytes and check what one record alone can show.

    Raises:
        RecordError: malformed, out of bounds, or lists that are not sorted sets.
    """
    try:
        record = _record_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"malformed record: {error}") from error
    if isinstance(record, Commit):
        _verify_sorted_set(record.contributions, "contributions")
        _verify_sorted_set(record.leaving, "leaving")
        _verify_sorted_set(record.marks, "marked")
        if not set(record.contributions).issuperset(record.marks):
            raise RecordError("`marked` names a contribution that is not listed")
        if record.round_index == 0:
            raise RecordError("a commit cannot have height 0: that is the genesis")
    elif isinstance(record, Contribution):
        _verify_sorted_set(record.carries, "carries")
        if record.harmful is not msgspec.UNSET:
            _verify_sorted_set(record.harmful, "harmful")
    return record


def _verify_sorted_set(ids: tuple[str, ...], name: str) -> None:
    if any(a >= b for a, b in itertools.pairwise(ids)):
        raise RecordError(f"`{name}` is not sorted, or names one id twice")


def genesis_id(run_id: str, module_id: str) -> str:
    """Return the id that stands for the genesis of a run's module in `base` and `parent`."""
    return blake3(b"allmende/genesis/1\x00" + f"{run_id}/{module_id}".encode()).hexdigest()
