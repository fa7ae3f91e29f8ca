"""The idle policy, row by row as policy/README.md has it, and on any schedule."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from volunteer.config import Config
from volunteer.policy.idle import CONTRIBUTE, VETOES, Decision, IdleState, decide
from volunteer.policy.signals import (
    GpuReading,
    IdleConfig,
    InputReading,
    OwnerPause,
    Signals,
    SourceFailure,
)
from volunteer.policy.veto import Cause
from volunteer.policy.wishes import idle_config

README = Path(__file__).parents[2] / "volunteer" / "policy" / "README.md"
NOW_S = 1000.0
AT_REST = Signals(
    disk_free_bytes=10**12,
    ram_available_bytes=10**10,
    temperature_celsius=50.0,
    local_time=datetime(2026, 11, 30, 12, 0),
    is_metered=False,
    input=InputReading(
        has_desktop=True,
        idle_s=3600.0,
        desktop_source="X11 :0",
        is_locked=False,
        terminal_idle_s=3600.0,
    ),
    others_cpu_fraction=0.01,
    gpu=GpuReading(others_fraction=0.0, free_bytes=8 * 10**9, temperature_celsius=40.0),
)
NESTED: dict[str, type[Any]] = {
    "owner_pause": OwnerPause,
    "input": InputReading,
    "gpu": GpuReading,
    "failures": SourceFailure,
}


def tables() -> list[list[dict[str, str]]]:
    """Return the README's tables as lists of rows by column name."""
    found: list[list[dict[str, str]]] = []
    header: list[str] = []
    for line in README.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells
            found.append([])
        elif set(line) - set("|-"):
            found[-1].append(dict(zip(header, cells, strict=True)))
    return found


DECISION_ROWS, TIMELINE_ROWS = tables()


def parsed(cell: str) -> dict[str, Any]:
    """Return the TOML of a cell's code spans."""
    return tomllib.loads("\n".join(re.findall(r"`([^`]*)`", cell)))


def made(value: object, name: str, base: object) -> Any:  # noqa: ANN401 - any reading
    """Return a reading's value: nested tables on top of `base`, "unknown" as None."""
    if value == "unknown":
        return None
    if isinstance(value, Mapping):
        changes = {k: made(v, k, getattr(base, k, None)) for k, v in value.items()}
        if isinstance(base, NESTED[name]):
            return dataclasses.replace(base, **changes)
        return NESTED[name](**changes)
    if isinstance(value, list):
        return tuple(made(each, name, None) for each in value)
    return value


def signals_of(cell: str) -> Signals:
    changes = {k: made(v, k, getattr(AT_REST, k)) for k, v in parsed(cell).items()}
    return dataclasses.replace(AT_REST, **changes)


def config_of(cell: str) -> IdleConfig:
    values: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in parsed(cell).items()
    }
    is_idle_ignored = bool(values.pop("ignore_idle", False))
    return idle_config(Config(**values), is_idle_ignored=is_idle_ignored)


def instant(cell: str) -> float | None:
    return None if cell == "-" else float(cell)


@pytest.mark.parametrize(
    "row", DECISION_ROWS, ids=lambda row: f"{row['readings']} {row['settings']}"
)
def test_each_row_of_the_table_holds(row: dict[str, str]) -> None:
    _, decision = decide(
        IdleState(), signals_of(row["readings"]), config_of(row["settings"]), NOW_S
    )
    assert decision.cause == row["cause"]
    assert decision.may_contribute == (row["cause"] == "nothing")
    assert decision.reason == row["reason"]
    assert decision.resumes_when == row["resumes when"]
    assert decision.resumes_at_s == instant(row["at"])
    assert decision.next_start_s == instant(row["next start"])


def test_every_reading_in_every_state_and_every_setting_has_a_row() -> None:
    """A reading that may be unknown has a row for that, and each flag one where it is set."""
    readings = [parsed(row["readings"]) for row in DECISION_ROWS]
    seen = {(k, str(v)) for cells in readings for k, v in flat(cells)}
    names = {name for name, _ in seen}
    for prefix, kind in (("", Signals), ("input.", InputReading), ("gpu.", GpuReading)):
        for name, hint in get_type_hints(kind).items():
            key = prefix + name
            if prefix == "" and name in ("input", "gpu"):
                continue
            assert key in names or any(n.startswith(key + ".") for n in names), key
            if "None" in str(hint) and name != "owner_pause":
                assert (key, "unknown") in seen, f"no row for an unknown {key}"
            if hint is bool:
                assert (key, "True") in seen, key
    configured = {k for row in DECISION_ROWS for k in parsed(row["settings"])}
    of_policy = {field.name for field in dataclasses.fields(IdleConfig)}
    of_policy = of_policy - {"idle_s", "pause_after_s", "resume_after_s"} | {"idle_minutes"}
    assert of_policy <= configured, of_policy - configured
    assert {row["cause"] for row in DECISION_ROWS} == set(Cause) - {Cause.LOOKING}


def flat(cells: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, value in cells.items():
        if isinstance(value, Mapping):
            found += [(prefix + name, "set"), *flat(value, f"{prefix}{name}.")]
        else:
            found.append((prefix + name, value))
    return found


def test_the_order_of_strength_is_as_written() -> None:
    line = next(
        line for line in README.read_text("utf-8").splitlines() if line.startswith("disk, ")
    )
    assert line.split(", ") == [row.cause for row in VETOES]


EVERYTHING = dataclasses.replace(
    AT_REST,
    disk_free_bytes=0,
    owner_pause=OwnerPause(),
    is_going_to_sleep=True,
    ram_available_bytes=0,
    temperature_celsius=100.0,
    is_metered=True,
    on_battery=True,
    input=InputReading(has_desktop=None, idle_s=1.0, terminal_idle_s=1.0, inhibitors=("vlc",)),
    games=1,
    exclusive_programs=("blender",),
    others_cpu_fraction=1.0,
    gpu=GpuReading(others_fraction=1.0, free_bytes=0),
)
CURED: list[tuple[Cause, dict[str, Any]]] = [
    (Cause.DISK, {"disk_free_bytes": 10**12}),
    (Cause.OWNER, {"owner_pause": None}),
    (Cause.SLEEP, {"is_going_to_sleep": False}),
    (Cause.MEMORY, {"ram_available_bytes": 10**10}),
    (Cause.HEAT, {"temperature_celsius": 50.0}),
    (Cause.HOURS, {"local_time": datetime(2026, 11, 28, 12, 0)}),
    (Cause.NETWORK_HOURS, {"local_time": datetime(2026, 11, 29, 12, 0)}),
    (Cause.METERED, {"is_metered": False}),
    (Cause.BATTERY, {"on_battery": False}),
]


def test_the_strongest_cause_is_told_until_none_is_left() -> None:
    config = idle_config(
        Config(hours=("sat-sun 00:00-24:00",), network_hours=("sun 00:00-24:00",)),
        is_idle_ignored=False,
    )
    signals, told = EVERYTHING, []
    for cause, cure in CURED:
        told.append(decide(IdleState(), signals, config, NOW_S)[1].cause)
        assert told[-1] is cause
        signals = dataclasses.replace(signals, **cure)
    desktop = dataclasses.replace(signals.input, has_desktop=True)
    calm = dataclasses.replace(desktop, idle_s=1e6)
    steps: list[dict[str, Any]] = [
        {"input": desktop},
        {"input": calm},
        {"input": dataclasses.replace(calm, terminal_idle_s=1e6)},
        {"input": dataclasses.replace(calm, terminal_idle_s=1e6, inhibitors=())},
        {"games": 0},
        {"exclusive_programs": ()},
        {"others_cpu_fraction": 0.0},
        {"gpu": GpuReading(others_fraction=0.0, free_bytes=0)},
    ]
    for step in steps:
        told.append(decide(IdleState(), signals, config, NOW_S)[1].cause)
        signals = dataclasses.replace(signals, **step)
    told.append(decide(IdleState(), signals, config, NOW_S)[1].cause)
    assert told == [row.cause for row in VETOES]


def test_the_timeline_holds() -> None:
    state, config = IdleState(), config_of("")
    for row in TIMELINE_ROWS:
        state, decision = decide(state, signals_of(row["readings"]), config, float(row["now"]))
        assert decision.cause == row["cause"], row
        assert decision.resumes_at_s == pytest.approx(instant(row["at"])), row


def test_calm_is_said_with_its_end() -> None:
    config = config_of("")
    for row in VETOES:
        if row.resume_after_s(config) == 0:
            assert row.calm_reason == "", row.cause
        else:
            assert row.calm_reason, row.cause
    state, _ = decide(IdleState(), signals_of("`on_battery = true`"), config, 0.0)
    _, decision = decide(state, AT_REST, config, 5.0)
    assert decision.reason == "the machine is on mains power again"
    assert decision.resumes_when == "that has lasted for 60 s"


def test_ignoring_idleness_leaves_what_protects_the_machine_and_the_owners_word() -> None:
    ignoring, headless = config_of("`ignore_idle = true`"), config_of("`headless = true`")
    protecting = {Cause.DISK, Cause.OWNER, Cause.SLEEP, Cause.MEMORY, Cause.HEAT}
    assert {row.cause for row in VETOES if row.is_on(ignoring)} == protecting
    silent = {row.cause for row in VETOES if not row.is_on(headless)}
    assert silent == {Cause.UNKNOWN, Cause.INPUT, Cause.TERMINAL, Cause.INHIBITED}


@pytest.mark.parametrize("lost", ['`input.has_desktop = "unknown"`', '`input.idle_s = "unknown"`'])
def test_who_loses_sight_of_the_owner_ends_nothing_however_short_the_calm(lost: str) -> None:
    config = config_of("`resume_after_s = 1` `pause_after_s = 10`")
    state, _ = decide(IdleState(), signals_of("`input.idle_s = 0.1`"), config, 0.0)
    for now_s in (1.0, 3.0, 5.0, 9.0, 11.0, 30.0):
        state, decision = decide(state, signals_of(lost), config, now_s)
        assert not decision.may_contribute, now_s
    assert decision.cause is Cause.UNKNOWN


# ------------------------------------------------------------------------------------- any schedule

inputs = st.builds(
    InputReading,
    has_desktop=st.sampled_from([True, False, None]),
    idle_s=st.sampled_from([None, 0.0, 30.0, 61.0, 239.0, 250.0, 299.0, 300.0, 1e5]),
    desktop_source=st.sampled_from(["", "GNOME"]),
    is_locked=st.sampled_from([True, False, None]),
    terminal_idle_s=st.sampled_from([None, 0.0, 239.0, 250.0, 300.0, float("inf")]),
    inhibitors=st.sampled_from([(), ("vlc",)]),
    failures=st.sampled_from([(), (SourceFailure(name="X11 :0", problem="silent"),)]),
)
gpus = st.builds(
    GpuReading,
    others_fraction=st.sampled_from([None, 0.0, 0.15, 1.0]),
    free_bytes=st.sampled_from([None, 0, 10**10]),
    temperature_celsius=st.sampled_from([None, 40.0, 76.0, 90.0]),
)
readings = st.builds(
    Signals,
    owner_pause=st.sampled_from(
        [None, OwnerPause(), OwnerPause(until_s=900.0), OwnerPause(after_round=3)]
    ),
    round_index=st.integers(1, 4),
    local_time=st.sampled_from([None, AT_REST.local_time, datetime(2026, 12, 5, 3, 0)]),
    is_going_to_sleep=st.sampled_from([False, False, True]),
    woke_at_s=st.sampled_from([None, 100.0, 500.0]),
    disk_free_bytes=st.sampled_from([None, 0, 2**40]),
    ram_available_bytes=st.sampled_from([None, 0, 2**40]),
    temperature_celsius=st.sampled_from([None, 50.0, 87.0, 97.0]),
    on_battery=st.sampled_from([True, False, None]),
    is_metered=st.sampled_from([True, False, None]),
    input=inputs,
    games=st.integers(0, 1),
    exclusive_programs=st.sampled_from([(), ("blender",)]),
    others_cpu_fraction=st.sampled_from([None, 0.0, 0.3]),
    gpu=gpus,
)


def mixed(base: Signals, other: Signals, names: set[str]) -> Signals:
    return dataclasses.replace(base, **{name: getattr(other, name) for name in names})


changes = st.tuples(
    readings, st.sets(st.sampled_from([f.name for f in dataclasses.fields(Signals)]), max_size=3)
)
configs = st.sampled_from(
    [
        config_of(""),
        config_of("`ignore_idle = true`"),
        config_of("`headless = true`"),
        config_of('`hours = ["mon 00:00-24:00"]` `idle_minutes = 0.1`'),
        config_of("`pause_after_s = 0` `resume_after_s = 1` `lock_counts_as_idle = false`"),
        config_of("`terminals_count_as_use = false` `pause_on_battery = false`"),
    ]
)


class Look(NamedTuple):
    now_s: float
    signals: Signals
    decision: Decision


def looks_of(
    schedule: list[tuple[float, tuple[Signals, set[str]]]], config: IdleConfig
) -> list[Look]:
    state, now_s, looks = IdleState(), 0.0, []
    for delay_s, (other, names) in schedule:
        now_s += delay_s
        signals = mixed(AT_REST, other, names)
        state, decision = decide(state, signals, config, now_s)
        looks.append(Look(now_s, signals, decision))
    return looks


schedules = st.lists(
    st.tuples(st.floats(0.0, 40.0) | st.floats(0.0, 0.5) | st.just(400.0), changes), max_size=30
)


def verify_reasons(looks: list[Look]) -> None:
    """It always says why, and what it waits for."""
    for now_s, _, decision in looks:
        assert decision.may_contribute == (decision.cause is Cause.NOTHING)
        assert decision.may_contribute == (decision == CONTRIBUTE)
        assert decision.reason
        assert bool(decision.resumes_when) != decision.may_contribute
        assert decision.resumes_at_s is None or decision.resumes_at_s > now_s
        if decision.next_start_s is not None:
            assert decision.resumes_at_s is not None
            assert decision.next_start_s >= decision.resumes_at_s


def verify_vetoes(looks: list[Look], config: IdleConfig) -> None:
    """What has vetoed at every look for long enough, or counts at once, pauses."""
    since: dict[Cause, float] = {}
    for now_s, signals, decision in looks:
        for row in VETOES:
            if not row.is_on(config) or not row.is_present(signals, config, now_s, False):
                since.pop(row.cause, None)
                continue
            since.setdefault(row.cause, now_s)
            if now_s - since[row.cause] >= row.pause_after_s(config):
                assert not decision.may_contribute, row.cause


SAID = {Cause.OWNER, Cause.HOURS, Cause.NETWORK_HOURS, Cause.SLEEP}
"""What the owner or the system says ends when it is said."""


def verify_calm(looks: list[Look], config: IdleConfig) -> None:
    """From the end of contributing to its next begin a sensor's row lets its calm pass."""
    paused_at_s: float | None = None
    causes: set[Cause] = set()
    before = True
    for now_s, _, decision in looks:
        if before and not decision.may_contribute:
            paused_at_s, causes = now_s, set()
        if not decision.may_contribute:
            causes.add(decision.cause)
        elif not before and paused_at_s is not None and causes - SAID:
            assert now_s - paused_at_s >= config.resume_after_s, causes
        before = decision.may_contribute


def verify_end(looks: list[Look], config: IdleConfig) -> None:
    """Nothing is waited for that is not there: the machine at rest contributes after the calm."""
    state = IdleState()
    now_s = 1000.0
    for look in looks:
        now_s = 1000.0 + look.now_s
        state, _ = decide(state, look.signals, config, now_s)
    state, _ = decide(state, AT_REST, config, now_s + 1)
    _, decision = decide(state, AT_REST, config, now_s + 1.01 + config.resume_after_s)
    assert decision.may_contribute, decision


def verify_promises(
    schedule: list[tuple[float, tuple[Signals, set[str]]]], config: IdleConfig
) -> None:
    looks = looks_of(schedule, config)
    verify_reasons(looks)
    verify_vetoes(looks, config)
    verify_calm(looks, config)
    verify_end(looks, config)


@settings(max_examples=60, deadline=None)
@given(schedule=schedules, config=configs)
def test_on_any_schedule_the_promises_hold(
    schedule: list[tuple[float, tuple[Signals, set[str]]]], config: IdleConfig
) -> None:
    verify_promises(schedule, config)


@pytest.mark.full
@pytest.mark.timeout(1800)
@settings(max_examples=5000, deadline=None)
@given(schedule=schedules, config=configs)
def test_on_thousands_of_schedules_the_promises_hold(
    schedule: list[tuple[float, tuple[Signals, set[str]]]], config: IdleConfig
) -> None:
    verify_promises(schedule, config)
