"""A member of a newer version, as PROTOCOL.md section 9 lets it be: more fields, and a new kind.

Every record that it signs has a field that this program does not know, its heartbeats and hello
too, and with each record it gossips one of a kind of its own.
"""

from __future__ import annotations

import msgspec

from p2p.identity import Identity
from p2p.swarm import Swarm
from volunteer.agent.exchange import Exchange
from volunteer.agent.record_book import RecordBook, SignedRecord
from volunteer.agent.wire import Heartbeat
from volunteer.rounds.records import (
    Record,
    author_of,
    encode_body,
    encode_envelope,
    record_id_of,
    signed_bytes,
)

PROTOCOL = (1, 7)
PROGRAM = "allmende 0.7.0"
NEW_KIND = "applause"
NEW_FIELD = "mood"


def sign_newer(record: Record, who: Identity) -> SignedRecord:
    """Sign a record with a field behind those that this program knows."""
    fields = msgspec.msgpack.decode(encode_body(record)) | {NEW_FIELD: "bright"}
    body = msgspec.msgpack.encode(fields)
    return SignedRecord(
        record_id_of(body), record, encode_envelope(body, who.sign(signed_bytes(body)))
    )


def new_kind(record: Record, who: Identity) -> bytes:
    """Return the envelope of a record of a kind that this program does not know."""
    fields = {
        "kind": NEW_KIND,
        "run_id": record.run_id,
        "module_id": record.module_id,
        "round_index": record.round_index,
        "author": author_of(record),
        "loud": True,
    }
    body = msgspec.msgpack.encode(fields)
    return encode_envelope(body, who.sign(signed_bytes(body)))


class NewerBook(RecordBook):
    """Signs newer records."""

    def sign(self, record: Record) -> SignedRecord:
        return sign_newer(record, self._identity)


class NewerExchange(Exchange):
    """Gossips a record of a new kind with each of its own."""

    async def publish(self, signed: SignedRecord) -> None:
        await super().publish(signed)
        applause = new_kind(signed.record, self._book._identity)
        topic = f"allmende/1/{signed.record.run_id}/{signed.record.module_id}/records"
        swarm: Swarm = self._swarm
        await swarm.publish(topic, applause, purpose="records")


class NewerHeartbeat(Heartbeat, frozen=True, kw_only=True):
    """Says more."""

    mood: tuple[str, ...] = ("bright",)
