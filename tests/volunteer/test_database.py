"""One SQLite file: whole transactions, damage told apart from mistakes."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from volunteer.database import Database
from volunteer.errors import CheckpointCorruptError, StorageReadOnlyError

SCHEMA = "CREATE TABLE IF NOT EXISTS numbers (value INTEGER NOT NULL)"


def open_database(file: Path) -> Database:
    return Database(file, schema=SCHEMA, version=1)


def insert(database: Database, value: int | None) -> None:
    database.run(lambda connection: connection.execute("INSERT INTO numbers VALUES (?)", (value,)))


def values(database: Database) -> list[int]:
    rows = database.run(lambda c: c.execute("SELECT value FROM numbers").fetchall())
    return [value for (value,) in rows]


def test_a_failed_transaction_leaves_nothing(tmp_path: Path) -> None:
    database = open_database(tmp_path / "db")
    insert(database, 1)

    def fail_half_way(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO numbers VALUES (2)")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        database.run(fail_half_way)
    assert values(database) == [1]
    database.close()


def test_a_mistake_is_no_damage(tmp_path: Path) -> None:
    database = open_database(tmp_path / "db")
    with pytest.raises(sqlite3.IntegrityError):
        insert(database, None)
    database.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        values(database)


def test_a_check_that_is_mistaken_is_no_damage(tmp_path: Path) -> None:
    """SQLite 3.40's quick check is, about a key in another order than its columns."""
    schema = """CREATE TABLE IF NOT EXISTS pairs (
        one TEXT NOT NULL, other TEXT NOT NULL, PRIMARY KEY (other, one)) WITHOUT ROWID"""
    database = Database(tmp_path / "db", schema=schema, version=1)
    database.run(lambda connection: connection.execute("INSERT INTO pairs VALUES ('a', 'b')"))
    database.close()
    again = Database(tmp_path / "db", schema=schema, version=1)
    rows = again.run(lambda connection: connection.execute("SELECT * FROM pairs").fetchall())
    assert rows == [("a", "b")]
    again.close()


def test_transactions_wait_for_the_disk(tmp_path: Path) -> None:
    database = open_database(tmp_path / "db")
    pragmas = ("journal_mode", "synchronous", "locking_mode")
    found = [
        database.run(lambda c, name=name: c.execute(f"PRAGMA {name}").fetchone()[0])  # type: ignore[misc]
        for name in pragmas
    ]
    assert found == ["wal", 2, "exclusive"]
    database.close()


def test_a_second_process_is_kept_out(tmp_path: Path) -> None:
    database = open_database(tmp_path / "db")
    insert(database, 1)
    other = sqlite3.connect(tmp_path / "db", timeout=0)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("SELECT * FROM numbers")
    other.close()
    database.close()


def test_damage_that_only_the_check_sees_is_told(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "db")
    connection.executescript(
        "CREATE TABLE numbers (value INTEGER); INSERT INTO numbers VALUES (NULL);"
        "PRAGMA writable_schema = ON;"
        "UPDATE sqlite_master SET sql = 'CREATE TABLE numbers (value INTEGER NOT NULL)'"
    )
    connection.close()
    with pytest.raises(CheckpointCorruptError, match="NULL value in numbers"):
        open_database(tmp_path / "db")


def test_a_file_that_can_no_longer_be_written_is_told_so(tmp_path: Path) -> None:
    database = open_database(tmp_path / "db")
    insert(database, 1)
    database.run(lambda c: c.execute("SELECT 1"))
    database._connection.execute("PRAGMA query_only=ON")  # SQLITE_READONLY, as from the system
    with pytest.raises(StorageReadOnlyError, match="cannot be written"):
        insert(database, 2)
    database._connection.execute("PRAGMA query_only=OFF")
    insert(database, 3)
    assert values(database) == [1, 3]
    database.close()
