"""Counts bytes by what they are for: the size of every record as it is sent.

Runs in: simulation. An envelope is a record's bytes with a signature of 64 bytes; what the
transport adds (libp2p's frames, acknowledgements, heartbeats) is not in these figures.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from volunteer.rounds.records import Record, encode_body, encode_envelope, record_id_of

ID_BYTES = 34
"""A raw id in MessagePack."""
SYNC_BYTES = 180
"""What else a message of the exchange says: run, module, tip and height."""
_SIGNATURE = bytes(64)


@dataclass(slots=True)
class Traffic:
    """Bytes sent by all members together, and the size of every record."""

    sent_bytes: Counter[str] = field(default_factory=Counter)
    """By kind of record or of message."""
    num_fetched: Counter[str] = field(default_factory=Counter)
    """Blobs and states: how large they are depends on the model, and not on the protocol."""
    _size_of: dict[str, int] = field(default_factory=dict)

    def register(self, record: Record) -> str:
        """Encode a record that is sent for the first time; return its id."""
        body = encode_body(record)
        record_id = record_id_of(body)
        self._size_of[record_id] = len(encode_envelope(body, _SIGNATURE))
        return record_id

    def size_of(self, record_id: str) -> int:
        """Return the size of the record's envelope in bytes."""
        return self._size_of[record_id]

    def note_record(self, record_id: str, record: Record, copies: int) -> None:
        """A record was gossiped `copies` times, from neighbour to neighbour."""
        self.sent_bytes[type(record).__name__.lower()] += copies * self._size_of[record_id]

    def note(self, kind: str, size_bytes: int) -> None:
        """A message of this kind was sent."""
        self.sent_bytes[kind] += size_bytes

    def note_file(self, kind: str) -> None:
        """A file of this kind was fetched."""
        self.num_fetched[kind] += 1
