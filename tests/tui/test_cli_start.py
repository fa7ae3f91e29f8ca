"""`allmende start`: what it refuses, what it makes, and what it says when no agent comes up."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.tui.command_line import FAKE_START, run
from tui.launch import AgentOptions
from volunteer.answers import Status

pytestmark = pytest.mark.slow


def test_start_runs_the_agent_detached_and_says_how_to_stop_it(started_home: Path) -> None:
    result = run(started_home, "start", "--threads", "2", "--listen", "/ip4/127.0.0.1/tcp/0",
                 "--ignore-idle", code=FAKE_START)  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "allmende stop" in result.stdout
    status = msgspec.json.decode(run(started_home, "status", "--json").stdout, type=Status)
    agent = psutil.Process(status.agent_pid)
    assert agent.cmdline()[3:] == [
        "--owner-starts", "--listen", "/ip4/127.0.0.1/tcp/0", "--ignore-idle", "--threads", "2",
    ]  # fmt: skip
    assert os.getsid(agent.pid) == agent.pid

    same = run(started_home, "start", "--ignore-idle", "--listen", "/ip4/127.0.0.1/tcp/0",
               "--threads", "2", code=FAKE_START)  # fmt: skip
    assert (same.returncode, same.stdout.split(",")[0]) == (0, "An agent runs already")
    bare = run(started_home, "start", "--json", code=FAKE_START)
    assert bare.returncode == 0
    assert msgspec.json.decode(bare.stdout, type=Status).agent_pid == agent.pid
    other = run(started_home, "start", "--threads", "3", code=FAKE_START)
    assert other.returncode == 1
    assert "not with these flags" in other.stderr
    never = run(started_home, "start", "--device", "gpu9", code=FAKE_START)
    assert "--device must be auto, cpu," in never.stderr, "said before it is stopped for nothing"

    assert run(started_home, "stop").returncode == 0
    agent.wait(timeout=10)


def test_a_run_file_is_passed_on_from_wherever_one_stands() -> None:
    options = AgentOptions(run_file=Path("my run.toml"), round_s=7.5)
    due = ("--run-file", str(Path("my run.toml").absolute()), "--round-s", "7.5")
    assert options.to_argv() == due


PEER = "/p2p/12D3KooWKRyzVWW6ChFjQjK4miCty85Niy48tpPV95XdKu1BcvMA"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--bootstrap", "/ip4/192.0.2.1/tcp/4001"], "--bootstrap must be addresses like"),
        (["--bootstrap", f"192.0.2.1:4001{PEER}"], "--bootstrap must be addresses like"),
        (["--listen", "/ip4/192.0.2.1/udp/1"], "--listen must be addresses like"),
        (["--device", "gpu"], "--device must be auto, cpu,"),
        (["--threads", "9999"], "--threads must be 0 to 1_024, not 9999"),
        (["--device", "gpu", "--foreground"], "--device must be auto, cpu,"),
    ],
)
def test_what_the_agent_would_refuse_is_refused_before(
    home: Path, flags: list[str], message: str
) -> None:
    result = run(home, "start", *flags)
    assert (result.returncode, result.stdout) == (2, "")
    first, hint = result.stderr.splitlines()
    assert first.startswith(f"allmende: {message}")
    assert hint == "  hint: see `allmende start --help`"
    assert not list(home.iterdir())


def test_a_run_file_that_is_not_there_is_refused_before(home: Path) -> None:
    result = run(home, "start", "--run-file", "/nowhere/run.toml")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("allmende: /nowhere/run.toml: No such file or directory\n")
    assert "give the path of a RunSpec that can be read" in result.stderr
    assert not list(home.iterdir())


def test_a_bad_line_of_the_config_is_told_and_a_flag_stands_in_for_it(started_home: Path) -> None:
    (started_home / "config.toml").write_text("threads = -1\n")
    result = run(started_home, "start", code=FAKE_START)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(
        f"allmende: {started_home}/config.toml, line 1: `threads` must be 0 to 1_024, not -1\n"
    )
    assert run(started_home, "start", "--threads", "1", code=FAKE_START).returncode == 0


@pytest.mark.parametrize("flags", [[], ["--foreground"]])
def test_a_home_that_cannot_be_used_is_one_line(home: Path, flags: list[str]) -> None:
    (home / "file").touch()
    result = run(home / "file" / "home", "start", *flags)
    assert (result.returncode, result.stdout) == (2, "")
    first, hint = result.stderr.splitlines()
    assert first.startswith(f"allmende: {home}/file/home")
    assert "cannot be made: a file is in the way" in first
    assert "ALLMENDE_HOME" in hint


def test_all_that_a_start_makes_is_the_owners_alone(started_home: Path) -> None:
    home = started_home / "new" / "home"
    result = run(home, "start", code=FAKE_START, umask=0)
    try:
        assert result.returncode == 0, result.stderr
        modes = {path: path.stat().st_mode & 0o077 for path in (home.parent, home, home / "logs")}
        assert set(modes.values()) == {0}
        assert (home / "logs" / "agent.log").stat().st_mode & 0o777 == 0o600
    finally:
        run(home, "stop")


def test_a_relative_home_is_the_same_for_the_agent(home: Path) -> None:
    result = run(Path("here"), "start", code=FAKE_START, cwd=home)
    try:
        assert result.returncode == 0, result.stderr
        assert (home / "here" / "run" / "control.sock").exists()
        status = msgspec.json.decode(run(home / "here", "status", "--json").stdout, type=Status)
        assert psutil.Process(status.agent_pid).cwd() == "/"
    finally:
        run(home / "here", "stop")


def test_a_failing_start_shows_the_end_of_the_log(home: Path) -> None:
    (home / "logs").mkdir()
    (home / "logs" / "agent.log").write_text("an older line\n")
    result = run(home, "start", "--device", "xpu:99", code=FAKE_START)
    assert result.returncode == 1
    assert "ended at once, with exit status 1; its last words:" in result.stderr
    assert "error: no device of that name" in result.stderr
    assert "an older line" not in result.stderr
    assert str(home / "logs" / "agent.log") in result.stderr


ROTATING_START = """
import sys
from tui import launch
launch.AGENT_COMMAND = (sys.executable, "-c", '''
import logging, os, sys
from pathlib import Path
from volunteer.logs import OwnLogHandler, set_up_log
OwnLogHandler.__init__.__defaults__ = (100,)
sys.stderr.write("before the log is set up\\\\n")
set_up_log(Path(os.environ["ALLMENDE_HOME"], "logs", "agent.log"))
logging.getLogger("volunteer").info("rotated %s", "x" * 60)
sys.exit("the very last words")
''')
from tui.cli import main
main()
"""


def test_a_failing_start_shows_its_last_words_though_the_log_was_rotated(home: Path) -> None:
    (home / "logs").mkdir()
    (home / "logs" / "agent.log").write_text("an older line\n" * 8)
    result = run(home, "start", code=ROTATING_START)
    assert result.returncode == 1
    words = result.stderr.splitlines()
    assert words[1] == "  before the log is set up"
    assert words[2].endswith("INFO volunteer rotated " + "x" * 60)
    assert words[3] == "  the very last words"
    assert "an older line" not in result.stderr
    assert (home / "logs" / "agent.log.1").exists()


def test_foreground_becomes_the_agent(home: Path) -> None:
    result = run(home, "start", "--foreground", "--device", "xpu:99", code=FAKE_START)
    assert (result.returncode, result.stderr) == (1, "error: no device of that name\n")
    assert not (home / "logs" / "agent.log").exists()
