"""Clock, network, disk, terminal and idle: what is seen, what it means, and what helps."""

from __future__ import annotations

import dataclasses
import os
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from tui.screens import main as main_screen
from volunteer.config import Config
from volunteer.doctor import disk_checks as disk_module
from volunteer.doctor.check import Check, LookError, make_report, within
from volunteer.doctor.clock_checks import clock_checks, read_synchronized
from volunteer.doctor.disk_checks import disk_checks
from volunteer.doctor.facts import AgentFacts, PeerClock, SourceLine
from volunteer.doctor.idle_checks import agent_decision, idle_checks, look, own_decision
from volunteer.doctor.network_checks import NetworkFacts, network_checks, read_network
from volunteer.doctor.terminal_checks import (
    MIN_COLUMNS,
    MIN_ROWS,
    TerminalFacts,
    terminal_checks,
)
from volunteer.locations import HOME_VARIABLE, Locations
from volunteer.policy.idle import CONTRIBUTE, IdleState, decide
from volunteer.policy.report import SourceReport
from volunteer.policy.sensors.machine import MachineSensors
from volunteer.policy.sensors.places import Places
from volunteer.policy.signals import IdleConfig, InputReading, Signals, SourceFailure

NOW = datetime(2026, 11, 30, 14, 3, 22, tzinfo=UTC)
PEER = "12D3KooWKRyzVWW6ChFjQjK4miCty85Niy48tpPV95XdKu1BcvMA"
AGENT = AgentFacts(
    state="contributing",
    reason="Nobody uses this machine.",
    resumes_when="",
    is_idle_unknown=False,
    sources=(SourceLine(name="X11 :0", is_well=True, value="400 s", meaning="since a key"),),
    listen_addrs=(f"/ip4/192.168.1.7/tcp/4001/p2p/{PEER}", f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"),
    num_inbound=1,
    num_outbound=2,
    dialled_us_by_scope={"global": 3},
)
NETWORK = NetworkFacts(hosts=("192.168.1.7",), unreachable=(), taken=())
FIXED_PORT = Config(listen=("/ip4/0.0.0.0/tcp/4001",))


def named(checks: list[Check], name: str) -> Check:
    (check,) = [check for check in checks if check.name == name]
    return check


# ------------------------------------------------------------------------------------------ clock


def peers_check(*ahead_s: float, error_s: float = 0.6) -> Check:
    clocks = [PeerClock(peer_id=PEER, ahead_s=ahead, error_s=error_s) for ahead in ahead_s]
    agent = msgspec.structs.replace(AGENT, clocks=tuple(clocks))
    return named(clock_checks(agent, NOW, is_synchronized=True), "peers")


@pytest.mark.parametrize(
    ("ahead_s", "level", "words"),
    [
        ((0.3, -0.4, 0.2), "well", "the median of 3 peers"),
        ((4.0, 5.5, 5.0), "well", "the clock is right"),
        ((7.0, 7.0, 7.0), "note", "6 s behind what the median of 3 peers says"),
        ((-90.6, -90.6, -90.6), "wrong", "90 s ahead of what"),
        ((86400.0 * 3,) * 3, "wrong", "3 days behind what"),
        ((2.0**64,) * 5, "wrong", "years behind what"),
        ((4000.0,), "note", "what 1 peer says; so few may be wrong themselves"),
        ((0.1, 0.2, 1e9, 0.0, -1e9), "well", "the median of 5 peers"),
    ],
)
def test_the_clock_is_judged_by_the_median_of_the_peers(
    ahead_s: tuple[float, ...], level: str, words: str
) -> None:
    check = peers_check(*ahead_s)
    assert (check.level, words in check.meaning) == (level, True), check
    assert check.fix == ("sudo timedatectl set-ntp true" if level == "wrong" else "")


def test_a_slow_answer_is_no_wrong_clock() -> None:
    assert peers_check(9.0, 9.0, 9.0, error_s=5.0).level == "well"


def test_without_agent_or_peers_the_clock_is_only_noted() -> None:
    check = named(clock_checks(None, NOW, is_synchronized=None), "peers")
    assert (check.level, check.fix) == ("note", "allmende start")
    assert peers_check().level == "note"


def test_a_clock_of_before_this_version_is_wrong() -> None:
    past = datetime(1970, 1, 1, tzinfo=UTC)
    assert named(clock_checks(None, past, is_synchronized=True), "date").level == "wrong"
    assert named(clock_checks(None, NOW, is_synchronized=True), "date").level == "well"
    levels = [
        named(clock_checks(None, NOW, is_synchronized=told), "synchronized").level
        for told in (True, False, None)
    ]
    assert levels == ["well", "note", "well"]


@pytest.mark.skipif(sys.platform != "linux", reason="adjtimex is Linux's")
def test_the_kernel_is_asked_whether_a_service_sets_the_clock() -> None:
    assert read_synchronized() in (True, False)


# ---------------------------------------------------------------------------------------- network


def test_one_who_was_dialled_from_outside_can_be_reached() -> None:
    checks = network_checks(NETWORK, AGENT, Config())
    assert {check.level for check in checks} == {"well"}
    assert named(checks, "reached").value == "3 from outside"
    assert named(checks, "peers").value == "1 in, 2 out"
    assert named(checks, "listening").value == "port 4001"


@pytest.mark.parametrize(
    ("hosts", "config", "fix"),
    [
        (("192.168.1.7",), FIXED_PORT, "in your router, forward TCP port 4001 to 192.168.1.7"),
        (("192.168.1.7",), Config(), "allmende config set listen /ip4/0.0.0.0/tcp/4001"),
        (("8.8.8.8",), Config(), "sudo ufw allow 4001/tcp"),
        (
            ("192.168.1.7", "2600::1"),
            FIXED_PORT,
            "in your router, forward TCP port 4001 to 192.168.1.7",
        ),
        (("100.64.3.4",), FIXED_PORT, ""),
    ],
)
def test_who_was_not_dialled_from_outside_is_told_what_lets_others_in(
    hosts: tuple[str, ...], config: Config, fix: str
) -> None:
    agent = msgspec.structs.replace(AGENT, dialled_us_by_scope={"private": 2, "loopback": 1})
    facts = dataclasses.replace(NETWORK, hosts=hosts)
    check = named(network_checks(facts, agent, config), "reached")
    assert (check.level, check.value, check.fix) == ("note", "2 from this network", fix)


def test_what_is_wrong_with_the_network_is_said() -> None:
    facts = NetworkFacts(hosts=(), unreachable=(("/ip4/192.0.2.1/tcp/1/p2p/x", "refused"),),
                         taken=(("/ip4/0.0.0.0/tcp/4001", "in use"),))  # fmt: skip
    addr = f"/ip4/192.0.2.1/tcp/1/p2p/{PEER}"
    facts = dataclasses.replace(facts, unreachable=((addr, "refused"),))
    checks = network_checks(facts, None, Config(bootstrap=(addr,)))
    wrong = {check.name: check for check in checks if check.level == "wrong"}
    assert set(wrong) == {"addresses", "listening", "bootstrap"}
    assert "in use" in wrong["listening"].meaning
    assert wrong["bootstrap"].fix == "allmende config unset bootstrap"
    assert named(checks, "agent").fix == "allmende start"


def test_who_listens_on_this_machine_alone_is_told_so() -> None:
    agent = msgspec.structs.replace(AGENT, listen_addrs=(f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}",))
    check = named(network_checks(NETWORK, agent, Config()), "listening")
    assert (check.level, check.fix) == ("note", "allmende config unset listen")


def test_odd_peers_are_noted() -> None:
    agent = msgspec.structs.replace(
        AGENT, differing_peers={"2": 3}, num_banned=1, host_restarts=2, num_inbound=0,
        num_outbound=0, listen_addrs=(),
    )  # fmt: skip
    notes = [c.name for c in network_checks(NETWORK, agent, Config()) if c.level == "note"]
    assert notes == ["listening", "peers", "versions", "refused", "restarts"]


@pytest.mark.slow
def test_ports_and_bootstrap_peers_are_tried() -> None:
    with socket.socket() as taken, socket.socket() as closed:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        closed.bind(("127.0.0.1", 0))
        there, gone = taken.getsockname()[1], closed.getsockname()[1]
        addrs = [f"/ip4/127.0.0.1/tcp/{port}" for port in (there, gone)]
        bootstrap = tuple(f"{addr}/p2p/{PEER}" for addr in addrs)
        config = Config(listen=(addrs[0], "/ip4/127.0.0.1/tcp/0"), bootstrap=bootstrap)
        facts = read_network(config, is_agent_running=False)
    assert [addr for addr, _ in facts.taken] == [addrs[0]]
    assert [addr for addr, _ in facts.unreachable] == [bootstrap[1]]
    assert not any(host.startswith("127.") for host in facts.hosts)
    assert read_network(Config(listen=(addrs[0],)), is_agent_running=True).taken == ()


# ------------------------------------------------------------------------------------------- disk


@pytest.fixture
def locations(tmp_path: Path) -> Locations:
    return Locations.from_environment({HOME_VARIABLE: str(tmp_path / "home")})


def test_a_disk_before_the_first_start_is_well_and_stays_untouched(locations: Locations) -> None:
    checks = disk_checks(Config(disk_min_free_bytes=64 * 1024**2), locations)
    assert {check.level for check in checks} == {"well"}
    assert not locations.data_dir.exists()


@pytest.mark.slow
def test_a_used_disk_is_written_to_measured_and_left_as_it_was(locations: Locations) -> None:
    locations.prepare()
    (locations.runs_dir / "blob").write_bytes(bytes(3_000_000))
    locations.identity_file.write_bytes(b"key")
    locations.identity_file.chmod(0o600)
    before = sorted(locations.data_dir.rglob("*"))
    checks = disk_checks(Config(disk_min_free_bytes=64 * 1024**2), locations)
    assert {check.level for check in checks} <= {"well", "note"}
    assert named(checks, "used").value == "runs 3 MB, logs 0 MB"
    assert named(checks, "key").level == "well"
    assert sorted(locations.data_dir.rglob("*")) == before


def test_a_key_that_others_can_read_is_wrong(locations: Locations) -> None:
    locations.prepare()
    locations.identity_file.write_bytes(b"key")
    locations.identity_file.chmod(0o644)
    check = named(disk_checks(Config(), locations), "key")
    assert (check.level, check.fix) == ("wrong", f"chmod 600 {locations.identity_file}")
    assert stat.S_IMODE(locations.identity_file.stat().st_mode) == 0o644, "it changes nothing"


@pytest.mark.parametrize(
    ("free_bytes", "level", "fix"),
    [
        (None, "wrong", "df -h "),
        (10**8, "wrong", "free some space"),
        (int(1.9 * 2**30), "wrong", "free some space"),
        (2 * 10**9, "well", ""),
    ],
)
def test_room_is_judged_by_what_must_stay_free(
    locations: Locations,
    monkeypatch: pytest.MonkeyPatch,
    free_bytes: int | None,
    level: str,
    fix: str,
) -> None:
    monkeypatch.setattr(disk_module, "read_free_bytes", lambda folder: free_bytes)
    least = 2_000_000_000 if level == "well" else 2 * 1024**3
    check = named(disk_checks(Config(disk_min_free_bytes=least), locations), "room")
    assert (check.level, check.fix.startswith(fix)) == (level, True)


def test_a_limit_that_is_too_high_for_the_disk_can_be_lowered(
    locations: Locations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "read_free_bytes", lambda folder: 50 * 10**9)
    check = named(disk_checks(Config(disk_min_free_bytes=10**11), locations), "room")
    assert check.fix == f"allmende config set disk_min_free_bytes {2**30}"


def test_a_disk_that_hangs_or_refuses_is_said(
    locations: Locations, monkeypatch: pytest.MonkeyPatch
) -> None:
    locations.prepare()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    check = named(disk_checks(Config(), locations), "writing")
    assert (check.level, "Read-only file system" in check.meaning) == ("wrong", True)


@pytest.mark.slow
def test_a_look_that_hangs_is_left_behind() -> None:
    never = threading.Event()
    with pytest.raises(LookError, match=r"not answered for 0\.05 s"):
        within(never.wait, 0.05)
    never.set()
    with pytest.raises(LookError, match="No such file"):
        within(lambda: os.stat("/nonexistent"))
    assert within(lambda: 7) == 7


# --------------------------------------------------------------------------------------- terminal

TERMINAL = TerminalFacts(
    closed=(), columns=80, rows=24, encoding="utf-8",
    environ={"TERM": "xterm-256color", "TMUX": "x", "SSH_CONNECTION": "y"},
)  # fmt: skip


def test_a_usual_terminal_is_well() -> None:
    checks = terminal_checks(TERMINAL)
    assert {check.level for check in checks} == {"well"}
    assert "in tmux and SSH" in named(checks, "TERM").meaning
    assert named(checks, "colours").value == "256"


@pytest.mark.parametrize(
    ("changes", "name", "fix"),
    [
        ({"environ": {"TERM": "dumb"}}, "TERM", "export TERM=xterm-256color"),
        ({"environ": {}}, "TERM", "export TERM=xterm-256color"),
        ({"columns": MIN_COLUMNS - 1}, "size", "make the window larger"),
        ({"rows": MIN_ROWS - 1}, "size", "make the window larger"),
        ({"encoding": "ANSI_X3.4-1968"}, "letters", "export LC_ALL=C.UTF-8"),
    ],
)
def test_what_a_terminal_lacks_is_wrong_where_there_is_one(
    changes: dict[str, object], name: str, fix: str
) -> None:
    facts = dataclasses.replace(TERMINAL, **changes)  # type: ignore[arg-type]
    (check,) = [check for check in terminal_checks(facts) if check.level == "wrong"]
    assert (check.name, check.fix) == (name, fix)
    redirected = dataclasses.replace(facts, closed=("stdout",))
    assert {check.level for check in terminal_checks(redirected)} == {"well", "note"}


def test_the_smallest_window_is_the_dashboard_s() -> None:
    assert (MIN_COLUMNS, MIN_ROWS) == (main_screen.MIN_WIDTH, main_screen.MIN_HEIGHT)


# ------------------------------------------------------------------------------------------- idle


def test_the_agent_s_own_sources_are_listed_behind_its_decision() -> None:
    first, second = idle_checks(AGENT.sources, agent_decision(AGENT), is_unknown=False)
    assert (first.level, first.value, first.meaning) == (
        "well", "contributing", "Nobody uses this machine",
    )  # fmt: skip
    assert (second.name, second.value) == ("X11 :0", "400 s")


def test_where_nobody_can_tell_all_that_fails_is_wrong_and_the_way_out_is_named() -> None:
    broken = SourceReport(name="X11 :0", is_well=False, value="-", meaning="it cannot tell: why")
    fixable = dataclasses.replace(broken, fix="sudo reboot")
    unknown = msgspec.structs.replace(AGENT, is_idle_unknown=True)
    checks = idle_checks([broken], agent_decision(unknown), is_unknown=True)
    assert [check.level for check in checks] == ["wrong", "wrong"]
    assert checks[0].fix == "allmende config set headless true"
    checks = idle_checks([broken, fixable], agent_decision(AGENT), is_unknown=False)
    assert [check.level for check in checks] == ["well", "note", "wrong"]


def test_without_an_agent_it_is_said_what_one_would_do() -> None:
    assert own_decision(CONTRIBUTE).value == "it would contribute"
    failure = SourceFailure(name="X11 :0", problem="it does not let us in")
    signals = Signals(
        disk_free_bytes=10**12, input=InputReading(has_desktop=True, failures=(failure,))
    )
    _, decision = decide(IdleState(), signals, IdleConfig(disk_min_free_bytes=1), 0.0)
    check = own_decision(decision)
    assert (check.level, check.value) == ("wrong", "it would wait")
    assert "X11 :0" in check.meaning


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a Linux machine of folders")
def test_sensors_of_our_own_look_and_end(locations: Locations, tmp_path: Path) -> None:
    made: list[MachineSensors] = []

    def make(config: Config, where: Locations, notify: Callable[[], None]) -> MachineSensors:
        places = Places(
            x11_dir=tmp_path, lock_dir=tmp_path, runtime_dir=tmp_path, home_dir=tmp_path
        )
        made.append(MachineSensors(config, where, notify, places))
        return made[0]

    reports, decision = look(
        Config(headless=True, others_cpu_limit=1.0), locations, os.getpid(), make
    )
    names = {report.name for report in reports}
    assert {"displays", "terminals", "disk", "load", "power"} <= names
    load = next(report for report in reports if report.name == "load")
    assert load.value.endswith("%"), "it waited for the second reading"
    assert decision.cause.value != "idle_unknown"


def test_the_report_is_well_unless_something_is_wrong() -> None:
    note = named(terminal_checks(dataclasses.replace(TERMINAL, closed=("stdin",))), "streams")
    assert make_report([note]).is_well
    assert not make_report([note, msgspec.structs.replace(note, level="wrong")]).is_well
