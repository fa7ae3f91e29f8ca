"""`allmende doctor` as a process of its own, with and without an agent."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.fakes.fake_agent import FakeAgent
from tests.tui.command_line import run
from tui.doctor import check_lines, verdict
from volunteer.doctor.check import Check, Report, make_report
from volunteer.doctor.facts import AgentFacts, PeerClock, SourceLine
from volunteer.messages import ControlFault, ControlReply, encode_line

pytestmark = pytest.mark.slow

FACTS = AgentFacts(
    state="waiting",
    reason="Nobody can tell.",
    resumes_when="one of them tells",
    is_idle_unknown=True,
    sources=(
        SourceLine(name="X11 :0", is_well=False, value="-", meaning="it cannot tell: refused"),
    ),
    clocks=tuple(PeerClock(peer_id=f"p{n}", ahead_s=7200.0, error_s=0.6) for n in range(3)),
    num_outbound=3,
    listen_addrs=("/ip4/192.168.1.7/tcp/4001",),
)


def report_of(home: Path, *args: str) -> tuple[int, Report]:
    result = run(home, "doctor", *args, "--json")
    assert result.stderr == ""
    return result.returncode, msgspec.json.decode(result.stdout, type=Report)


def answer(agent: FakeAgent, facts: AgentFacts) -> None:
    agent.raw_replies["doctor"] = encode_line(ControlReply(result=facts))


def test_without_an_agent_most_of_it_works(home: Path) -> None:
    config = home / "config.toml"
    config.write_text("disk_min_free_bytes = 67108864\n")
    before = sorted(home.iterdir())
    status, report = report_of(home, "disk")
    assert (status, report.is_well) == (0, True)
    assert {check.area for check in report.checks} == {"disk"}
    status, report = report_of(home, "clock")
    assert "allmende start" in [check.fix for check in report.checks]
    words = run(home, "doctor", "terminal")
    assert words.returncode == 0
    assert words.stdout.startswith("terminal\n  -- streams        redirected: stdin,")
    assert words.stdout.endswith("are good to know.\n")
    assert sorted(home.iterdir()) == before


def test_an_agent_s_own_sensors_and_clocks_are_what_is_told(home: Path, fake: FakeAgent) -> None:
    answer(fake, FACTS)
    status, report = report_of(home, "idle")
    assert status == 1
    assert [(c.name, c.level) for c in report.checks] == [("agent", "wrong"), ("X11 :0", "wrong")]
    assert fake.requests[-1].args == {"clocks": False}
    words = run(home, "doctor", "clock")
    assert words.returncode == 1
    assert "     fix: sudo timedatectl set-ntp true" in words.stdout.splitlines()
    assert "120 min behind" in words.stdout
    assert words.stdout.splitlines()[-1].startswith("1 thing to fix, marked !!")
    assert fake.requests[-1].args == {"clocks": True}
    status, report = report_of(home, "network")
    assert "0 in, 3 out" in [check.value for check in report.checks]


def test_an_agent_that_refuses_is_one_thing_to_fix(home: Path, fake: FakeAgent) -> None:
    fake.faults["doctor"] = ControlFault(message="unknown\x1b[2J verb", hint="update", exit_code=2)
    status, report = report_of(home, "clock")
    assert status == 1
    assert (report.checks[0].name, report.checks[0].meaning) == ("agent", "unknown [2J verb")
    assert report.checks[0].fix == "update"


def test_an_agent_that_does_not_answer_is_not_taken_for_none(home: Path, fake: FakeAgent) -> None:
    fake.faults["doctor"] = ControlFault(message="busy", hint="wait")
    for area in ("network", "clock"):
        status, report = report_of(home, area)
        assert status == 1
        assert "allmende start" not in [check.fix for check in report.checks]
        assert any("does not answer" in check.meaning for check in report.checks)
        assert "listening" not in [check.name for check in report.checks]


def test_settings_that_are_not_valid_are_the_first_thing_to_fix(home: Path) -> None:
    (home / "config.toml").write_text("threads = -1\n")
    status, report = report_of(home, "terminal")
    assert status == 1
    assert (report.checks[0].name, report.checks[0].fix) == ("settings", "allmende config path")
    assert "line 1" in report.checks[0].meaning


def test_an_area_that_there_is_not_is_bad_usage(home: Path) -> None:
    result = run(home, "doctor", "heart")
    assert (result.returncode, result.stdout) == (2, "")


def test_lines_are_folded_but_commands_are_not() -> None:
    check = Check(
        area="gpu", name="PyTorch", level="wrong", value="-", meaning="word " * 40,
        fix="pipx runpip allmende install " + "x" * 90,
    )  # fmt: skip
    *words, fix = check_lines(check, 60)
    assert len(words) > 3
    assert max(map(len, words)) < 60
    assert words[0].startswith("  !! PyTorch        word")
    assert fix == f"     fix: {check.fix}"
    note = msgspec.structs.replace(check, level="note", meaning="evil\x1b[2J\nname", fix="ls")
    assert check_lines(note, 80) == ["  -- PyTorch        evil [2J name", "     try: ls"]
    assert verdict(make_report([note])) == "All is well. 1 marked -- are good to know."
    assert verdict(make_report([check, check])).startswith("2 things to fix")
