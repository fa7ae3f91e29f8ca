"""What each source of the idle policy says just now, for `doctor` and the dashboard.

Runs in: agent. Pure: made of the watchers' latest readings. Each line has the source, its value,
what that means, and, where something is wrong, the one command or step that helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from volunteer.policy.sensors.display import DisplayReading
from volunteer.policy.sensors.foreign import ForeignReading
from volunteer.policy.sensors.load import LoadReading
from volunteer.policy.sensors.session_bus import DesktopReading
from volunteer.policy.sensors.small import Displays, OwnDiskReading, PowerReading
from volunteer.policy.sensors.system_bus import SystemReading
from volunteer.policy.sensors.terminals import TerminalReading
from volunteer.policy.sensors.watcher import Reading, Watcher
from volunteer.policy.signals import GpuReading
from volunteer.policy.veto import gb, named, percent

_HEADLESS = "allmende config set headless true"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """One source, live."""

    name: str
    is_well: bool
    """False: it should tell, and does not."""
    value: str
    meaning: str
    fix: str = ""
    """The one command or step that helps; empty where nothing is to be done."""


def report_sources(watchers: Iterable[Watcher[object]], now_s: float) -> list[SourceReport]:
    """Return a line for every source.

    Args:
        watchers: as `MachineSensors.watchers` returns them.
        now_s: the monotonic clock.
    """
    return [report_source(watcher.name, watcher.latest(), now_s) for watcher in watchers]


def report_source(name: str, reading: Reading[Any], now_s: float) -> SourceReport:
    """Return the line of one source."""
    if reading.is_first:
        return SourceReport(name=name, is_well=True, value="-", meaning="it has not told yet")
    if reading.problem:
        return SourceReport(
            name=name,
            is_well=False,
            value="-",
            meaning=f"it cannot tell: {reading.problem}",
            fix=_fix_of(name, reading.problem),
        )
    value, meaning = _described(name, reading.value, now_s)
    return SourceReport(name=name, is_well=True, value=value, meaning=meaning)


def _fix_of(name: str, problem: str) -> str:
    if name.startswith("X11") and "let us in" in problem:
        return "run the agent as the user of that desktop"
    if "reboot" in problem:
        return "sudo reboot"
    if name == "settings":
        return "allmende config path"
    if name.startswith(("X11", "Wayland")):
        return _HEADLESS
    return ""


def _described(name: str, value: object, now_s: float) -> tuple[str, str]:
    """Return (value, meaning) of what a source has said."""
    if value is None:
        return "none", "it is not there on this machine, and is not needed"
    describe = _DESCRIBE.get(type(value))
    return describe(value, now_s) if describe else ("read", f"{name} is as it should be")


def _touched(value: DisplayReading | ForeignReading, now_s: float) -> tuple[str, str]:
    return _idle(now_s - value.touched_at_s, "a key or a movement")


def _terminal(value: TerminalReading, now_s: float) -> tuple[str, str]:
    if math.isinf(value.touched_at_s):
        return "nobody", "nobody has typed in a terminal"
    return _idle(now_s - value.touched_at_s, f"typing at {value.name}")


def _load(value: LoadReading, now_s: float) -> tuple[str, str]:
    used = value.others_cpu_fraction
    who = f": {named(value.others_cpu)}" if value.others_cpu else ""
    shown = "not measured yet" if used is None else percent(used)
    return shown, f"of the CPU is used by other programs{who}"


def _gpu(value: GpuReading, now_s: float) -> tuple[str, str]:
    used = value.others_fraction
    shown = "cannot tell apart" if used is None else percent(used)
    return shown, "of the GPU is used by other programs"


def _displays(value: Displays, now_s: float) -> tuple[str, str]:
    return f"{len(value.x11)} X11, {len(value.wayland)} Wayland", "displays that are asked"


def _idle(seconds: float, what: str) -> tuple[str, str]:
    return f"{max(0.0, seconds):.0f} s", f"since {what} was last seen"


def _desktop(value: DesktopReading, now_s: float) -> tuple[str, str]:
    parts = []
    if value.inhibitors:
        parts.append(f"{named(value.inhibitors)} keeps the screen on")
    if value.games:
        parts.append(f"{value.games} games run")
    if value.is_saver_on:
        parts.append("the screen saver shows")
    if value.problem:
        parts.append(value.problem)
    told = "; ".join(parts) or "no film, no game"
    if value.touched_at_s is None:
        return "no Mutter", f"not GNOME: input is told elsewhere; {told}"
    return f"{max(0.0, now_s - value.touched_at_s):.0f} s", f"since input, GNOME says; {told}"


def _system(value: SystemReading, now_s: float) -> tuple[str, str]:
    metered = {True: "metered", False: "not metered", None: "unknown whether metered"}
    sessions = [f"{s.user}{' (locked)' if s.is_locked else ''}" for s in value.sessions]
    who = named(tuple(sessions)) if sessions else "nobody"
    return f"{len(sessions)} sessions", f"at a desktop: {who}; network {metered[value.is_metered]}"


def _power(value: PowerReading, now_s: float) -> tuple[str, str]:
    power = {True: "on battery", False: "on mains", None: "unknown power"}[value.on_battery]
    celsius = value.cpu_celsius
    return power, "CPU of unknown heat" if celsius is None else f"CPU at {celsius:.0f} degrees"


_DESCRIBE: dict[type, Callable[[Any, float], tuple[str, str]]] = {
    DisplayReading: _touched,
    ForeignReading: _touched,
    TerminalReading: _terminal,
    DesktopReading: _desktop,
    SystemReading: _system,
    LoadReading: _load,
    GpuReading: _gpu,
    PowerReading: _power,
    Displays: _displays,
    OwnDiskReading: lambda value, now_s: (
        gb(value.taken_bytes),
        "taken by our own data",
    ),
    int: lambda value, now_s: (gb(value), "free where the data lies"),
}
"""How each kind of reading is put in words: (value, meaning)."""
