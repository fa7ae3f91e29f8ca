"""The idle policy on any schedule: no flapping, never against a veto, and always with a reason."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.volunteer.test_idle import AT_REST, config_of
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
    own_disk_bytes=st.sampled_from([None, 0, 2**40]),
    own_ram_bytes=st.sampled_from([None, 0, 2**40]),
    ram_available_bytes=st.sampled_from([None, 0, 2**40]),
    temperature_celsius=st.sampled_from([None, 50.0, 87.0, 97.0]),
    data_used_bytes=st.sampled_from([0, 2**40]),
    data_renews_in_s=st.sampled_from([1.0, 1e6]),
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
        config_of("`monthly_data_budget_bytes = 1_000_000_000` `ignore_idle = true`"),
        config_of("`disk_max_bytes = 1_000_000_000` `ram_max_bytes = 1_000_000_000`"),
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


SAID = {Cause.OWNER, Cause.HOURS, Cause.NETWORK_HOURS, Cause.DATA_BUDGET, Cause.SLEEP}
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
    calm_s = max(row.resume_after_s(config) for row in VETOES if row.is_on(config))
    _, decision = decide(state, AT_REST, config, now_s + 1.01 + calm_s)
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
