"""A pause outlives the agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from volunteer.agent.kept_pause import KeptWord, keep_pause, read_pause
from volunteer.policy.signals import OwnerPause

NOW_S = 1000.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "pause.json"


def test_without_a_file_there_is_no_pause(file: Path) -> None:
    assert read_pause(file, NOW_S) == KeptWord()


def test_a_pause_without_an_end_stays_until_it_is_taken_back(file: Path) -> None:
    keep_pause(file, OwnerPause(), NOW_S)
    assert read_pause(file, NOW_S) == KeptWord(OwnerPause())
    keep_pause(file, None, NOW_S)
    assert read_pause(file, NOW_S) == KeptWord()
    keep_pause(file, None, NOW_S)


def test_a_timed_pause_ends_by_the_wall_clock(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wall_s = 5e9
    monkeypatch.setattr("volunteer.agent.kept_pause.time.time", lambda: wall_s)
    keep_pause(file, OwnerPause(until_s=NOW_S + 60), NOW_S)
    monkeypatch.setattr("volunteer.agent.kept_pause.time.time", lambda: wall_s + 20)
    # After the restart the agent's clock may have begun anew.
    again = read_pause(file, 3.0).pause
    assert again is not None
    assert again.until_s == pytest.approx(43.0)
    monkeypatch.setattr("volunteer.agent.kept_pause.time.time", lambda: wall_s + 61)
    assert read_pause(file, 3.0) == KeptWord()


def test_a_finish_is_kept_with_its_last_instant(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("volunteer.agent.kept_pause.time.time", lambda: 5e9)
    keep_pause(file, OwnerPause(after_round=413, at_latest_s=NOW_S + 1800), NOW_S)
    again = read_pause(file, 3.0).pause
    assert again is not None
    assert again.after_round == 413
    assert again.at_latest_s == pytest.approx(1803.0)


def test_a_stop_is_kept_until_its_last_instant(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("volunteer.agent.kept_pause.time.time", lambda: 5e9)
    finish = OwnerPause(after_round=413, at_latest_s=NOW_S + 1800)
    keep_pause(file, finish, NOW_S, ends_agent=True)
    assert read_pause(file, NOW_S) == KeptWord(finish, ends_agent=True)
    monkeypatch.setattr("volunteer.agent.kept_pause.time.time", lambda: 5e9 + 1800)
    assert read_pause(file, 3.0) == KeptWord(), "it would have ended by now: no pause is left"


def test_a_file_of_the_first_version_is_read(file: Path) -> None:
    file.write_bytes(b'{"until_unix_s":null}')
    assert read_pause(file, NOW_S) == KeptWord(OwnerPause())


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"until_unix_s": "never"}', b"[" * 9999])
def test_a_damaged_file_rests(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    assert read_pause(file, NOW_S) == KeptWord(OwnerPause())


def test_a_folder_that_is_gone_is_no_crash(tmp_path: Path) -> None:
    keep_pause(tmp_path / "gone" / "pause.json", OwnerPause(), NOW_S)
