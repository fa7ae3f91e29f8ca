"""Pipes of a child process: hostile lines, stops in their place, a reader that went away."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from volunteer.messages import (
    MAX_LINE_BYTES,
    SaveSnapshot,
    StopTrainer,
    TrainerCommand,
    encode_line,
    trainer_command_decoder,
)
from volunteer.training.child_process import EventWriter, Inbox, read_lines

HOSTILE_LINES = [
    b"\n",
    b"not json\n",
    b"\xff\xfe\x00\n",
    b'{"type":"format_disk"}\n',
    b'{"type":"contribute","base":7,"round_index":0}\n',
    b'{"type":"contribute"}\n',
    b"[" * 100_000 + b"\n",
    b'"' + b"x" * (3 * MAX_LINE_BYTES) + b'"\n',
]


def new_inbox() -> Inbox[TrainerCommand]:
    return Inbox(trainer_command_decoder, StopTrainer())


def commands_of(data: bytes) -> list[TrainerCommand]:
    inbox = new_inbox()
    inbox.read_from(io.BytesIO(data))
    commands = []
    while command := inbox.next_command(should_wait=False):
        commands.append(command)
    return commands


@pytest.mark.parametrize("line", HOSTILE_LINES)
def test_a_hostile_line_is_ignored_and_the_next_one_is_obeyed(
    line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    commands = commands_of(line + encode_line(SaveSnapshot()))
    assert commands == [SaveSnapshot(), StopTrainer()]
    assert "ignored a line" in caplog.text


def test_the_end_of_input_is_a_stop_and_half_a_line_is_nothing() -> None:
    half = encode_line(SaveSnapshot())[:-1]
    assert commands_of(half) == [StopTrainer()]


def test_a_stop_is_seen_at_once_and_obeyed_in_its_place() -> None:
    inbox = new_inbox()
    inbox.put(SaveSnapshot())
    assert not inbox.should_stop()
    inbox.put(StopTrainer())
    assert inbox.should_stop()
    assert inbox.next_command(should_wait=True) == SaveSnapshot()
    assert inbox.next_command(should_wait=True) == StopTrainer()
    assert inbox.next_command(should_wait=False) is None


def test_long_lines_are_cut_without_being_held_in_memory() -> None:
    lines = list(read_lines(io.BytesIO(b"a" * 25 + b"\n" + b"b\n"), 10))
    assert lines == [b"a" * 11, b"b\n"]


def test_a_reader_that_went_away_asks_for_a_stop_once() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    asked: list[bool] = []
    writer = EventWriter(os.fdopen(write_end, "wb", buffering=0), lambda: asked.append(True))
    writer.emit(SaveSnapshot())
    writer.emit(SaveSnapshot())
    assert asked == [True]


# ---------------------------------------------------------------------------- priority

SHOW_PRIORITY = """
import os
from pathlib import Path
from volunteer.training.child_process import yield_to_all_sessions
yield_to_all_sessions(7)
yield_to_all_sessions(2)
file = Path("/proc/self/autogroup")
session = file.read_text() if file.exists() else "none"
print(os.getsid(0) == os.getpid(), os.nice(0), session)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "setsid"), reason="sessions are a matter of POSIX")
def test_a_child_yields_to_other_sessions_too() -> None:
    """Niceness counts within a session alone where Linux shares the CPU among sessions."""
    shown = subprocess.run(
        [sys.executable, "-c", SHOW_PRIORITY],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.split()
    is_leader, niceness, *session = shown
    assert is_leader == "True"
    assert int(niceness) == os.nice(0) + 9
    if Path("/proc/self/autogroup").exists():
        assert session[1:] == ["nice", "2"]
    else:
        assert session == ["none"]
