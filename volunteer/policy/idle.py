"""Whether to contribute now, the one reason why not, what ends it and when.

Runs in: agent. Stage 1 of the map: everything else waits for this. Pure: `decide` is a function of
the state that it returned last, the readings, the owner's wishes and the time.

`VETOES` is the decision table, as policy/README.md shows it: the first row that vetoes is the
reason. A new sensor is a field of Signals, a row here and a row there. What the owner says counts
at once; a sensor must be steady for `pause_after_s` before it pauses, and for `resume_after_s`
before it lets go, so that nothing flaps. At the start there is nothing to flap: readings count at
once.

Not sensed yet: keyboard and mouse, other programs on the GPU. Nothing here stands in for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from volunteer.policy.signals import IdleConfig, Signals


class Cause(StrEnum):
    """Which row decided."""

    NOTHING = "nothing"
    """No row vetoes."""
    DISK = "disk"
    OWNER = "owner"
    BATTERY = "battery"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now, and what to tell the owner."""

    may_contribute: bool
    cause: Cause
    reason: str
    """One sentence."""
    resumes_when: str
    """What ends it, as in `resumes when ...`; empty while contributing."""
    resumes_at_s: float | None
    """The earliest instant at which it ends by itself; None: nobody can know, or it is now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SensorState:
    """What one sensor row stood for until now."""

    is_vetoing: bool
    differs_since_s: float | None = None
    """Since when its readings have said the opposite; None: they do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleState:
    """What `decide` remembers; a fresh one has seen nothing."""

    sensors: Mapping[Cause, SensorState] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Veto:
    """One row of the table."""

    cause: Cause
    is_sensor: bool
    """Whether it must be steady; the owner's word counts at once."""
    is_on: Callable[[IdleConfig], bool]
    """Whether the owner wants it at all."""
    is_present: Callable[[Signals, IdleConfig, float], bool]
    """Whether this moment's readings veto."""
    reason: Callable[[Signals, IdleConfig], str]
    resumes_when: Callable[[Signals, IdleConfig], str]
    resumes_at_s: Callable[[Signals], float | None] = lambda signals: None
    """When the readings will change by themselves."""
    calm_reason: str = ""
    """The reason while a sensor's readings no longer veto, but not for long enough yet."""


def decide(
    state: IdleState, signals: Signals, config: IdleConfig, now_s: float
) -> tuple[IdleState, Decision]:
    """Decide whether to contribute.

    Args:
        state: as returned by the last call; `IdleState()` for the first.
        signals: this moment's readings.
        config: the owner's wishes.
        now_s: seconds of a clock that never goes back and counts sleep.

    Returns:
        The state for the next call, and the decision.
    """
    sensors = {
        row.cause: _follow(
            state.sensors.get(row.cause), row.is_present(signals, config, now_s), config, now_s
        )
        for row in VETOES
        if row.is_sensor
    }
    for row in VETOES:
        if not row.is_on(config):
            continue
        if not row.is_sensor and row.is_present(signals, config, now_s):
            return IdleState(sensors=sensors), _refuse(row, signals, config)
        if row.is_sensor and sensors[row.cause].is_vetoing:
            calm_since_s = sensors[row.cause].differs_since_s
            if calm_since_s is None:
                return IdleState(sensors=sensors), _refuse(row, signals, config)
            return IdleState(sensors=sensors), _wait_for_calm(row, config, calm_since_s)
    return IdleState(sensors=sensors), CONTRIBUTE


CONTRIBUTE = Decision(
    may_contribute=True,
    cause=Cause.NOTHING,
    reason="nothing stands against it",
    resumes_when="",
    resumes_at_s=None,
)


def _follow(
    sensor: SensorState | None, is_present: bool, config: IdleConfig, now_s: float
) -> SensorState:
    """Let a sensor's row follow its reading, once that has been steady for long enough."""
    if sensor is None or sensor.is_vetoing == is_present:
        return SensorState(is_vetoing=is_present)
    since_s = now_s if sensor.differs_since_s is None else sensor.differs_since_s
    steady_s = config.pause_after_s if is_present else config.resume_after_s
    if now_s - since_s >= steady_s:
        return SensorState(is_vetoing=is_present)
    return SensorState(is_vetoing=sensor.is_vetoing, differs_since_s=since_s)


def _refuse(row: Veto, signals: Signals, config: IdleConfig) -> Decision:
    return Decision(
        may_contribute=False,
        cause=row.cause,
        reason=row.reason(signals, config),
        resumes_when=row.resumes_when(signals, config),
        resumes_at_s=row.resumes_at_s(signals),
    )


def _wait_for_calm(row: Veto, config: IdleConfig, calm_since_s: float) -> Decision:
    return Decision(
        may_contribute=False,
        cause=row.cause,
        reason=row.calm_reason,
        resumes_when=f"that has lasted for {config.resume_after_s:g} s",
        resumes_at_s=calm_since_s + config.resume_after_s,
    )


def _is_paused(signals: Signals, config: IdleConfig, now_s: float) -> bool:
    pause = signals.owner_pause
    return pause is not None and (pause.until_s is None or now_s < pause.until_s)


def _pause_ends_when(signals: Signals, config: IdleConfig) -> str:
    assert signals.owner_pause is not None
    if signals.owner_pause.until_s is None:
        return "you say `allmende resume`"
    return "the pause ends, or you say `allmende resume`"


def _pause_ends_at_s(signals: Signals) -> float | None:
    assert signals.owner_pause is not None
    return signals.owner_pause.until_s


def _is_disk_full(signals: Signals, config: IdleConfig, now_s: float) -> bool:
    free = signals.disk_free_bytes
    return free is None or free < config.disk_min_free_bytes


def _disk_reason(signals: Signals, config: IdleConfig) -> str:
    if signals.disk_free_bytes is None:
        return "nobody can tell how full the disk is"
    return f"the disk is nearly full: {_gb(signals.disk_free_bytes)} free"


def _disk_ends_when(signals: Signals, config: IdleConfig) -> str:
    if signals.disk_free_bytes is None:
        return "the disk can be read again"
    return f"{_gb(config.disk_min_free_bytes)} are free (`disk_min_free_bytes`)"


def _is_on_battery(signals: Signals, config: IdleConfig, now_s: float) -> bool:
    # A machine that has a battery and hides its state counts as on battery: the owner's side.
    return signals.on_battery is not False


def _battery_reason(signals: Signals, config: IdleConfig) -> str:
    if signals.on_battery is None:
        return "nobody can tell whether the machine runs on battery"
    return "the machine runs on battery"


def _battery_ends_when(signals: Signals, config: IdleConfig) -> str:
    if signals.on_battery is None:
        return "the battery can be read, or `pause_on_battery` is false"
    return "it is on mains power"


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"


VETOES = (
    Veto(
        cause=Cause.DISK,
        is_sensor=True,
        is_on=lambda config: True,
        is_present=_is_disk_full,
        reason=_disk_reason,
        resumes_when=_disk_ends_when,
        calm_reason="the disk has room again",
    ),
    Veto(
        cause=Cause.OWNER,
        is_sensor=False,
        is_on=lambda config: True,
        is_present=_is_paused,
        reason=lambda signals, config: "paused by you",
        resumes_when=_pause_ends_when,
        resumes_at_s=_pause_ends_at_s,
    ),
    Veto(
        cause=Cause.BATTERY,
        is_sensor=True,
        is_on=lambda config: config.pause_on_battery and not config.ignore_idle,
        is_present=_is_on_battery,
        reason=_battery_reason,
        resumes_when=_battery_ends_when,
        calm_reason="the machine is on mains power again",
    ),
)
"""The decision table, the strongest first; policy/README.md is the same for people."""
