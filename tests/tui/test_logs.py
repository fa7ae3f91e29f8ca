"""The logs as they are shown: merged by time, cleaned, followed across rotation and restarts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tui.logs import MAX_SHOWN_CHARS, LogFollower, LogLine, format_line, last_lines, merge
from volunteer.logs import older_log

ROOT = Path(__file__).parents[2]


def stamped(second: int, text: str) -> str:
    return f"2026-11-30 14:03:{second:02d},000 INFO volunteer.agent {text}\n"


def append(file: Path, text: str | bytes) -> None:
    with file.open("ab") as stream:
        stream.write(text if isinstance(text, bytes) else text.encode())


def rotate(file: Path, first: str = "") -> None:
    """Do what the owner of a log does."""
    file.replace(older_log(file))
    append(file, first)


def texts(lines: list[LogLine]) -> list[str]:
    """The messages, without what comes before them."""
    return [line.text.rpartition("volunteer.agent ")[2] for line in lines]


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    return tmp_path / "agent.log"


@pytest.fixture
def follower(log_file: Path) -> Iterator[LogFollower]:
    follower = LogFollower("agent", log_file)
    yield follower
    follower.close()


def test_the_last_lines_of_several_logs_come_by_time(tmp_path: Path) -> None:
    append(tmp_path / "agent.log", stamped(1, "a1") + stamped(4, "a4") + stamped(4, "a4b"))
    append(tmp_path / "trainer.log", stamped(2, "t2") + stamped(3, "t3") + stamped(5, "t5"))
    followers = [LogFollower(name, tmp_path / f"{name}.log") for name in ("agent", "trainer", "no")]
    lines = last_lines(followers, 4, is_following=False)
    assert texts(lines) == ["t3", "a4", "a4b", "t5"]
    assert [line.source for line in lines] == ["trainer", "agent", "agent", "trainer"]
    assert format_line(lines[0], has_source=True) == "trainer     " + stamped(3, "t3").strip()
    assert format_line(lines[0], has_source=False) == stamped(3, "t3").strip()
    for each in followers:
        each.close()


def test_a_traceback_stays_with_its_record(tmp_path: Path) -> None:
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: y\n'
    append(tmp_path / "agent.log", stamped(1, "a1") + stamped(3, "failed") + trace)
    append(tmp_path / "trainer.log", stamped(2, "t2") + stamped(4, "t4"))
    followers = [LogFollower(name, tmp_path / f"{name}.log") for name in ("agent", "trainer")]
    shown = texts(last_lines(followers, 4, is_following=False))
    assert shown == [*trace.splitlines(), "t4"]
    for each in followers:
        each.close()


def test_lines_of_the_older_file_come_first(follower: LogFollower, log_file: Path) -> None:
    append(log_file, stamped(1, "old") + stamped(2, "older end"))
    rotate(log_file, stamped(3, "new"))
    assert texts(follower.last_lines(2)) == ["older end", "new"]
    assert texts(follower.last_lines(99)) == ["old", "older end", "new"]
    assert follower.last_lines(0) == []


def test_no_log_is_no_line(follower: LogFollower) -> None:
    assert follower.last_lines(5) == []
    assert follower.new_lines() == []


def test_what_is_added_is_shown_once_and_when_its_line_ends(
    follower: LogFollower, log_file: Path
) -> None:
    append(log_file, stamped(1, "one") + "half a")
    assert texts(follower.last_lines(9)) == ["one"]
    assert follower.new_lines() == []
    append(log_file, " line\n" + stamped(2, "two"))
    assert texts(follower.new_lines()) == ["half a line", "two"]
    assert follower.new_lines() == []


def test_a_line_without_end_is_shown_where_nobody_waits_for_it(tmp_path: Path) -> None:
    append(tmp_path / "agent.log", stamped(1, "one") + "Killed")
    one = LogFollower("agent", tmp_path / "agent.log")
    assert texts(last_lines([one], 9, is_following=False)) == ["one", "Killed"]
    one.close()


def test_rotation_loses_and_repeats_nothing(follower: LogFollower, log_file: Path) -> None:
    append(log_file, stamped(1, "one"))
    follower.last_lines(9)
    append(log_file, stamped(2, "two"))
    rotate(log_file, stamped(3, "three"))
    assert texts(follower.new_lines()) == ["two", "three"]
    append(log_file, stamped(4, "four"))
    assert texts(follower.new_lines()) == ["four"]


def test_two_rotations_between_two_looks_lose_nothing(
    follower: LogFollower, log_file: Path
) -> None:
    append(log_file, stamped(1, "one"))
    follower.last_lines(9)
    append(log_file, stamped(2, "two"))
    rotate(log_file, stamped(3, "three"))
    rotate(log_file, stamped(4, "four"))
    assert texts(follower.new_lines()) == ["two", "three", "four"]


def test_an_older_file_that_was_there_before_is_not_shown_again(
    follower: LogFollower, log_file: Path
) -> None:
    append(older_log(log_file), stamped(1, "long ago"))
    append(log_file, stamped(2, "two"))
    follower.last_lines(1)
    log_file.unlink()  # the owner tidies up
    append(log_file, stamped(3, "three"))
    assert texts(follower.new_lines()) == ["three"]


def test_a_line_that_a_kill_cut_off_is_not_glued_to_the_next_file(
    follower: LogFollower, log_file: Path
) -> None:
    append(log_file, stamped(1, "one") + "cut o")
    follower.last_lines(9)
    rotate(log_file, stamped(2, "two"))
    assert texts(follower.new_lines()) == ["cut o", "two"]


def test_a_log_that_comes_later_or_is_emptied_is_followed(
    follower: LogFollower, log_file: Path
) -> None:
    assert follower.last_lines(9) == []
    append(log_file, stamped(1, "one"))
    assert texts(follower.new_lines()) == ["one"]
    os.truncate(log_file, 0)
    assert follower.new_lines() == []
    append(log_file, stamped(2, "2"))
    assert texts(follower.new_lines()) == ["2"]


def test_a_terminal_gets_no_control_characters(follower: LogFollower, log_file: Path) -> None:
    append(log_file, stamped(1, "a\x1b]0;title\x07\x9b2J\u202eb") + "\x00" * 9 + "\n")
    append(log_file, b"\xff\xfe broken\n" + b"x" * 10_000 + b"\n")
    shown = [line.text for line in follower.last_lines(9)]
    assert all(c.isprintable() for text in shown for c in text)
    assert shown[0].endswith("a ]0;title  2J b")
    assert max(map(len, shown)) == MAX_SHOWN_CHARS


def test_merging_keeps_each_logs_own_order_when_the_clock_goes_back() -> None:
    one = [LogLine("14:00:05", "agent", "a"), LogLine("14:00:01", "agent", "b")]
    other = [LogLine("14:00:02", "trainer", "c")]
    assert [line.text for line in merge([one, other]) if line.source == "agent"] == ["a", "b"]


# ------------------------------------------------------------------------- the verb itself


def start(home: Path, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tui.cli", "logs", *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), "ALLMENDE_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(home: Path, *args: str) -> tuple[int, str, str]:
    process = start(home, *args)
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


def next_line(stream: IO[str] | None) -> str:
    """The next line; pytest's timeout bounds it."""
    assert stream is not None
    return stream.readline()


@pytest.fixture
def log_dir(home: Path) -> Path:
    folder = home / "logs"
    folder.mkdir()
    return folder


@pytest.mark.slow
def test_logs_needs_no_agent_and_takes_a_source_and_a_number(home: Path, log_dir: Path) -> None:
    append(log_dir / "agent.log", "".join(stamped(2 * i % 60, f"a{i}") for i in range(29)))
    append(log_dir / "aggregator.log", "".join(stamped(2 * i + 1, f"g{i}") for i in range(29)))
    append(log_dir / "sampler.log", stamped(59, "s"))
    status, output, errors = run(home)
    lines = output.splitlines()
    assert (status, errors, len(lines)) == (0, "", 50)
    assert lines[-2:] == [
        "aggregator  " + stamped(57, "g28").strip(),
        "sampler     " + stamped(59, "s").strip(),
    ]
    assert lines[-3].startswith("agent       ")
    assert run(home, "-n", "1", "--source", "agent")[1] == stamped(56, "a28")
    assert run(home, "-n", "0") == (0, "", "")


@pytest.mark.slow
def test_without_any_log_it_says_so(home: Path) -> None:
    status, output, errors = run(home)
    assert (status, output) == (1, "")
    assert errors == (
        f"allmende: no log is in {home}/logs yet\n  hint: start one with `allmende start`\n"
    )


@pytest.mark.slow
@pytest.mark.system
def test_following_goes_on_across_rotation_until_ctrl_c(home: Path, log_dir: Path) -> None:
    log_file = log_dir / "agent.log"
    append(log_file, stamped(1, "one") + stamped(2, "two"))
    process = start(home, "-f", "-n", "1")
    try:
        assert next_line(process.stdout) == "agent       " + stamped(2, "two")
        append(log_file, stamped(3, "three"))
        assert next_line(process.stdout) == "agent       " + stamped(3, "three")
        rotate(log_file, stamped(4, "four"))
        assert next_line(process.stdout) == "agent       " + stamped(4, "four")
        append(log_dir / "trainer.log", stamped(5, "five"))
        assert next_line(process.stdout) == "trainer     " + stamped(5, "five")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
        assert (process.returncode, output, errors) == (0, "", "")
    finally:
        process.kill()
        process.communicate()
