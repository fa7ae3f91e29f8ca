"""The idle policy, row by row as policy/README.md has it, and on any schedule."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from volunteer.config import Config
from volunteer.policy.idle import VETOES, IdleState, decide
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
    own_disk_bytes=10**12,
    owner_pause=OwnerPause(),
    is_going_to_sleep=True,
    ram_available_bytes=0,
    own_ram_bytes=10**12,
    temperature_celsius=100.0,
    data_used_bytes=10**12,
    data_renews_in_s=60.0,
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
    (Cause.OWN_DISK, {"own_disk_bytes": 0}),
    (Cause.OWNER, {"owner_pause": None}),
    (Cause.SLEEP, {"is_going_to_sleep": False}),
    (Cause.MEMORY, {"ram_available_bytes": 10**10}),
    (Cause.OWN_MEMORY, {"own_ram_bytes": 0}),
    (Cause.HEAT, {"temperature_celsius": 50.0}),
    (Cause.HOURS, {"local_time": datetime(2026, 11, 28, 12, 0)}),
    (Cause.NETWORK_HOURS, {"local_time": datetime(2026, 11, 29, 12, 0)}),
    (Cause.DATA_BUDGET, {"data_used_bytes": 0}),
    (Cause.METERED, {"is_metered": False}),
    (Cause.BATTERY, {"on_battery": False}),
]


def test_the_strongest_cause_is_told_until_none_is_left() -> None:
    config = idle_config(
        Config(
            hours=("sat-sun 00:00-24:00",),
            network_hours=("sun 00:00-24:00",),
            monthly_data_budget_bytes=10**9,
            disk_max_bytes=10**9,
            ram_max_bytes=10**9,
        ),
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


@pytest.mark.parametrize(
    ("readings", "settings", "held"),
    [
        ("", "", ""),
        ("`is_metered = true`", "", "the network connection is metered"),
        ("`is_metered = true`", "`pause_on_metered = false`", ""),
        ("`is_metered = true` `owner_pause = {}`", "", "the network connection is metered"),
        ("`disk_free_bytes = 0`", "", ""),
        (
            "`is_metered = true`",
            '`network_hours = ["sat 00:00-24:00"]`',
            "it is outside the hours in which you allow the network (`network_hours`)",
        ),
        ("", '`hours = ["sat 00:00-24:00"]`', ""),
        ("`is_metered = true`", "`ignore_idle = true`", ""),
    ],
)
def test_what_holds_the_network_is_told_beside_the_reason(
    readings: str, settings: str, held: str
) -> None:
    readings = readings.replace("` `", "`\n`")
    _, decision = decide(IdleState(), signals_of(readings), config_of(settings), NOW_S)
    assert decision.network_reason == held


def test_who_held_too_much_memory_rests_for_long() -> None:
    config = config_of("`ram_max_bytes = 1_000_000_000` `resume_after_s = 1`")
    state, _ = decide(IdleState(), AT_REST, config, 0.0)
    much = signals_of("`own_ram_bytes = 1_000_000_001`")
    state, decision = decide(state, much, config, 1.0)
    assert decision.cause is Cause.OWN_MEMORY, "at once"
    little = signals_of("`own_ram_bytes = 100_000_000`")
    for now_s in (2.0, 300.0, 601.0):
        state, decision = decide(state, little, config, now_s)
        assert decision.cause is Cause.OWN_MEMORY, now_s
        assert decision.resumes_at_s == pytest.approx(602.0)
        assert decision.resumes_when == "that has lasted for 600 s"
    assert decide(state, little, config, 602.0)[1].may_contribute


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
    protecting |= {Cause.DATA_BUDGET}  # the owner's word as well, and it costs money
    assert {row.cause for row in VETOES if row.is_on(ignoring)} == protecting
    unset = {row.cause for row in VETOES if not row.is_on(config_of(""))}
    silent = {row.cause for row in VETOES if not row.is_on(headless)} - unset
    assert silent == {Cause.UNKNOWN, Cause.INPUT, Cause.TERMINAL, Cause.INHIBITED}


@pytest.mark.parametrize("lost", ['`input.has_desktop = "unknown"`', '`input.idle_s = "unknown"`'])
def test_who_loses_sight_of_the_owner_ends_nothing_however_short_the_calm(lost: str) -> None:
    config = config_of("`resume_after_s = 1` `pause_after_s = 10`")
    state, _ = decide(IdleState(), signals_of("`input.idle_s = 0.1`"), config, 0.0)
    for now_s in (1.0, 3.0, 5.0, 9.0, 11.0, 30.0):
        state, decision = decide(state, signals_of(lost), config, now_s)
        assert not decision.may_contribute, now_s
    assert decision.cause is Cause.UNKNOWN
