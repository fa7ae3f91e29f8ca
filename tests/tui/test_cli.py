"""Every verb as a process of its own, against the fake agent."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from tests.fakes.fake_agent import FakeAgent, make_peers, make_stats, make_status
from tests.tui.command_line import run
from tui.cli import LogSource
from volunteer.answers import PeerStatus, Sample, Stats, Status
from volunteer.logs import LOG_SOURCES
from volunteer.messages import MAX_PROMPT_CHARS, ControlFault, ControlReply, encode_line

pytestmark = pytest.mark.slow


VERBS_THAT_NEED_AN_AGENT = [
    "", "status", "stats", "peers", "resume", "sample", "export x"
]  # fmt: skip


@pytest.mark.parametrize("verb", VERBS_THAT_NEED_AN_AGENT)
def test_without_an_agent_the_exit_status_is_3(home: Path, verb: str) -> None:
    result = run(home, *verb.split())
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr == (
        "allmende: No agent is running.\n  hint: start one with `allmende start`\n"
    )


@pytest.mark.parametrize("verb", ["stop", "stop --finish", "pause", "pause --for 2h"])
def test_where_no_agent_runs_there_is_nothing_to_stop(home: Path, verb: str) -> None:
    result = run(home, *verb.split())
    assert (result.returncode, result.stdout) == (3, "")
    named = verb.split()[0]
    assert result.stderr == f"allmende: No agent is running: there is nothing to {named}.\n"


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
        "stats --contributions 0",
        "stats --contributions 1001",
        "stats --since 7",
        "stats --since 7d --days 7",
        "stats --csv rounds.csv --contributions 5",
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


def test_stats_since_a_day_are_asked_for_and_said_so(home: Path, fake: FakeAgent) -> None:
    refused = run(home, "stats", "--since", "7d")
    assert refused.returncode == 1, "an older agent's totals must not pass for a week's"
    assert "older than this program" in refused.stderr
    fake.stats = make_stats(since_utc="2026-11-24T00:00:00Z")
    assert run(home, "stats", "--since", "7d").stdout.startswith("Since 2026-11-24 (UTC)")
    assert fake.requests[-1].args == {"since_s": 7 * 86400.0}
    newest = max(point.applied_utc for point in fake.history)
    fake.stats = make_stats(since_utc=newest)
    assert run(home, "stats", "--since", "7d", "--csv", str(home / "week.csv")).returncode == 0
    with (home / "week.csv").open(encoding="utf-8", newline="") as stream:
        assert {row["applied_utc"] for row in csv.DictReader(stream)} == {newest}


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
    assert paused.stdout.splitlines()[:3] == [
        "Round 12, step 3100, closes in about 5 min 50 s; pausing now keeps your steps but misses"
        " this round.",
        "Paused for 2 h 00 min. `allmende resume` ends the pause.",
        "  2 processes ended within 1.2 s, 7.60 GB of GPU memory are free again.",
    ]
    assert [r.verb for r in fake.requests] == ["status", "pause", "status"], "the cost comes first"
    assert fake.requests[1].args == {"for_s": 7200.0}
    assert msgspec.json.decode(run(home, "pause", "--json").stdout, type=Status).state == "paused"
    assert fake.requests[3].args == {}
    assert run(home, "resume").stdout == "Contributing: Nobody uses this machine.\n"
    resumed = msgspec.json.decode(run(home, "resume", "--json").stdout, type=Status)
    assert resumed == make_status()


def test_a_round_is_finished_before_the_pause(home: Path, fake: FakeAgent) -> None:
    lines = run(home, "pause", "--finish").stdout.splitlines()
    assert lines[:2] == [
        "Round 12, step 3100, closes in about 5 min 50 s.",
        "When round 12 has closed, in about 5 min 50 s, this machine pauses, as you said."
        " `allmende resume` takes that back.",
    ]
    assert "this machine pauses, as you said." in run(home, "status").stdout
    result = run(home, "pause", "--finish", "--for", "1h")
    assert result.returncode == 2
    assert "exclude each other" in result.stderr


def test_where_nothing_is_trained_no_round_is_said_to_close(home: Path, fake: FakeAgent) -> None:
    fake.status = make_status(state="paused", trainer_pid=None)
    lines = run(home, "pause", "--finish").stdout.splitlines()
    assert lines[0] == "Nothing is trained just now: a pause costs nothing."


def test_a_round_is_finished_before_the_stop(home: Path, fake: FakeAgent) -> None:
    assert run(home, "stop", "--finish").stdout.splitlines()[1] == (
        "When round 12 has closed, in about 5 min 50 s, the agent stops, as you said."
        " `allmende resume` takes that back."
    )
    assert fake.requests[1].args == {"finish": True}
    as_json = run(home, "stop", "--finish", "--json").stdout
    assert msgspec.json.decode(as_json, type=Status).stops_then
    again = run(home, "start").stdout.splitlines()
    assert again[0].startswith("An agent runs already")
    assert again[1] == "  It was to stop with this round; now it does not."
    assert not fake.status.stops_then
    assert run(home, "stop").stdout.endswith("`allmende start` starts it again.\n")


def test_a_refusal_is_one_line_with_its_hint_and_status(home: Path, fake: FakeAgent) -> None:
    fake.faults["pause"] = ControlFault(message="not now", hint="later", exit_code=1)
    result = run(home, "pause")
    assert (result.returncode, len(result.stdout.splitlines())) == (1, 1)
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
    assert fake.requests[0].args == {"prompt": "To be, ", "max_tokens": 200, "temperature": 0.7}
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


FAKE_DEMO = """
import sys
from tui import demo
demo.DEMO_COMMAND = (sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(4)")
from tui.cli import main
main()
"""


def test_demo_passes_output_and_exit_status_through(home: Path) -> None:
    result = run(home, "demo", "--minutes", "1.5", "--keep", str(home / "d"), "--json",
                 "--run", "commons", "--round-s", "7.5", code=FAKE_DEMO)  # fmt: skip
    args = ["--volunteers", "3", "--minutes", "1.5", "--run", "commons", "--dir", str(home / "d")]
    args += ["--json", "--round-s", "7.5"]
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
        "config", "lab", "version", "doctor", "setup", "service", "export", "import",
        "publish", "identity",
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


FULL = """
import errno, sys
from tui import cli
class Full:
    fileno = sys.stdout.fileno
    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")
    def flush(self):
        pass
sys.stdout = Full()
cli.main()
"""


def test_a_full_disk_under_what_is_printed_is_told(home: Path) -> None:
    result = run(home, "config", "get", "threads", code=FULL)
    assert result.stderr == "allmende: no space left for what is printed\n"
    assert result.returncode == 1
