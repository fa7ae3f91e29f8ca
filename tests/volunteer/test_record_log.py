"""Signed records are on the disk before they are sent, and never replaced silently."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path

import pytest

from tests.fakes.tiny_disk import mounted_tiny_disk
from volunteer.agent import record_log
from volunteer.agent.record_log import RecordLog
from volunteer.errors import CheckpointCorruptError, CheckpointTooNewError, StorageFullError
from volunteer.rounds.records import (
    Leaving,
    RecordError,
    encode_body,
    encode_envelope,
    genesis_id,
    record_id_of,
)

RUN_ID = "a" * 64


def make_record(height: int, author: str = "me") -> tuple[str, bytes]:
    body = encode_body(
        Leaving(
            run_id=RUN_ID,
            module_id="dense",
            round_index=height,
            author=author,
            base=genesis_id(RUN_ID, "dense"),
        )
    )
    return record_id_of(body), encode_envelope(body, b"signature")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "records.sqlite"


def test_records_come_back_in_order_also_after_reopening(file: Path) -> None:
    heights = [3, 1, 2, 1]
    records = [make_record(height, f"peer{n}") for n, height in enumerate(heights)]
    log = RecordLog(file)
    for n, (record_id, envelope) in enumerate(records):
        log.append(record_id, envelope, is_own=n in (1, 2))
        log.append(record_id, envelope, is_own=False, round_index=heights[n])
    for _ in range(2):
        envelopes = [envelope for _, envelope in records]
        assert list(log.all()) == envelopes
        assert log.get(records[2][0]) == envelopes[2]
        with pytest.raises(KeyError):
            log.get("b" * 64)
        log.close()
        log = RecordLog(file)
    log.close()


def test_a_record_once_known_as_our_own_stays_so(file: Path) -> None:
    record_id, envelope = make_record(1)
    log = RecordLog(file)
    for is_own, expected in ((False, 0), (True, 1), (False, 1)):
        log.append(record_id, envelope, is_own=is_own)
        assert log._fetch("SELECT sum(is_own) FROM records", ()) == [(expected,)]
    assert list(log.all()) == [envelope]
    log.close()


def test_what_is_no_record_is_refused(file: Path) -> None:
    log = RecordLog(file)
    with pytest.raises(RecordError):
        log.append("c" * 64, b"noise", is_own=False)
    assert list(log.all()) == []
    log.close()


def test_pages_join_without_gap_or_repetition(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_log, "_PAGE_ROWS", 3)
    records = [make_record(n // 4, f"peer{n}") for n in range(10)]
    log = RecordLog(file)
    for record_id, envelope in records:
        log.append(record_id, envelope, is_own=True)
    assert list(log.all()) == [envelope for _, envelope in records]
    log.close()


def test_facts_are_kept_once_and_in_order(file: Path) -> None:
    log = RecordLog(file)
    facts = [("dropped", "x"), ("verified", "y"), ("dropped", "y")]
    for kind, payload in [*facts, facts[0]]:
        log.note(kind, payload)
    log.close()
    log = RecordLog(file)
    assert log.notes() == tuple(facts)
    log.close()


def test_many_threads_may_append(file: Path) -> None:
    log = RecordLog(file)
    records = [make_record(n) for n in range(16)]

    def append(part: int) -> None:
        for record_id, envelope in records[part::4]:
            log.append(record_id, envelope, is_own=True)
            assert log.get(record_id) == envelope

    threads = [threading.Thread(target=append, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(log.all()) == sorted(envelope for _, envelope in records)
    log.close()


def test_it_is_for_the_owner_alone(file: Path) -> None:
    log = RecordLog(file)
    assert {path.stat().st_mode & 0o777 for path in file.parent.iterdir()} == {0o600}
    log.close()


def filled(file: Path) -> bytes:
    log = RecordLog(file)
    for n in range(12):
        log.append(*make_record(n, "long name " * 12), is_own=True)
    log.close()
    return file.read_bytes()


def test_a_damaged_file_is_told_and_left_alone(file: Path) -> None:
    whole = filled(file)
    for damaged in (b"noise" * 1000, whole[:20000], whole[:4096] + b"\xff" * 8192 + whole[12288:]):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointCorruptError) as caught:
            RecordLog(file)
        assert "quarantine" in caught.value.hint
        assert file.read_bytes() == damaged


def test_a_flipped_bit_in_a_record_is_seen(file: Path) -> None:
    data = bytearray(filled(file))
    position = data.rindex(b"signature") - 20
    data[position] ^= 1
    file.write_bytes(data)
    log = RecordLog(file)
    with pytest.raises(CheckpointCorruptError, match="does not match its id"):
        list(log.all())
    log.close()


def test_bytes_that_are_no_envelope_are_seen(file: Path) -> None:
    log = RecordLog(file)
    log.append("c" * 64, b"noise", is_own=False, round_index=3)
    with pytest.raises(CheckpointCorruptError, match="does not match its id"):
        log.get("c" * 64)
    log.close()


def test_damage_that_shows_while_open_is_told(file: Path) -> None:
    filled(file)
    log = RecordLog(file)
    log._database._connection.execute("PRAGMA shrink_memory")  # forget the pages read so far
    with file.open("r+b") as stream:
        stream.seek(4096)
        stream.write(b"\xff" * 4096 * 8)
    with pytest.raises(CheckpointCorruptError) as caught:
        list(log.all())
    assert "quarantine" in caught.value.hint
    log.close()


@pytest.mark.parametrize("name", ["records.sqlite", "records.sqlite-wal"])
def test_a_folder_in_its_place_is_damage(file: Path, name: str) -> None:
    (file.parent / name).mkdir()
    with pytest.raises(CheckpointCorruptError, match="folder"):
        RecordLog(file)


def test_a_newer_schema_is_told(file: Path) -> None:
    connection = sqlite3.connect(file)
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(CheckpointTooNewError, match="version 2"):
        RecordLog(file)


def test_a_full_disk_is_told_and_keeps_what_was_there(file: Path) -> None:
    log = RecordLog(file)
    log.append(*make_record(0), is_own=True)
    log._database.run(  # a small limit behaves like a full disk
        lambda connection: connection.execute("PRAGMA max_page_count = 1").fetchone()
    )
    num_kept = append_until_full(log, 1)
    assert list(log.all()) == [make_record(n)[1] for n in range(num_kept)]
    log.close()


def append_until_full(log: RecordLog, start: int) -> int:
    """Append records of rising height; return how many there are when no more fit."""
    for n in count(start):
        try:
            log.append(*make_record(n), is_own=True)
        except StorageFullError:
            return n
    raise AssertionError


_APPEND_FOREVER = """
import sys
from itertools import count
from pathlib import Path
from tests.volunteer.test_record_log import make_record
from volunteer.agent.record_log import RecordLog
log = RecordLog(Path(sys.argv[1]))
for n in count():
    log.append(*make_record(n), is_own=True)
    print(n, flush=True)
"""


@pytest.mark.system
def test_kill_9_takes_nothing_that_was_appended(file: Path) -> None:
    command = [sys.executable, "-c", _APPEND_FOREVER, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for _ in range(5):
            child.stdout.readline()
        child.kill()
        last = [4, *map(int, child.stdout.read().split())][-1]
    log = RecordLog(file)
    kept = list(log.all())
    assert kept == [make_record(n)[1] for n in range(len(kept))]
    assert len(kept) in (last + 1, last + 2)
    log.close()


@pytest.mark.system
def test_a_really_full_disk_is_told(tmp_path: Path) -> None:
    with mounted_tiny_disk(tmp_path / "tiny", size_kib=256) as disk:
        log = RecordLog(disk / "records.sqlite")
        num_kept = append_until_full(log, 0)
        assert num_kept > 3
        assert list(log.all()) == [make_record(n)[1] for n in range(num_kept)]
        log.close()
