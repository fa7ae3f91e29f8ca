"""The rows of whether somebody uses the machine: input, terminals, films, or nobody can tell.

Runs in: agent. Stage 1 of the map. Pure.

Input on a desktop counts at once: the promise is that this stops the moment you touch the machine.
It cannot flap, since it takes `idle_minutes` without input to go on. In a terminal one also types
`allmende status`, so typing must go on for `pause_after_s`.

A row that vetoes lets go when the machine has been untouched for `idle_minutes`, of which the last
`resume_after_s` are its calm: a source that loses sight of the owner for a moment ends nothing.
"""

from __future__ import annotations

import math

from volunteer.policy.signals import IdleConfig, InputReading, Signals
from volunteer.policy.veto import Cause, Veto, at_once, duration, named

LOCKED_IDLE_S = 60.0
"""How long a locked desktop must be untouched: whoever types the password is back."""
_TOUCHED_S = 1.0
"""The least that counts as used: sources look about twice a second."""


def _asks_who_is_there(config: IdleConfig) -> bool:
    return not config.ignore_idle and not config.headless


def needed_idle_s(reading: InputReading, config: IdleConfig) -> float:
    """Return how long a desktop must be untouched to be idle."""
    if reading.is_locked and config.lock_counts_as_idle:
        return min(LOCKED_IDLE_S, config.idle_s)
    return config.idle_s


def _is_recent(idle_s: float, needed_s: float, config: IdleConfig, was: bool) -> bool:
    if was:
        return idle_s < max(needed_s - config.resume_after_s, _TOUCHED_S)
    return idle_s < needed_s


def _ends_at_s(
    idle_s: float | None, needed_s: float, config: IdleConfig, now_s: float
) -> float | None:
    if idle_s is None or math.isinf(idle_s):
        return None
    return now_s + max(needed_s, config.resume_after_s + _TOUCHED_S) - idle_s


def _is_unknown(signals: Signals, config: IdleConfig, now_s: float, was: bool) -> bool:
    reading = signals.input
    if reading.has_desktop is None:
        return True
    if reading.has_desktop:
        is_locked = reading.is_locked is True and config.lock_counts_as_idle
        return reading.idle_s is None and not is_locked
    return reading.terminal_idle_s is None or not config.terminals_count_as_use


def _unknown_reason(signals: Signals, config: IdleConfig) -> str:
    reading = signals.input
    if reading.failures:
        failed = "; ".join(f"{each.name}: {each.problem}" for each in reading.failures[:4])
        return f"nobody can tell whether you are using the machine ({failed})"
    if reading.has_desktop is False:
        return (
            "nobody can tell whether you are using the machine: it has no desktop, and terminals"
            " do not count (`terminals_count_as_use`)"
        )
    return "nobody can tell whether you are using the machine: nothing here says when it was used"


UNKNOWN_ENDS_WHEN = (
    "one of them tells; or, if nobody sits at this machine, you say"
    " `allmende config set headless true`, or allow fixed `hours` with it"
)


def _is_used(signals: Signals, config: IdleConfig, now_s: float, was: bool) -> bool:
    reading = signals.input
    if not reading.has_desktop:
        return reading.has_desktop is None and was
    if reading.idle_s is None:
        return was and not (reading.is_locked and config.lock_counts_as_idle)
    return _is_recent(reading.idle_s, needed_idle_s(reading, config), config, was)


def _input_reason(signals: Signals, config: IdleConfig) -> str:
    source = signals.input.desktop_source
    return f"you are using the machine ({source} says)" if source else "you are using the machine"


def _input_ends_when(signals: Signals, config: IdleConfig) -> str:
    needed_s = max(needed_idle_s(signals.input, config), config.resume_after_s)
    return f"it has not been touched for {duration(needed_s)} (`idle_minutes`)"


def _input_ends_at_s(signals: Signals, config: IdleConfig, now_s: float) -> float | None:
    needed_s = needed_idle_s(signals.input, config)
    return _ends_at_s(signals.input.idle_s, needed_s, config, now_s)


def _is_typed_at(signals: Signals, config: IdleConfig, now_s: float, was: bool) -> bool:
    idle_s = signals.input.terminal_idle_s
    if idle_s is None:
        return was and not signals.input.has_desktop
    return _is_recent(idle_s, config.idle_s, config, was)


def _terminal_ends_at_s(signals: Signals, config: IdleConfig, now_s: float) -> float | None:
    return _ends_at_s(signals.input.terminal_idle_s, config.idle_s, config, now_s)


UNKNOWN = Veto(
    cause=Cause.UNKNOWN,
    is_on=_asks_who_is_there,
    is_present=_is_unknown,
    reason=_unknown_reason,
    resumes_when=lambda signals, config: UNKNOWN_ENDS_WHEN,
    calm_reason="it can be told again whether you are using the machine",
)
INPUT = Veto(
    cause=Cause.INPUT,
    is_on=_asks_who_is_there,
    is_present=_is_used,
    reason=_input_reason,
    resumes_when=_input_ends_when,
    ends_at_s=_input_ends_at_s,
    calm_reason="the machine has not been touched for a while",
    pause_after_s=at_once,
)
TERMINAL = Veto(
    cause=Cause.TERMINAL,
    is_on=lambda config: _asks_who_is_there(config) and config.terminals_count_as_use,
    is_present=_is_typed_at,
    reason=lambda signals, config: (
        f"somebody is typing at {signals.input.terminal or 'a terminal'} (`terminals_count_as_use`)"
    ),
    resumes_when=lambda signals, config: (
        f"nobody has typed in a terminal for"
        f" {duration(max(config.idle_s, config.resume_after_s))} (`idle_minutes`)"
    ),
    ends_at_s=_terminal_ends_at_s,
    calm_reason="nobody has typed in a terminal for a while",
)
INHIBITED = Veto(
    cause=Cause.INHIBITED,
    is_on=lambda config: _asks_who_is_there(config) and config.pause_on_inhibitors,
    is_present=lambda signals, config, now_s, was: bool(signals.input.inhibitors),
    reason=lambda signals, config: f"{named(signals.input.inhibitors)} keeps the screen on",
    resumes_when=lambda signals, config: "it has ended (`pause_on_inhibitors`)",
    calm_reason="nothing keeps the screen on any more",
)
