"""`allmende service` as a process of its own, with a manager that says yes to everything."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.tui.command_line import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's"),
]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "systemctl").write_text("#!/bin/sh\n")
    (programs / "systemctl").chmod(0o755)
    return {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }


@pytest.mark.skipif(
    not Path(sys.executable).with_name("allmende").is_file(), reason="it is not installed"
)
def test_a_folder_that_cannot_be_made_is_told_in_a_line(
    tmp_path: Path, env: dict[str, str]
) -> None:
    (tmp_path / "config").write_text("in the way")
    refused = run(tmp_path / "home", "service", "install", env=env)
    assert refused.returncode == 1
    assert refused.stderr.endswith(" cannot be written: Not a directory\n")
    assert refused.stderr.count("\n") == 1
    assert run(tmp_path / "home", "service", "status", env=env).returncode == 0
    (tmp_path / "config").unlink()
    done = run(tmp_path / "home", "service", "install", env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "It starts at login: systemd user unit" in done.stdout
    assert list((tmp_path / "config" / "systemd" / "user").glob("*.service"))
