"""`allmende config`: a process of its own, as one would type it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tui.command_line import run
from volunteer.config import Config

pytestmark = pytest.mark.slow


def test_settings_are_read_changed_and_taken_back(tmp_path: Path) -> None:
    assert run(tmp_path, "config", "path").stdout.strip() == str(tmp_path / "config.toml")
    assert run(tmp_path, "config", "get", "idle_minutes").stdout == "5.0\n"
    done = run(tmp_path, "config", "set", "hours", "mon-fri 18:00-08:00", "sat 00:00-24:00")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('hours = ["mon-fri 18:00-08:00", "sat 00:00-24:00"]')
    assert "from now on" in done.stdout
    listed = run(tmp_path, "config", "get").stdout.splitlines()
    assert 'hours = ["mon-fri 18:00-08:00", "sat 00:00-24:00"]  # yours' in listed
    assert "threads = 0" in listed
    values = json.loads(run(tmp_path, "config", "get", "--json").stdout)
    assert values["hours"] == ["mon-fri 18:00-08:00", "sat 00:00-24:00"]
    assert values["idle_minutes"] == Config().idle_minutes
    fixed = run(tmp_path, "config", "set", "threads", "2")
    assert "from the agent's next start on" in fixed.stdout
    assert run(tmp_path, "config", "unset", "hours").returncode == 0
    assert (tmp_path / "config.toml").read_text() == "threads = 2\n"
    assert json.loads(run(tmp_path, "config", "get", "hours", "--json").stdout) == []


def test_what_can_never_work_is_refused_with_the_reason(tmp_path: Path) -> None:
    refused = run(tmp_path, "config", "set", "exclusive_programs", "allmende")
    assert refused.returncode == 2
    assert "it could never run" in refused.stderr
    negative = run(tmp_path, "config", "set", "idle_minutes", "-3")
    assert negative.returncode == 2
    assert "`idle_minutes` must be 0.02 to 1_440, not -3.0" in negative.stderr
    unknown = run(tmp_path, "config", "get", "idle_minuets")
    assert unknown.returncode == 2
    assert "hint: did you mean `idle_minutes`?" in unknown.stderr
    assert not (tmp_path / "config.toml").exists()


def test_a_limit_with_which_no_start_would_succeed_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(bytes(30_000_000))
    refused = run(tmp_path, "config", "set", "disk_max_bytes", "67108864")
    assert refused.returncode == 2
    assert "`disk_max_bytes` is 0.07 GB, run commons needs" in refused.stderr
    assert "its data takes 0.03 GB now" in refused.stderr
    assert not (tmp_path / "config.toml").exists()
    allowed = run(tmp_path, "config", "set", "disk_max_bytes", "4000000000")
    assert allowed.returncode == 0, allowed.stderr


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = run(tmp_path / "file" / "home", "config", "set", "headless", "true")
    assert refused.returncode == 2
    assert "could not be written" in refused.stderr
