"""`allmende config`: a process of its own, as one would type it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tui.command_line import run
from volunteer.config import Config
from volunteer.config_edit import edit_settings
from volunteer.errors import VolunteerError

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


def edit(home: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Edit with a Python program in the place of an editor; the file is its last argument."""
    program = home.parent / "editor.py"
    program.write_text(f"import os, pathlib, sys\nfile = pathlib.Path(sys.argv[1])\n{script}\n")
    editor = {"VISUAL": "", "EDITOR": f"'{sys.executable}' '{program}'"}
    return run(home, "config", "edit", env=editor)


def drafts(home: Path) -> list[Path]:
    return list(home.glob("config.draft*"))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def test_an_edit_takes_the_files_place_only_where_it_is_valid(home: Path) -> None:
    file = home / "config.toml"
    looked = edit(home, "assert '# idle_minutes = 5.0' in file.read_text()")
    assert looked.stdout == f"Nothing has changed: {file}\n", looked.stderr
    assert not file.exists()
    assert not drafts(home)
    refused = edit(home, "file.write_text('# mine\\nidle_minutes = -1\\n')")
    assert refused.returncode == 2
    assert "line 2: `idle_minutes` must be" in refused.stderr
    (kept,) = drafts(home)
    assert str(kept) in refused.stderr
    assert not file.exists()
    kept.unlink()
    done = edit(home, "file.write_text('# mine\\nidle_minutes = 7\\n')")
    assert done.stdout == f"Changed: {file}\n", done.stderr
    too_low = edit(home, "file.write_text('disk_max_bytes = 67108864')")
    assert too_low.returncode == 2
    assert "run commons needs" in too_low.stderr
    assert file.read_text() == "# mine\nidle_minutes = 7\n"


@pytest.mark.parametrize("script", ["file.unlink()", "raise SystemExit(3)", "os.kill(0, 9)"])
def test_an_editor_that_leaves_nothing_changes_nothing(home: Path, script: str) -> None:
    file = home / "config.toml"
    file.write_text("threads = 3\n")
    script = script.replace("os.kill(0", "os.kill(os.getpid()")
    refused = edit(home, script)
    assert refused.returncode == 2
    assert "the settings stay as they were" in refused.stderr
    assert file.read_text() == "threads = 3\n"
    assert not drafts(home), "it says nothing that the settings do not"


def test_an_edit_overwrites_nobody_elses_change(home: Path) -> None:
    file = home / "config.toml"
    change = "file.with_name('config.toml').write_text('threads = 3\\n')"
    refused = edit(home, f"{change}; file.write_text('threads = 1\\n')")
    assert refused.returncode == 2
    assert "changed by another program" in refused.stderr
    assert file.read_text() == "threads = 3\n"
    (kept,) = drafts(home)
    assert kept.read_text() == "threads = 1\n"


def test_a_settings_file_elsewhere_stays_there(home: Path) -> None:
    target = home.parent / "dotfiles.toml"
    target.write_text("threads = 3\n")
    (home / "config.toml").symlink_to(target)
    assert edit(home, "file.write_text('threads = 2\\n')").returncode == 0
    assert run(home, "config", "set", "idle_minutes", "7").returncode == 0
    assert (home / "config.toml").is_symlink()
    assert target.read_text() == "threads = 2\nidle_minutes = 7.0\n"


def test_an_editor_may_use_ctrl_c(home: Path) -> None:
    script = "import signal; signal.signal(2, lambda *_: None); os.kill(os.getppid(), 2)"
    done = edit(home, f"{script}; os.kill(os.getpid(), 2); file.write_text('threads = 2\\n')")
    assert done.returncode == 0, done.stderr
    assert (home / "config.toml").read_text() == "threads = 2\n"


def test_who_is_asked_may_correct_the_text(home: Path) -> None:
    file, asked = home / "config.toml", list[str]()

    def asks_again(error: VolunteerError) -> bool:
        asked.append(str(error))
        program.write_text(mend)
        return True

    program, mend = home / "editor.sh", "sed -i s/-1/7/ $1"
    program.write_text("echo 'idle_minutes = -1' > $1")
    environ = {"EDITOR": f"sh {program}"}
    assert edit_settings(file, environ, verify=lambda before, after: None, asks_again=asks_again)
    assert len(asked) == 1
    assert "idle_minutes" in asked[0]
    assert file.read_text() == "idle_minutes = 7\n"
    assert not drafts(home)


def test_an_editor_that_is_none_is_told(home: Path) -> None:
    for editor, said in (("/no/such", "cannot be started"), ("'unclosed", "is no command")):
        missing = run(home, "config", "edit", env={"VISUAL": editor})
        assert missing.returncode == 2
        assert said in missing.stderr
    nowhere = run(home, "config", "edit", env={"VISUAL": "", "EDITOR": "", "PATH": "/nowhere"})
    assert "no editor is known" in nowhere.stderr
    assert not drafts(home)


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = run(tmp_path / "file" / "home", "config", "set", "headless", "true")
    assert refused.returncode == 2
    assert "could not be written" in refused.stderr
