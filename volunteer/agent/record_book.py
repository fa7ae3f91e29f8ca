"""Signed records: made, checked, kept on disk, found again by height.

Runs in: agent. The disk half is `record_log`; this adds signatures and an index, and turns bytes
from anywhere into records, hostile until size-checked, parsed and verified, in that order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import trio

from p2p.identity import Identity, verify_signature
from volunteer.agent.record_log import RecordLog
from volunteer.rounds.records import (
    Close,
    Record,
    RecordError,
    author_of,
    encode_body,
    encode_envelope,
    parse_body,
    parse_envelope,
    record_id_of,
    signed_bytes,
)


@dataclass(frozen=True, slots=True)
class SignedRecord:
    """A record whose signature holds, with the bytes that prove it."""

    record_id: str
    record: Record
    envelope: bytes


def verify_envelope(data: bytes, run_id: str, module_id: str) -> SignedRecord:
    """Parse an envelope and check its signature.

    Raises:
        RecordError: malformed, of another run or module, or not signed by its author.
    """
    envelope = parse_envelope(data)
    if encode_envelope(envelope.body, envelope.signature) != data:
        # Else anyone could pass a record on with padding, and everyone would keep that.
        raise RecordError("the envelope is not in its one form")
    record = parse_body(envelope.body)
    if (record.run_id, record.module_id) != (run_id, module_id):
        raise RecordError("a record of another run or module")
    if not verify_signature(author_of(record), signed_bytes(envelope.body), envelope.signature):
        raise RecordError("the signature is not its author's")
    return SignedRecord(record_id_of(envelope.body), record, data)


class RecordBook:
    """The records of one run's module."""

    def __init__(self, log: RecordLog, identity: Identity, run_id: str, module_id: str) -> None:
        """Open the book; `load` reads what is on disk."""
        self._log = log
        self._identity = identity
        self._run_id = run_id
        self._module_id = module_id
        self._height_of: dict[str, int] = {}
        self._being_kept: set[str] = set()

    def load(self) -> list[SignedRecord]:
        """Return all records in the order in which they came (they were verified then)."""
        records = []
        for data in self._log.all():
            envelope = parse_envelope(data)
            record = parse_body(envelope.body)
            signed = SignedRecord(record_id_of(envelope.body), record, data)
            self._height_of[signed.record_id] = record.round_index
            records.append(signed)
        return records

    def verify(self, data: bytes) -> SignedRecord:
        """Verify an envelope of this run; RecordError as `verify_envelope`."""
        return verify_envelope(data, self._run_id, self._module_id)

    def sign(self, record: Record) -> SignedRecord:
        """Sign one of our own."""
        body = encode_body(record)
        signature = self._identity.sign(signed_bytes(body))
        return SignedRecord(record_id_of(body), record, encode_envelope(body, signature))

    async def keep(self, signed: SignedRecord, *, is_own: bool) -> bool:
        """Put a record on disk (fsync) before anything depends on it; return whether it was new.

        A `close` is a hint that nothing depends on: it is not kept.

        Raises:
            StorageFullError: the disk is full; the record must not be sent.
        """
        if isinstance(signed.record, Close):
            return True
        if signed.record_id in self._height_of or signed.record_id in self._being_kept:
            return False
        self._being_kept.add(signed.record_id)
        try:
            await trio.to_thread.run_sync(self._append, signed, is_own)
        finally:
            self._being_kept.discard(signed.record_id)
        self._height_of[signed.record_id] = signed.record.round_index
        return True

    def _append(self, signed: SignedRecord, is_own: bool) -> None:
        self._log.append(
            signed.record_id,
            signed.envelope,
            round_index=signed.record.round_index,
            is_own=is_own,
        )

    def __len__(self) -> int:
        """Count the records that are kept."""
        return len(self._height_of)

    def has(self, record_id: str) -> bool:
        """Return whether this record is kept."""
        return record_id in self._height_of

    def ids_from(self, height: int) -> list[str]:
        """Return the ids of records at `height` or above, the highest first."""
        chosen = [i for i, h in self._height_of.items() if h >= height]
        return sorted(chosen, key=lambda i: -self._height_of[i])

    async def page_of(
        self, record_ids: Iterable[str], most_bytes: int
    ) -> tuple[tuple[bytes, ...], bool]:
        """Return the envelopes of those that are kept, by height, the lowest first.

        Args:
            record_ids: which; unknown ones are left out.
            most_bytes: where to stop, but for a first envelope that is larger alone.

        Returns:
            The envelopes, and whether some are left.
        """
        wanted = sorted(
            (i for i in record_ids if i in self._height_of), key=lambda i: self._height_of[i]
        )
        return await trio.to_thread.run_sync(self._read_page, wanted, most_bytes)

    def _read_page(self, wanted: list[str], most_bytes: int) -> tuple[tuple[bytes, ...], bool]:
        page: list[bytes] = []
        size_bytes = 0
        for record_id in wanted:
            envelope = self._log.get(record_id)
            size_bytes += len(envelope)
            if page and size_bytes > most_bytes:
                return tuple(page), True
            page.append(envelope)
        return tuple(page), False
