"""Every verb as a process of its own, against the fake agent."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import psutil
import pytest

from tests.fakes.fake_agent import FakeAgent, make_peers, make_stats, make_status, run_in_thread
from tui.cli import LogSource
from volunteer.locations import Locations
from volunteer.logs import LOG_SOURCES
from volunteer.messages import (
    MAX_PROMPT_CHARS,
    ControlFault,
    ControlReply,
    PeerStatus,
    Sample,
    Stats,
    Status,
    encode_line,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FAKE_START = """
import sys
from tui import launch
launch.AGENT_COMMAND = (sys.executable, "-m", "tests.fakes.fake_agent")
from tui.cli import main
main()
"""


def run(
    home: Path,
    *args: str,
    code: str | None = None,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    umask: int = -1,
) -> subprocess.CompletedProcess[str]:
    how = ["-m", "tui.cli"] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, *how, *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), "ALLMENDE_HOME": str(home), **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=cwd,
        umask=umask,
        timeout=60,
        check=False,
    )


@pytest.fixture
def fake(locations: Locations) -> Iterator[FakeAgent]:
    with run_in_thread(locations.control_socket, lambda agent: None) as agent:
        yield agent


@pytest.fixture
def started_home(home: Path) -> Iterator[Path]:
    """A folder whose agent is ended at the end, however the test ends."""
    yield home
    result = run(home, "status", "--json")
    if result.returncode == 0:
        os.kill(msgspec.json.decode(result.stdout, type=Status).agent_pid, signal.SIGKILL)


VERBS_THAT_NEED_AN_AGENT = ["", "status", "stats", "peers", "pause", "resume", "sample", "stop"]


@pytest.mark.parametrize("verb", VERBS_THAT_NEED_AN_AGENT)
def test_without_an_agent_the_exit_status_is_3(home: Path, verb: str) -> None:
    result = run(home, *verb.split())
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr == (
        "allmende: No agent is running.\n  hint: start one with `allmende start`\n"
    )


@pytest.mark.parametrize(
    "args",
    [
        "nonsense",
        "pause --for 2x",
        "pause --for",
        "start --round-s 0",
        "start --round-s nan",
        "start --round-s 86401",
        "start --threads -1",
        "start --nonsense",
        "stats --csv",
        "demo --volunteers 0",
        "demo --minutes 0.9",
        "demo --minutes nan",
        "demo --minutes 1441",
        "demo --verify a --keep b",
        "status extra",
        "logs -n -1",
        "logs --source kernel",
        "sample --max-tokens 0",
        "sample --max-tokens 10001",
        "sample --temperature nan",
        "sample --temperature -1",
        "sample --seed -1",
        "sample two prompts",
    ],
)
def test_bad_usage_is_exit_status_2(home: Path, args: str) -> None:
    result = run(home, *args.split())
    assert (result.returncode, result.stdout) == (2, "")
    assert "Error: " in result.stderr
    assert "Traceback" not in result.stderr


def test_status_in_words_and_as_json(home: Path, fake: FakeAgent) -> None:
    words = run(home, "status")
    assert words.returncode == 0
    assert words.stdout.startswith("Contributing: Nobody uses this machine.\n")
    as_json = run(home, "status", "--json")
    assert msgspec.json.decode(as_json.stdout, type=Status) == fake.status
    assert as_json.stdout.count("\n") == 1


def test_without_a_terminal_the_bare_command_prints_the_status(home: Path, fake: FakeAgent) -> None:
    assert run(home).stdout == run(home, "status").stdout
    assert {request.verb for request in fake.requests} == {"status"}


def test_stats_in_words_as_json_and_as_csv(home: Path, fake: FakeAgent) -> None:
    assert "Confirmed by the swarm   11.9M tokens, as of" in run(home, "stats").stdout
    table = home / "rounds.csv"
    result = run(home, "stats", "--json", "--csv", str(table))
    assert msgspec.json.decode(result.stdout, type=Stats) == make_stats()
    with table.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["round_index"] for row in rows] == [str(p.round_index) for p in fake.history]
    assert rows[5]["held_out_loss"] == ""


def test_a_csv_that_cannot_be_written_is_one_line(home: Path, fake: FakeAgent) -> None:
    del fake
    result = run(home, "stats", "--csv", str(home / "no" / "such.csv"))
    assert result.returncode == 1
    assert "could not be written" in result.stderr
    assert "Traceback" not in result.stderr


def test_peers_in_words_and_as_json(home: Path, fake: FakeAgent) -> None:
    assert run(home, "peers").stdout.splitlines()[1].startswith("…00000000  in   18 ms")
    as_json = run(home, "peers", "--json").stdout
    assert msgspec.json.decode(as_json, type=list[PeerStatus]) == make_peers()
    fake.peers = []
    assert run(home, "peers").stdout.startswith("No peers.")


def test_pause_and_resume(home: Path, fake: FakeAgent) -> None:
    paused = run(home, "pause", "--for", "2h")
    assert paused.stdout.startswith("Paused for 2 h 00 min. `allmende resume` ends the pause.\n")
    assert fake.requests[0].args == {"for_s": 7200.0}
    assert msgspec.json.decode(run(home, "pause", "--json").stdout, type=Status).state == "paused"
    assert fake.requests[2].args == {}
    assert run(home, "resume").stdout == "Contributing: Nobody uses this machine.\n"
    resumed = msgspec.json.decode(run(home, "resume", "--json").stdout, type=Status)
    assert resumed == make_status()


def test_a_refusal_is_one_line_with_its_hint_and_status(home: Path, fake: FakeAgent) -> None:
    fake.faults["pause"] = ControlFault(message="not now", hint="later", exit_code=1)
    result = run(home, "pause")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "allmende: not now\n  hint: later\n"


def test_garbage_from_the_agent_is_no_traceback(home: Path, fake: FakeAgent) -> None:
    fake.raw_replies["status"] = b"\x00\xff garbage\n"
    result = run(home, "status")
    assert result.returncode == 1
    assert "not understood" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_agent_of_another_version_can_still_be_stopped(home: Path, fake: FakeAgent) -> None:
    fake.version = 7
    assert "control version 7" in run(home, "status").stderr
    assert run(home, "stop").returncode == 0


def test_stop_waits_for_the_end(home: Path, fake: FakeAgent) -> None:
    result = run(home, "stop", "--json")
    assert msgspec.json.decode(result.stdout, type=Status).state == "stopped"
    assert fake.requests[-1].verb == "stop"
    assert run(home, "status").returncode == 3


def test_start_runs_the_agent_detached_and_says_how_to_stop_it(started_home: Path) -> None:
    result = run(started_home, "start", "--threads", "2", "--listen", "/ip4/127.0.0.1/tcp/0",
                 "--ignore-idle", code=FAKE_START)  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "allmende stop" in result.stdout
    status = msgspec.json.decode(run(started_home, "status", "--json").stdout, type=Status)
    agent = psutil.Process(status.agent_pid)
    assert agent.cmdline()[3:] == [
        "--listen", "/ip4/127.0.0.1/tcp/0", "--ignore-idle", "--threads", "2",
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

    assert run(started_home, "stop").returncode == 0
    agent.wait(timeout=10)


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
    assert not list((home / "logs").iterdir())


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


SAMPLE = Sample(
    text="\x1b[2Jor not\tto\u202e \ufffd\nbe",
    num_tokens=9,
    state_hash="ab" * 32,
    round_index=4,
    seed=1,
)


def test_sample_in_words_and_as_json(home: Path, fake: FakeAgent) -> None:
    fake.raw_replies["sample"] = encode_line(ControlReply(result=SAMPLE))
    words = run(home, "sample", "To be, ")
    assert (words.returncode, words.stderr) == (0, "")
    assert words.stdout == "To be, \ufffd[2Jor not\tto\ufffd \ufffd\nbe\n"
    assert fake.requests[0].args == {"prompt": "To be, ", "max_tokens": 200, "temperature": 0.8}
    flags = ["--seed", "7", "--temperature", "0", "--max-tokens", "5", "--json"]
    as_json = run(home, "sample", *flags)
    assert msgspec.json.decode(as_json.stdout, type=Sample) == SAMPLE
    assert fake.requests[1].args == {"prompt": "", "max_tokens": 5, "temperature": 0.0, "seed": 7}


def test_a_sample_that_is_refused_says_why(home: Path, fake: FakeAgent) -> None:
    fake.faults["sample"] = ControlFault(message="there are no shared weights yet", hint="wait")
    result = run(home, "sample")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "allmende: there are no shared weights yet\n  hint: wait\n"


@pytest.mark.parametrize("prompt", ["\udcff", "x" * (MAX_PROMPT_CHARS + 1)])
def test_a_prompt_that_cannot_be_asked_is_bad_usage(home: Path, prompt: str) -> None:
    result = run(home, "sample", prompt)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("allmende: the prompt ")


def test_the_logs_that_can_be_named_are_those_that_there_are() -> None:
    assert get_args(LogSource) == LOG_SOURCES


def test_foreground_becomes_the_agent(home: Path) -> None:
    result = run(home, "start", "--foreground", "--device", "xpu:99", code=FAKE_START)
    assert (result.returncode, result.stderr) == (1, "error: no device of that name\n")
    assert not (home / "logs" / "agent.log").exists()


FAKE_DEMO = """
import sys
from tui import demo
demo.DEMO_COMMAND = (sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(4)")
from tui.cli import main
main()
"""


def test_demo_passes_output_and_exit_status_through(home: Path) -> None:
    result = run(home, "demo", "--minutes", "1.5", "--keep", str(home / "d"), "--json",
                 code=FAKE_DEMO)  # fmt: skip
    args = ["--volunteers", "3", "--minutes", "1.5", "--dir", str(home / "d"), "--json"]
    assert (result.returncode, result.stdout) == (4, f"{args}\n")
    result = run(home, "demo", "--verify", str(home / "d"), code=FAKE_DEMO)
    assert (result.returncode, result.stdout) == (4, f"{['--verify', str(home / 'd')]}\n")


def test_demo_without_keep_leaves_nothing(home: Path) -> None:
    result = run(home, "demo", code=FAKE_DEMO, env={"TMPDIR": str(home)})
    assert f"{home}/allmende-demo-" in result.stdout
    assert list(home.iterdir()) == []


def test_demo_does_not_write_into_a_folder_in_use(home: Path) -> None:
    (home / "precious").touch()
    result = run(home, "demo", "--keep", str(home), code=FAKE_DEMO)
    assert (result.returncode, result.stdout) == (1, "")
    assert "holds something already" in result.stderr


def test_version(home: Path) -> None:
    assert run(home, "version").stdout.startswith("allmende ")
    assert set(msgspec.json.decode(run(home, "version", "--json").stdout)) == {"version"}
    assert run(home, "--version").stdout == run(home, "version").stdout


def test_help_lists_exactly_the_verbs_that_work(home: Path) -> None:
    text = run(home, "--help").stdout
    listed = {
        line.split()[0]
        for line in text.split("Commands:")[1].splitlines()
        if line[:2] == "  " and line[2] != " "
    }
    listed.discard("Exit")
    words = " ".join(text.split())
    assert "Without a command it opens the dashboard, and starts contributing" in words
    assert listed == {
        "start", "stop", "pause", "resume", "status", "stats", "peers", "logs", "sample", "demo",
        "version",
    }  # fmt: skip


HEAVY = ("textual", "rich", "psutil", "asyncio", "torch", "numpy", "safetensors", "trio", "libp2p")
STATUS_MODULES = """
import sys
sys.argv = ["allmende", "status"]
from tui.cli import main
try:
    main()
except SystemExit as end:
    assert end.code == 0, end.code
sys.stderr.write(" ".join(sys.modules))
"""


def test_status_imports_nothing_heavy(home: Path, fake: FakeAgent) -> None:
    del fake
    loaded = run(home, code=STATUS_MODULES).stderr.split()
    assert "tui.client" in loaded
    assert not [name for name in HEAVY if name in loaded]


def test_the_view_never_imports_torch_or_the_network(home: Path) -> None:
    code = (
        "import sys, pkgutil, importlib, tui\n"
        "for module in pkgutil.walk_packages(tui.__path__, 'tui.'):\n"
        "    importlib.import_module(module.name)\n"
        "sys.stderr.write(' '.join(sys.modules))"
    )
    loaded = run(home, code=code).stderr.split()
    assert "tui.app" in loaded
    assert "textual.app" in loaded
    assert not [n for n in ("torch", "numpy", "safetensors", "trio", "libp2p") if n in loaded]
