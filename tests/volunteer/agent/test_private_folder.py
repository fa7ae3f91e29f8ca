"""A run that reads `private:` says where nothing private is read, and what mends that."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from volunteer.agent.private_folder import NO_TEXT, NOT_SET, NOT_THERE, private_note
from volunteer.config import Config
from volunteer.data.builtin import load_builtin_run
from volunteer.doctor.disk_checks import disk_checks
from volunteer.doctor.facts import AgentFacts
from volunteer.locations import HOME_VARIABLE, Locations

DEMO = load_builtin_run("demo")
PRIVATE = msgspec.structs.replace(
    DEMO, data=msgspec.structs.replace(DEMO.data, sources=("builtin:milton", "private:"))
)


def test_a_run_without_private_text_needs_no_folder() -> None:
    assert private_note(DEMO, "") == ""


def test_what_is_missing_is_told_with_the_command_and_without_the_path(tmp_path: Path) -> None:
    folder = tmp_path / "diary"
    assert private_note(PRIVATE, "") == NOT_SET
    assert private_note(PRIVATE, str(folder)) == NOT_THERE
    folder.mkdir()
    (folder / "picture.png").touch()
    assert private_note(PRIVATE, str(folder)) == NO_TEXT
    for note in (NOT_SET, NOT_THERE, NO_TEXT):
        assert "`allmende config set private_data ~/FOLDER`" in note
        assert "diary" not in note
        assert len(note) < 150, "two lines of a narrow view"
    (folder / "deep").mkdir()
    (folder / "deep" / "Letter.TXT").write_text("dear")
    assert private_note(PRIVATE, str(folder)) == ""


@pytest.mark.parametrize(("private_data", "level"), [("", "note"), ("/nowhere", "wrong")])
def test_the_doctor_says_it_as_well(tmp_path: Path, private_data: str, level: str) -> None:
    locations = Locations.from_environment({HOME_VARIABLE: str(tmp_path)})
    agent = AgentFacts(
        state="contributing",
        reason="",
        resumes_when="",
        is_idle_unknown=False,
        sources=(),
        data_note=private_note(PRIVATE, private_data),
    )
    checks = disk_checks(Config(private_data=private_data), locations, agent)
    (found,) = (check for check in checks if check.name == "private data")
    assert (found.level, found.fix) == (level, "allmende config set private_data ~/FOLDER")
    without = msgspec.structs.replace(agent, data_note="")
    assert "private data" not in {c.name for c in disk_checks(Config(), locations, without)}
