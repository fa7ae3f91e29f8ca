"""`allmende status` says how many sequences are trained at a time, while a trainer runs."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from tests.fakes.fake_agent import make_status
from tui.view_state import status_lines
from volunteer.answers import Status
from volunteer.micro_batch import MicroBatch

NOW = datetime(2026, 11, 30, tzinfo=UTC)
FOUND = MicroBatch(sequences=4, context_tokens=128, tried=(8,), note="4 at a time; 8 did not fit")


def rows(status: Status) -> list[str]:
    return [line for line in status_lines(status, NOW) if line.startswith("  At a time")]


def test_the_note_is_shown_while_a_trainer_runs() -> None:
    status = make_status(trainer_pid=7, micro_batch=FOUND)
    assert rows(status) == ["  At a time      4 at a time; 8 did not fit"]
    assert rows(msgspec.structs.replace(status, trainer_pid=None)) == []
    assert rows(msgspec.structs.replace(status, micro_batch=None)) == []


def test_scripts_get_the_numbers() -> None:
    plain = msgspec.to_builtins(make_status(micro_batch=FOUND))["micro_batch"]
    assert (plain["sequences"], plain["tried"]) == (4, (8,))
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(plain)), MicroBatch) == FOUND
