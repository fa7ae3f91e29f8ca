"""One SQLite file: threads take turns, and a transaction that has ended survives a power cut.

Runs in: agent (stats ledger, record log). Write-ahead log, `synchronous=FULL`, exclusive: the agent
is the only process that opens it, as the folder's lock ensures.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from volunteer.errors import (
    CheckpointCorruptError,
    CheckpointTooNewError,
    StorageFullError,
    StorageReadOnlyError,
)
from volunteer.files import PRIVATE_FILE_MODE, fsync_dir, move_to_quarantine, telling_full_disk

QUARANTINE_NAME = "quarantine"

_T = TypeVar("_T")
_CORRUPT_CODES = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_READ_ONLY_CODES = frozenset(
    {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}
)


class Database:
    """An open database file."""

    def __init__(self, file: Path, *, schema: str, version: int) -> None:
        """Open `file`, or create it in its folder, which must exist.

        Args:
            file: the database; its write-ahead log lies beside it.
            schema: statements that create all tables, harmless where they exist.
            version: of the schema, at least 1.

        Raises:
            CheckpointCorruptError: not a database, or a damaged one.
            CheckpointTooNewError: of a later schema version.
            StorageFullError: the disk is full.

        Cost: reads the whole file once, to check it.
        """
        self._file = file
        self._lock = threading.RLock()
        with _telling_damage(file):
            _create_private(file)
            self._connection = sqlite3.connect(
                file, isolation_level=None, check_same_thread=False, timeout=1.0
            )
        try:
            self._prepare(schema, version)
        except BaseException:
            self._connection.close()
            raise
        fsync_dir(file.parent)

    def run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run `work` in one transaction; return what it returns, once that is on the disk.

        Raises:
            CheckpointCorruptError: the file turned out to be damaged.
            StorageFullError: the disk is full; nothing of the transaction remains.
        """
        with self._lock, _telling_damage(self._file):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(self._connection)
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            return result

    def close(self) -> None:
        """Close the file; a later `run` fails."""
        with self._lock:
            self._connection.close()

    def _prepare(self, schema: str, version: int) -> None:
        with _telling_damage(self._file):
            self._connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=FULL")
            (found,) = self._connection.execute("PRAGMA user_version").fetchone()
            if found > version:
                raise CheckpointTooNewError(
                    f"{self._file}: version {found}, this version of the program reads {version}"
                )
            self._verify_sound()
            self._connection.executescript(
                f"BEGIN IMMEDIATE; {schema}; PRAGMA user_version={version:d}; COMMIT"
            )

    def _verify_sound(self) -> None:
        """Check the file, quickly; what that finds must be found thoroughly as well.

        SQLite 3.40's quick check takes every row of a table `WITHOUT ROWID` whose key is in another
        order than its columns for damage ("NULL value in ...").
        """
        for check in ("quick_check(1)", "integrity_check(1)"):
            (verdict,) = self._connection.execute(f"PRAGMA {check}").fetchone()
            if verdict == "ok":
                return
        raise CheckpointCorruptError(f"{self._file}: {verdict}")


def quarantine_database(file: Path) -> Path:
    """Move a damaged database and its write-ahead log to `quarantine/`; return where it is."""
    for beside in _files_beside(file):
        if os.path.lexists(beside):
            move_to_quarantine(beside, file.parent / QUARANTINE_NAME)
    return move_to_quarantine(file, file.parent / QUARANTINE_NAME)


def _files_beside(file: Path) -> list[Path]:
    return [file.with_name(file.name + suffix) for suffix in ("-wal", "-shm")]


def _create_private(file: Path) -> None:
    for beside in _files_beside(file):
        if beside.is_dir():
            raise IsADirectoryError(beside)
    with telling_full_disk(file):
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, PRIVATE_FILE_MODE))


@contextlib.contextmanager
def _telling_damage(file: Path) -> Iterator[None]:
    """Turn SQLite's errors for a damaged file, a full disk and a read-only one into ours."""
    try:
        yield
    except IsADirectoryError as error:
        raise CheckpointCorruptError(f"{file}: a folder is in its place") from error
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            raise StorageFullError(f"no space left to write {file}") from error
        if code in _READ_ONLY_CODES:
            raise StorageReadOnlyError(f"{file} cannot be written: {error}") from error
        if code in _CORRUPT_CODES:
            raise CheckpointCorruptError(f"{file}: {error}") from error
        raise
