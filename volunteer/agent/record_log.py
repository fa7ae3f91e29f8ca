"""The signed records of one run's module, and facts about own work, on the disk.

Runs in: agent. SQLite; any thread. One file a module, so run and module are not repeated here.

A vote that is forgotten may be given twice, and that is proof of lying (ROUNDS.md rules 24, 26).
So a record is durable before `append` returns, a damaged file is never replaced silently, and what
this member signed is never taken out. Of others' records, those go that there is no room for.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from volunteer.database import QUARANTINE_NAME, Database
from volunteer.errors import CheckpointCorruptError
from volunteer.rounds.records import (
    RecordError,
    parse_body,
    parse_envelope,
    record_id_of,
)

SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
  number INTEGER PRIMARY KEY,
  record_id TEXT NOT NULL UNIQUE,
  round_index INTEGER NOT NULL,
  is_own INTEGER NOT NULL,
  envelope BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS records_by_height ON records (round_index, number);
CREATE TABLE IF NOT EXISTS notes (
  number INTEGER PRIMARY KEY,
  kind TEXT NOT NULL,
  payload TEXT NOT NULL,
  UNIQUE (kind, payload)
)
"""
_PAGE_ROWS = 512

_T = TypeVar("_T")


class RecordLog:
    """A list of envelopes in the order in which they came, found by id and height."""

    def __init__(self, file: Path) -> None:
        """Open `file`, or create it in its folder, which must exist.

        Raises:
            CheckpointCorruptError: damaged; it stays where it is.
            CheckpointTooNewError: a newer version wrote it.
            StorageFullError: the disk is full.
        """
        self._file = file
        try:
            self._database = Database(file, schema=_SCHEMA, version=SCHEMA_VERSION)
        except CheckpointCorruptError as error:
            raise self._damaged(str(error)) from error

    def append(
        self, record_id: str, envelope: bytes, *, is_own: bool, round_index: int | None = None
    ) -> None:
        """Keep a record; once this returns, a power cut cannot take it. Again changes nothing.

        Args:
            record_id: hash of what is signed.
            envelope: as sent; its signature was verified by the caller.
            is_own: whether this member signed it.
            round_index: the record's height, if the caller has parsed it already.

        Raises:
            StorageFullError: the disk is full; the record is not kept and must not be sent.
            RecordError: `round_index` is left out and the envelope is not a record.
        """
        if round_index is None:
            round_index = parse_body(parse_envelope(envelope).body).round_index
        row = (record_id, round_index, is_own, envelope)
        self._run(
            lambda connection: connection.execute(
                "INSERT INTO records (record_id, round_index, is_own, envelope)"
                " VALUES (?, ?, ?, ?)"
                " ON CONFLICT (record_id) DO UPDATE SET is_own = max(is_own, excluded.is_own)",
                row,
            )
        )

    def forget(self, record_ids: Iterable[str]) -> None:
        """Take records of others out, in one transaction; their pages are used again.

        Own ones stay, and what is not there is passed over.

        Raises:
            StorageFullError: the disk is full; all of them are still there.
        """
        rows = [(record_id,) for record_id in record_ids]
        if rows:
            self._run(
                lambda connection: connection.executemany(
                    "DELETE FROM records WHERE record_id = ? AND is_own = 0", rows
                )
            )

    def all(self) -> Iterator[bytes]:
        """Yield every envelope in the order of the first `append`, checked against its id.

        Raises:
            CheckpointCorruptError: one is damaged.
        """
        query = (
            "SELECT number, record_id, envelope FROM records WHERE number > ?"  # noqa: S608 - a constant
            f" ORDER BY number LIMIT {_PAGE_ROWS}"
        )
        last = -1  # a page at a time, so that a long run fits
        while rows := self._fetch(query, (last,)):
            for number, record_id, envelope in rows:
                yield self._checked(record_id, envelope)
                last = number

    def get(self, record_id: str) -> bytes:
        """Return an envelope.

        Raises:
            KeyError: it is not kept.
            CheckpointCorruptError: it is damaged.
        """
        rows = self._fetch(
            "SELECT record_id, envelope FROM records WHERE record_id = ?", (record_id,)
        )
        if not rows:
            raise KeyError(record_id)
        return self._checked(*rows[0])

    def highest_own(self) -> int | None:
        """Return the greatest height of the records that this member signed; None: it has none."""
        ((height,),) = self._fetch("SELECT max(round_index) FROM records WHERE is_own = 1", ())
        return None if height is None else int(height)

    def note(self, kind: str, payload: str) -> None:
        """Keep a fact that no record states, e.g. work dropped; durable. Again changes nothing.

        Raises:
            StorageFullError: the disk is full; the fact is not kept.
        """
        self._run(
            lambda connection: connection.execute(
                "INSERT INTO notes (kind, payload) VALUES (?, ?) ON CONFLICT DO NOTHING",
                (kind, payload),
            )
        )

    def notes(self) -> tuple[tuple[str, str], ...]:
        """Return all facts as (kind, payload), in the order of the first `note`."""
        rows = self._fetch("SELECT kind, payload FROM notes ORDER BY number", ())
        return tuple((kind, payload) for kind, payload in rows)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _fetch(self, query: str, values: tuple[int | str, ...]) -> list[Any]:
        return self._run(lambda connection: connection.execute(query, values).fetchall())

    def _run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            return self._database.run(work)
        except CheckpointCorruptError as error:
            raise self._damaged(str(error)) from error

    def _checked(self, record_id: str, envelope: bytes) -> bytes:
        try:
            is_same = record_id_of(parse_envelope(envelope).body) == record_id
        except RecordError:
            is_same = False
        if not is_same:
            raise self._damaged(f"{self._file}: record {record_id} does not match its id")
        return envelope

    def _damaged(self, message: str) -> CheckpointCorruptError:
        quarantine_dir = self._file.parent / QUARANTINE_NAME
        return CheckpointCorruptError(
            message,
            hint=f"restore it from a copy; without one, move it and its -wal to {quarantine_dir}"
            " and start again: nothing is signed before the others have said what was",
        )
