"""Whether somebody uses this machine, out of what every source says.

Runs in: agent. Pure. The least idle time of all sources that answer counts; a source that should
tell and does not is named. A desktop that nobody can read is not idle: it is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from volunteer.policy.sensors.display import DisplayReading
from volunteer.policy.sensors.session_bus import DesktopReading
from volunteer.policy.sensors.system_bus import Session, SystemReading
from volunteer.policy.sensors.terminals import TerminalReading
from volunteer.policy.sensors.watcher import Reading
from volunteer.policy.signals import InputReading, SourceFailure

HIDDEN = "this is a container or WSL: the desktop around it cannot be seen from inside"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The latest of every source of this kind."""

    displays: Mapping[str, Reading[DisplayReading | None]]
    """X11 and Wayland displays, by name."""
    shared: Reading[DisplayReading | None]
    """The idle_detect daemon."""
    desktop: Reading[DesktopReading | None]
    """The session bus."""
    system: Reading[SystemReading | None]
    """The system bus."""
    terminals: Reading[TerminalReading]
    is_hidden: bool
    """Whether a desktop may be there that cannot be seen from here."""
    started_at_s: float
    """Instant on the monotonic clock at which this program was started."""


def combine(sources: Sources, now_s: float) -> InputReading:
    """Return the input reading at `now_s` of the monotonic clock."""
    touched = _touched(sources)
    sessions = _sessions(sources)
    has_desktop = _has_desktop(sources, sessions)
    name, touched_at_s = max(touched.items(), key=lambda item: item[1], default=("", math.nan))
    terminal = sources.terminals.value
    return InputReading(
        has_desktop=has_desktop,
        idle_s=max(0.0, now_s - touched_at_s) if touched else None,
        desktop_source=name,
        is_locked=_is_locked(sources, sessions),
        terminal_idle_s=_terminal_idle_s(terminal, sources, has_desktop, now_s),
        terminal=terminal.name if terminal is not None else "",
        inhibitors=_inhibitors(sources),
        failures=_failures(sources, sessions, has_told=bool(touched)),
    )


def _touched(sources: Sources) -> dict[str, float]:
    """Return when each answering source saw a desktop being touched."""
    touched = {
        name: reading.value.touched_at_s
        for name, reading in sources.displays.items()
        if reading.value is not None
    }
    if sources.shared.value is not None:
        touched["idle_detect"] = sources.shared.value.touched_at_s
    if sources.desktop.value is not None and sources.desktop.value.touched_at_s is not None:
        touched["GNOME"] = sources.desktop.value.touched_at_s
    for session in _sessions(sources):
        # Of somebody else's session nothing but logind's hint can be read.
        if session.is_active and not session.is_own and session.idle_since_s is not None:
            touched[f"{session.user}'s session"] = session.idle_since_s
    if not touched:
        hints = [s.idle_since_s for s in _sessions(sources) if s.is_active]
        told = [hint for hint in hints if hint is not None]
        if told and len(told) == len(hints):
            touched["logind"] = max(told)
    return touched


def _sessions(sources: Sources) -> tuple[Session, ...]:
    return sources.system.value.sessions if sources.system.value is not None else ()


def _has_desktop(sources: Sources, sessions: tuple[Session, ...]) -> bool | None:
    has_display = any(r.value is not None or r.problem for r in sources.displays.values())
    if sessions or has_display or sources.shared.value is not None:
        return True
    if sources.desktop.value is not None and sources.desktop.value.touched_at_s is not None:
        return True
    return None if sources.is_hidden else False


def _is_locked(sources: Sources, sessions: tuple[Session, ...]) -> bool | None:
    if sources.desktop.value is not None and sources.desktop.value.is_saver_on:
        return True
    if not sessions:
        return None
    return all(session.is_locked or not session.is_active for session in sessions)


def _terminal_idle_s(
    terminal: TerminalReading | None, sources: Sources, has_desktop: bool | None, now_s: float
) -> float | None:
    if terminal is None:
        return None
    if has_desktop is False and terminal.touched_at_s <= sources.started_at_s:
        return math.inf  # whoever started it there has said go
    return max(0.0, now_s - terminal.touched_at_s)


def _inhibitors(sources: Sources) -> tuple[str, ...]:
    named: list[str] = []
    if sources.desktop.value is not None:
        named += sources.desktop.value.inhibitors
    if sources.system.value is not None:
        named += sources.system.value.inhibitors
    if not named and any(r.value and r.value.is_inhibited for r in sources.displays.values()):
        named.append("a program")
    return tuple(dict.fromkeys(named))


def _failures(
    sources: Sources, sessions: tuple[Session, ...], *, has_told: bool
) -> tuple[SourceFailure, ...]:
    problems = {name: reading.problem for name, reading in sources.displays.items()}
    problems["idle_detect"] = sources.shared.problem
    problems["session bus"] = sources.desktop.problem
    problems["system bus"] = sources.system.problem
    problems["terminals"] = sources.terminals.problem
    failures = [
        SourceFailure(name=n, problem=problem) for n, problem in problems.items() if problem
    ]
    if sources.desktop.value is not None and sources.desktop.value.problem:
        failures.append(SourceFailure(name="session bus", problem=sources.desktop.value.problem))
    unseen = [s.user for s in sessions if s.is_active and not s.is_own and s.idle_since_s is None]
    failures += [
        SourceFailure(name="logind", problem=f"does not say whether {user} is away")
        for user in unseen
    ]
    if sources.is_hidden and not has_told:
        failures.append(SourceFailure(name="desktop", problem=HIDDEN))
    return tuple(failures)
