"""The idle policy, row by row as policy/README.md has it, and the sensors that feed it."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from volunteer.config import Config
from volunteer.policy.idle import CONTRIBUTE, VETOES, Cause, Decision, IdleState, decide
from volunteer.policy.sensors import battery
from volunteer.policy.sensors.battery import read_on_battery
from volunteer.policy.sensors.disk import read_free_bytes
from volunteer.policy.signals import IdleConfig, OwnerPause, Signals

README = Path(__file__).parents[2] / "volunteer" / "policy" / "README.md"
MIN_FREE = 2_000_000_000
CONFIG = IdleConfig(disk_min_free_bytes=MIN_FREE)

DISK = {"low": MIN_FREE - 1, "enough": MIN_FREE, "unknown": None}
OWNER = {
    "running": None,
    "paused": OwnerPause(),
    "paused until 900": OwnerPause(until_s=900.0),
}
BATTERY = {"yes": True, "no": False, "unknown": None}
FLAGS = {
    "none": CONFIG,
    "--ignore-idle": replace(CONFIG, ignore_idle=True),
    "pause_on_battery = false": replace(CONFIG, pause_on_battery=False),
}


def tables() -> list[list[dict[str, str]]]:
    """Return the README's tables as lists of rows by column name."""
    found: list[list[dict[str, str]]] = []
    header: list[str] = []
    for line in README.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells
            found.append([])
        elif set(line) - set("|-"):
            found[-1].append(dict(zip(header, cells, strict=True)))
    return found


DECISION_ROWS, TIMELINE_ROWS = tables()


class Case(NamedTuple):
    disk: str
    owner: str
    battery: str
    flags: str


ALL_CASES = [Case(d, o, b, f) for d in DISK for o in OWNER for b in BATTERY for f in FLAGS]


def fits(row: dict[str, str], case: Case) -> bool:
    return all(row[name] in ("any", value) for name, value in case._asdict().items())


def signals_of(disk: str, owner: str, battery: str) -> Signals:
    return Signals(
        disk_free_bytes=DISK[disk], owner_pause=OWNER[owner], on_battery=BATTERY[battery]
    )


def first_decision(case: Case, now_s: float = 0.0) -> Decision:
    signals = signals_of(case.disk, case.owner, case.battery)
    return decide(IdleState(), signals, FLAGS[case.flags], now_s)[1]


def instant(cell: str) -> float | None:
    return None if cell == "-" else float(cell)


@pytest.mark.parametrize("case", ALL_CASES, ids="/".join)
def test_the_first_row_that_fits_decides(case: Case) -> None:
    row = next(row for row in DECISION_ROWS if fits(row, case))
    decision = first_decision(case)
    assert decision.may_contribute == (row["contributes"] == "yes")
    assert decision.cause == row["cause"]
    assert decision.resumes_when == row["resumes when"]
    assert decision.resumes_at_s == instant(row["resumes at"])
    assert decision.reason


@pytest.mark.parametrize("row", DECISION_ROWS, ids=lambda row: row["cause"] + row["flags"])
def test_every_row_is_reached(row: dict[str, str]) -> None:
    firsts = [next(r for r in DECISION_ROWS if fits(r, case)) for case in ALL_CASES]
    assert row in firsts


def test_the_rows_of_the_code_are_the_causes_of_the_table_in_its_order() -> None:
    in_table = [row["cause"] for row in DECISION_ROWS if row["contributes"] == "no"]
    assert list(dict.fromkeys(in_table)) == [row.cause for row in VETOES]
    assert {row["cause"] for row in DECISION_ROWS} == set(Cause)


def test_the_timeline_is_steady() -> None:
    state = IdleState()
    for row in TIMELINE_ROWS:
        signals = signals_of(row["disk"], row["owner"], row["battery"])
        state, decision = decide(state, signals, CONFIG, float(row["at"]))
        found = (decision.may_contribute, decision.cause, decision.resumes_at_s)
        assert found == (
            row["contributes"] == "yes",
            row["cause"],
            instant(row["resumes at"]),
        ), row


def test_the_sentences_say_what_was_seen() -> None:
    reasons = {case: first_decision(case).reason for case in ALL_CASES}
    assert reasons[Case("low", "running", "no", "none")] == "the disk is nearly full: 2.0 GB free"
    assert reasons[Case("enough", "running", "yes", "none")] == "the machine runs on battery"
    assert "nobody can tell" in reasons[Case("enough", "running", "unknown", "none")]
    assert "nobody can tell" in reasons[Case("unknown", "running", "no", "none")]
    state, _ = decide(IdleState(), signals_of("enough", "running", "yes"), CONFIG, 0.0)
    _, calm = decide(state, signals_of("enough", "running", "no"), CONFIG, 1.0)
    assert calm.reason == "the machine is on mains power again"
    assert calm.resumes_when == "that has lasted for 60 s"


def test_defaults_of_the_config_fit_the_policy() -> None:
    config = Config()
    policy = IdleConfig(disk_min_free_bytes=config.disk_min_free_bytes)
    assert policy.pause_on_battery == config.pause_on_battery


readings = st.builds(
    Signals,
    owner_pause=st.sampled_from(list(OWNER.values())),
    on_battery=st.sampled_from([True, False, None]),
    disk_free_bytes=st.sampled_from([None, 0, MIN_FREE - 1, MIN_FREE, 2**40]),
)


@settings(max_examples=40)
@given(
    schedule=st.lists(st.tuples(st.floats(0.0, 100.0), readings), max_size=40),
    config=st.sampled_from(list(FLAGS.values())),
)
def test_on_any_schedule_the_promises_hold(
    schedule: list[tuple[float, Signals]], config: IdleConfig
) -> None:
    state, now_s = IdleState(), 0.0
    low_since_s: float | None = None
    for delay_s, signals in schedule:
        now_s += delay_s
        state, decision = decide(state, signals, config, now_s)
        is_low = signals.disk_free_bytes is None or signals.disk_free_bytes < MIN_FREE
        low_since_s = (now_s if low_since_s is None else low_since_s) if is_low else None
        if low_since_s is not None and now_s - low_since_s >= config.pause_after_s:
            assert decision.cause is Cause.DISK, "a full disk wins over everything"
        pause = signals.owner_pause
        if pause is not None and (pause.until_s is None or now_s < pause.until_s):
            assert not decision.may_contribute, "the owner's word counts at once"
        if config.ignore_idle:
            assert decision.cause is not Cause.BATTERY
        assert decision.may_contribute == (decision.cause is Cause.NOTHING)
        assert decision.may_contribute == (decision == CONTRIBUTE)
        assert bool(decision.resumes_when) != decision.may_contribute
        assert decision.resumes_at_s is None or decision.resumes_at_s > now_s


# ---------------------------------------------------------------------------------------- sensors


def make_supply(folder: Path, name: str, **values: str) -> None:
    (folder / name).mkdir(parents=True)
    for key, value in values.items():
        (folder / name / key).write_text(value + "\n")


AC_ON = {"type": "Mains", "online": "1"}
AC_OFF = {"type": "Mains", "online": "0"}
MOUSE = {"type": "Battery", "scope": "Device", "status": "Discharging"}


def cell(status: str) -> dict[str, str]:
    return {"type": "Battery", "status": status}


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ([], False),
        ([AC_ON], False),
        ([AC_ON, cell("Discharging")], False),
        ([AC_OFF, cell("Discharging")], True),
        ([AC_OFF, cell("Full"), cell("Discharging")], True),
        ([AC_OFF, {"type": "USB", "online": "1"}, cell("Charging")], False),
        ([cell("Charging")], False),
        ([cell("Not charging")], False),
        ([cell("Unknown")], None),
        ([AC_ON, cell("Unknown")], False),
        ([{"type": "Battery"}], None),
        ([{"online": "1"}], None),
        ([MOUSE], False),
        ([MOUSE, AC_OFF, cell("Full")], False),
        ([{"type": "UPS", "status": "Discharging"}], True),
    ],
)
def test_linux_power_supplies(
    tmp_path: Path, supplies: list[dict[str, str]], expected: bool | None
) -> None:
    folder = tmp_path / "power_supply"
    folder.mkdir()
    for number, values in enumerate(supplies):
        make_supply(folder, f"supply{number}", **values)
    assert battery._read_linux(folder) is expected


def test_no_power_supply_class_means_no_battery(tmp_path: Path) -> None:
    assert battery._read_linux(tmp_path / "absent") is False


def test_this_machine_gives_some_reading() -> None:
    assert read_on_battery() in (True, False, None)


class FakeBattery(NamedTuple):
    power_plugged: bool | None


@pytest.mark.parametrize(
    ("reading", "expected"),
    [
        (None, False),
        (FakeBattery(True), False),
        (FakeBattery(False), True),
        (FakeBattery(None), None),
    ],
)
def test_other_systems_ask_psutil(
    monkeypatch: pytest.MonkeyPatch, reading: FakeBattery | None, expected: bool | None
) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: reading, raising=False)
    assert battery._read_psutil() is expected


def test_free_space_is_that_of_the_nearest_folder(tmp_path: Path) -> None:
    free = read_free_bytes(tmp_path / "not" / "there")
    status = os.statvfs(tmp_path)
    assert free is not None
    assert free == pytest.approx(status.f_bavail * status.f_frsize, rel=0.1)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOENT])
def test_an_unreadable_disk_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(folder: str) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(psutil, "disk_usage", fail)
    assert read_free_bytes(tmp_path) is None
