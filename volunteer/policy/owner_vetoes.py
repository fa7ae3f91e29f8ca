"""The rows of what the owner said: pause, snooze, finish, and the hours that they allow.

Runs in: agent. Stage 1 of the map. Pure.
"""

from __future__ import annotations

from datetime import timedelta

from volunteer.policy.hours import DAYS, WeekHours, minute_of_week, seconds_until_open
from volunteer.policy.signals import IdleConfig, Signals
from volunteer.policy.veto import Cause, Veto, at_once


def _is_paused(signals: Signals, config: IdleConfig, now_s: float, was: bool) -> bool:
    pause = signals.owner_pause
    if pause is None or (pause.until_s is not None and now_s >= pause.until_s):
        return False
    if pause.at_latest_s is not None and now_s >= pause.at_latest_s:
        return True
    return pause.after_round is None or signals.round_index >= pause.after_round


def _pause_reason(signals: Signals, config: IdleConfig) -> str:
    pause = signals.owner_pause
    assert pause is not None
    if pause.after_round is None:
        return "paused by you"
    if signals.round_index < pause.after_round:
        return f"paused as you said: round {pause.after_round - 1} did not close in time"
    return f"finished as you said: round {pause.after_round - 1} has closed"


def _pause_ends_when(signals: Signals, config: IdleConfig) -> str:
    assert signals.owner_pause is not None
    if signals.owner_pause.until_s is None:
        return "you say `allmende resume`"
    return "the pause ends, or you say `allmende resume`"


def _pause_ends_at_s(signals: Signals, config: IdleConfig, now_s: float) -> float | None:
    assert signals.owner_pause is not None
    return signals.owner_pause.until_s


def is_open(hours: WeekHours, signals: Signals) -> bool:
    """Return whether the wall clock is inside `hours`; without a clock it is."""
    if signals.local_time is None:
        return True
    return hours.is_open(minute_of_week(signals.local_time))


def _opening(hours: WeekHours, signals: Signals) -> str:
    """Return when `hours` opens next, as `mon 18:00`."""
    assert signals.local_time is not None
    wait_s = seconds_until_open(hours, signals.local_time)
    assert wait_s is not None, "no hours at all are refused when the settings are read"
    # Rounded: the wall clock's microseconds must not make it a minute earlier.
    opens = signals.local_time + timedelta(seconds=wait_s + 0.5)
    return f"{DAYS[opens.weekday()]} {opens:%H:%M}"


def _ends_at_s(hours: WeekHours, signals: Signals, now_s: float) -> float | None:
    assert signals.local_time is not None
    wait_s = seconds_until_open(hours, signals.local_time)
    return None if wait_s is None else now_s + wait_s


OWNER = Veto(
    cause=Cause.OWNER,
    is_on=lambda config: True,
    is_present=_is_paused,
    reason=_pause_reason,
    resumes_when=_pause_ends_when,
    ends_at_s=_pause_ends_at_s,
    pause_after_s=at_once,
    resume_after_s=at_once,
)
HOURS = Veto(
    cause=Cause.HOURS,
    is_present=lambda signals, config, now_s, was: not is_open(config.hours, signals),
    reason=lambda signals, config: "it is outside the hours that you allow (`hours`)",
    resumes_when=lambda signals, config: f"it is {_opening(config.hours, signals)}",
    ends_at_s=lambda signals, config, now_s: _ends_at_s(config.hours, signals, now_s),
    pause_after_s=at_once,
    resume_after_s=at_once,
)
NETWORK_HOURS = Veto(
    cause=Cause.NETWORK_HOURS,
    is_present=lambda signals, config, now_s, was: not is_open(config.network_hours, signals),
    reason=lambda signals, config: (
        "it is outside the hours in which you allow the network (`network_hours`)"
    ),
    resumes_when=lambda signals, config: f"it is {_opening(config.network_hours, signals)}",
    ends_at_s=lambda signals, config, now_s: _ends_at_s(config.network_hours, signals, now_s),
    pause_after_s=at_once,
    resume_after_s=at_once,
    holds_network=True,
)
