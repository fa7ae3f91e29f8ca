"""Signed records: made, checked, kept on disk, found again by height.

Runs in: agent. The disk half is `record_log`; this adds signatures and an index, and turns bytes
from anywhere into records, hostile until size-checked, parsed and verified, in that order. What
there is no room for (`volunteer/rounds/bounds.py`) is not written, and what was forgotten goes.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import trio

from p2p.identity import Identity, verify_signature
from volunteer.agent.height_index import HeightIndex
from volunteer.agent.record_log import RecordLog
from volunteer.agent.signed_mark import SignedMark
from volunteer.rounds.knowledge import Knowledge
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

log = logging.getLogger(__name__)
MAX_TURNED_AWAY = 4096


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

    def __init__(
        self, log: RecordLog, identity: Identity, known: Knowledge, mark: SignedMark
    ) -> None:
        """Open the book; `load` reads what is on disk.

        Args:
            log: the records on the disk.
            identity: signs own records.
            known: says what there is room for. It draws the seats of newcomers with a salt that is
                made here and never leaves this process.
            mark: told of what is signed before it may be sent.
        """
        self._log = log
        self._identity = identity
        self._known = known
        self._mark = mark
        known.salt = secrets.token_hex(16)
        self._kept = HeightIndex()
        self._being_kept: set[str] = set()
        self._turned_away = HeightIndex()
        """Records lately found no room for: neighbours need not send them again."""
        self._recently: deque[str] = deque()
        self._to_delete: list[str] = []
        """Forgotten, and still on the disk."""
        self._writing = trio.Lock()
        self._told: Counter[str] = Counter()

    def load(self) -> list[SignedRecord]:
        """Return all records in the order in which they came (they were verified then)."""
        records = []
        for data in self._log.all():
            envelope = parse_envelope(data)
            record = parse_body(envelope.body)
            signed = SignedRecord(record_id_of(envelope.body), record, data)
            self._kept.add(signed.record_id, record.round_index)
            records.append(signed)
        return records

    def verify(self, data: bytes) -> SignedRecord:
        """Verify an envelope of this run; RecordError as `verify_envelope`."""
        rules = self._known.rules
        return verify_envelope(data, rules.run_id, rules.module_id)

    def sign(self, record: Record) -> SignedRecord:
        """Sign one of our own."""
        body = encode_body(record)
        signature = self._identity.sign(signed_bytes(body))
        return SignedRecord(record_id_of(body), record, encode_envelope(body, signature))

    async def keep(self, signed: SignedRecord, *, is_own: bool) -> bool:
        """Put a record on disk (fsync) before anything depends on it; return whether it was new.

        A `close` is a hint that nothing depends on: it is not kept. A record of another that there
        is no room for is counted and passed over: who brings it has only forwarded it.

        Raises:
            StorageFullError: the disk is full; the record must not be sent.
        """
        if isinstance(signed.record, Close):
            return True
        self._forget()
        if signed.record_id in self._kept or signed.record_id in self._being_kept:
            return False
        if not is_own:
            problem = self._known.bounds.problem(signed.record_id, signed.record)
            if problem:
                self._turn_away(signed, problem)
                return False
        self._being_kept.add(signed.record_id)
        try:
            async with self._writing:
                await trio.to_thread.run_sync(self._write, signed, is_own)
        finally:
            self._being_kept.discard(signed.record_id)
        self._kept.add(signed.record_id, signed.record.round_index)
        self._turned_away.discard(signed.record_id)
        return True

    def _turn_away(self, signed: SignedRecord, problem: str) -> None:
        self._known.bounds.count(problem)
        self._tell_what_was_turned_away()
        self._note_turned_away(signed.record_id, signed.record.round_index)

    def _note_turned_away(self, record_id: str, height: int) -> None:
        if record_id not in self._turned_away:
            self._turned_away.add(record_id, height)
            self._recently.append(record_id)
            if len(self._recently) > MAX_TURNED_AWAY:
                self._turned_away.discard(self._recently.popleft())

    def _forget(self) -> None:
        """Take out of the index what the member has no room for any more; the disk follows."""
        for record_id in self._known.bounds.take_forgotten():
            if record_id in self._kept:
                self._note_turned_away(record_id, self._kept[record_id])
                self._kept.discard(record_id)
                self._to_delete.append(record_id)

    def _tell_what_was_turned_away(self) -> None:
        """Log each kind the first time, and again when there are ten times as many."""
        for problem, count in self._known.bounds.turned_away.items():
            if count >= 10 * self._told[problem]:
                log.warning("records=%d turned away: %s", count, problem)
                self._told[problem] = count

    def _write(self, signed: SignedRecord, is_own: bool) -> None:
        deleted = tuple(self._to_delete)
        self._log.forget(deleted)
        del self._to_delete[: len(deleted)]
        self._log.append(
            signed.record_id,
            signed.envelope,
            round_index=signed.record.round_index,
            is_own=is_own,
        )
        # Last: a kill before it leaves a record that nobody was sent, and so cannot be missed.
        if is_own:
            self._mark.note(signed.record.round_index)

    def __len__(self) -> int:
        """Count the records that are kept."""
        return len(self._kept)

    def has(self, record_id: str) -> bool:
        """Return whether this record is kept."""
        self._forget()
        return record_id in self._kept

    def was_turned_away(self, record_id: str) -> bool:
        """Return whether there was no room for this record lately."""
        return record_id in self._turned_away

    def height_of(self, record_id: str) -> int:
        """Return the height of a record that is kept."""
        return self._kept[record_id]

    def ids_from(self, height: int) -> Iterator[str]:
        """Yield the ids of records at `height` or above, the highest first."""
        self._forget()
        return self._kept.falling(height)

    def ids_rising_from(self, height: int) -> Iterator[str]:
        """Yield the ids of records at `height` or above, the lowest first."""
        self._forget()
        return self._kept.rising(height)

    def ids_turned_away_from(self, height: int) -> Iterator[str]:
        """Yield the ids of records lately turned away, the highest first."""
        return self._turned_away.falling(height)

    async def page_of(
        self, record_ids: Iterable[str], most_bytes: int
    ) -> tuple[tuple[bytes, ...], bool]:
        """Return the envelopes of those that are kept, in the order given.

        Args:
            record_ids: which; unknown ones are left out.
            most_bytes: where to stop, but for a first envelope that is larger alone.

        Returns:
            The envelopes, and whether some are left.
        """
        wanted = [i for i in record_ids if i in self._kept]
        return await trio.to_thread.run_sync(self._read_page, wanted, most_bytes)

    def _read_page(self, wanted: list[str], most_bytes: int) -> tuple[tuple[bytes, ...], bool]:
        page: list[bytes] = []
        size_bytes = 0
        for record_id in wanted:
            try:
                envelope = self._log.get(record_id)
            except KeyError:
                continue  # forgotten since
            size_bytes += len(envelope)
            if page and size_bytes > most_bytes:
                return tuple(page), True
            page.append(envelope)
        return tuple(page), False
