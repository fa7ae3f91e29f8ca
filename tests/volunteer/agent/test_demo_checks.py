"""A demo of a run that cannot train says why, and ends."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from p2p.blobstore import blob_id_of_bytes
from volunteer.agent.demo_checks import PATIENCE_S, Hindrance, last_words, verify_can_train
from volunteer.answers import Status
from volunteer.data.builtin import load_builtin_run
from volunteer.errors import RunSpecError, VolunteerError
from volunteer.run import HardwareSpec

DEMO = load_builtin_run("demo")
TOKENIZER = b"{}"
WORDY = msgspec.structs.replace(
    DEMO,
    data=msgspec.structs.replace(DEMO.data, tokenizer=f"json:{blob_id_of_bytes(TOKENIZER)}"),
)


def status(state: str, reason: str = "its data is away") -> Status:
    return Status(state=state, reason=reason, resumes_when="")


def test_the_tokenizer_must_lie_beside_the_file_and_be_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(RunSpecError, match=r"tokenizer\.json is not there"):
        verify_can_train(WORDY, tmp_path, tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"other")
    with pytest.raises(RunSpecError, match="its hash is another"):
        verify_can_train(WORDY, tmp_path, tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER)
    verify_can_train(WORDY, tmp_path, tmp_path)
    verify_can_train(DEMO, None, tmp_path)


def test_a_machine_that_is_too_small_is_told_before_anything_starts(tmp_path: Path) -> None:
    big = msgspec.structs.replace(DEMO, hardware=HardwareSpec(ram_bytes=2**50, disk_bytes=0))
    with pytest.raises(RunSpecError, match="needs at least"):
        verify_can_train(big, None, tmp_path)


def test_what_keeps_all_from_training_is_told_once_and_ends_the_demo_in_time() -> None:
    hindrance = Hindrance()
    assert hindrance.look([status("starting"), status("starting")], 0.0) == ""
    assert hindrance.look([status("waiting"), status("starting")], 1.0) == ""
    told = hindrance.look([status("waiting"), status("waiting")], 2.0)
    assert told == "nobody trains: its data is away"
    assert hindrance.is_told
    assert hindrance.look([status("waiting"), status("waiting")], 3.0) == ""
    assert hindrance.look([status("catching_up"), status("waiting")], 4.0) == ""
    assert hindrance.look([status("starting"), status("waiting")], 2.0 + PATIENCE_S) == ""
    with pytest.raises(VolunteerError, match="cannot train here: its data is away"):
        hindrance.look([status("waiting"), status("waiting")], 2.0 + PATIENCE_S)


def test_who_trains_again_has_all_the_time() -> None:
    hindrance = Hindrance()
    hindrance.look([status("waiting")], 0.0)
    assert hindrance.look([status("contributing")], 20.0) == ""
    assert not hindrance.is_told
    assert hindrance.look([status("waiting")], 40.0) != ""
    assert hindrance.look([status("waiting")], 40.0 + PATIENCE_S - 1.0) == ""


def test_the_last_words_of_a_log_are_without_its_times(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    assert last_words(log) == ""
    log.write_text("10:00 INFO a: begins\n10:01 ERROR a: it needs 8.0 GB\n\n")
    assert last_words(log) == "a: it needs 8.0 GB"
    log.write_text("no time at all\n")
    assert last_words(log) == "no time at all"
