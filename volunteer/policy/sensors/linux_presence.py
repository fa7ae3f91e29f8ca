"""Who uses this Linux machine: every source of it, each in a thread of its own.

Runs in: agent. Stages: displays are found, every source is watched, `presence.combine` makes one
reading of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from volunteer.policy.sensors.display import DisplayReading, is_news
from volunteer.policy.sensors.places import Places
from volunteer.policy.sensors.presence import Sources, combine
from volunteer.policy.sensors.session_bus import DesktopReading, SessionBusSource
from volunteer.policy.sensors.shared_idle import SharedIdleSource
from volunteer.policy.sensors.small import DisplayFinder, can_hide_desktop
from volunteer.policy.sensors.system_bus import SystemBusSource, SystemReading
from volunteer.policy.sensors.terminals import TerminalSource, terminal_of
from volunteer.policy.sensors.watcher import Source, Watcher
from volunteer.policy.sensors.wayland import WaylandSource
from volunteer.policy.sensors.x11 import X11Source
from volunteer.policy.signals import InputReading

INPUT_EVERY_S = 0.4
TERMINALS_EVERY_S = 1.0
DISPLAYS_EVERY_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """What all of them say."""

    input: InputReading
    games: int = 0
    is_going_to_sleep: bool = False
    is_metered: bool | None = None


class LinuxPresence:
    """The watchers of one machine."""

    def __init__(self, places: Places, notify: Callable[[], None]) -> None:
        """Prepare them; `start` begins."""
        self._places = places
        self._notify = notify
        self._started_at_s = time.monotonic()
        self._is_hidden = can_hide_desktop(places)
        self._terminal_source = TerminalSource(places)
        self._system_source = SystemBusSource(places)
        self._finder = Watcher(DisplayFinder(places), DISPLAYS_EVERY_S, notify)
        self._shared = Watcher(SharedIdleSource(places), INPUT_EVERY_S, notify, is_news=is_news)
        self._desktop = Watcher(
            SessionBusSource(places), INPUT_EVERY_S, notify, is_news=_is_desktop_news
        )
        self._system: Watcher[SystemReading | None] = Watcher(
            self._system_source, INPUT_EVERY_S, notify
        )
        self._terminals = Watcher(self._terminal_source, TERMINALS_EVERY_S, notify)
        self._displays: dict[str, Watcher[DisplayReading | None]] = {}

    def start(self) -> None:
        """Begin to watch."""
        for watcher in self.watchers():
            watcher.start()

    def stop(self) -> None:
        """End; does not wait."""
        for watcher in self.watchers():
            watcher.stop()

    def hurry(self) -> None:
        """Have all of them ask at once."""
        for watcher in self.watchers():
            watcher.hurry()

    def watchers(self) -> list[Watcher[object]]:
        """Return every watcher there is now."""
        fixed = (self._finder, self._shared, self._desktop, self._system, self._terminals)
        return [*fixed, *self._displays.values()]  # type: ignore[list-item]  # read only

    def note_client(self, pid: int) -> None:
        """Say that a process that may sit in a terminal talks to this program."""
        device = terminal_of(pid, self._places.proc_dir)
        if device is not None:
            self._terminal_source.note_talk(device)

    def allow_sleep(self) -> None:
        """Say that nothing is left to save before the machine sleeps."""
        self._system_source.may_sleep = True

    def read(self, now_s: float) -> Presence:
        """Return the reading at `now_s` of the monotonic clock; never waits."""
        self._follow_displays()
        sources = self.sources()
        system, desktop = sources.system.value, sources.desktop.value
        return Presence(
            input=combine(sources, now_s),
            games=desktop.games if desktop is not None else 0,
            is_going_to_sleep=system is not None and system.is_going_to_sleep,
            is_metered=system.is_metered if system is not None else None,
        )

    def sources(self) -> Sources:
        """Return the latest of each."""
        return Sources(
            displays={name: watcher.latest() for name, watcher in self._displays.items()},
            shared=self._shared.latest(),
            desktop=self._desktop.latest(),
            system=self._system.latest(),
            terminals=self._terminals.latest(),
            is_hidden=self._is_hidden,
            started_at_s=self._started_at_s,
        )

    def _follow_displays(self) -> None:
        """Watch the displays that there are, and no others."""
        found = self._finder.latest().value
        if found is None:
            return  # the finder is slow just now: what is watched stays so
        wanted: dict[str, tuple[Source[DisplayReading | None], float]] = {}
        for number in found.x11:
            source: Source[DisplayReading | None] = X11Source(self._places, number)
            wanted[source.name] = (source, INPUT_EVERY_S)
        for socket_file in found.wayland:
            source = WaylandSource(socket_file)
            wanted[source.name] = (source, 0.0)  # it waits for news by itself
        for name in set(self._displays) - set(wanted):
            self._displays.pop(name).stop()
        for name in set(wanted) - set(self._displays):
            source, every_s = wanted[name]
            watcher = Watcher(source, every_s, self._notify, is_news=is_news)
            self._displays[name] = watcher
            watcher.start()


def _is_desktop_news(before: DesktopReading | None, after: DesktopReading | None) -> bool:
    if before is None or after is None:
        return before is not after
    touched = [DisplayReading(r.touched_at_s) if r.touched_at_s is not None else None
               for r in (before, after)]  # fmt: skip
    rest = [(r.inhibitors, r.games, r.is_saver_on, r.problem) for r in (before, after)]
    return rest[0] != rest[1] or is_news(*touched)
