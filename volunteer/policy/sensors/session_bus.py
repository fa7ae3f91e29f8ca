"""What the desktop says over the session bus: input, films, games, the screen saver.

Runs in: agent. GNOME's Mutter tells how long nothing was touched; GNOME and KDE tell who keeps the
screen on; GameMode which games run. A service that is not there is no failure.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from jeepney import DBusAddress

from volunteer.policy.sensors.bus import Bus, NotThereError
from volunteer.policy.sensors.places import Places
from volunteer.policy.sensors.watcher import SensorError

MUTTER = DBusAddress(
    "/org/gnome/Mutter/IdleMonitor/Core",
    "org.gnome.Mutter.IdleMonitor",
    "org.gnome.Mutter.IdleMonitor",
)
GNOME = DBusAddress(
    "/org/gnome/SessionManager", "org.gnome.SessionManager", "org.gnome.SessionManager"
)
KDE = DBusAddress(
    "/org/kde/Solid/PowerManagement/PolicyAgent",
    "org.kde.Solid.PowerManagement.PolicyAgent",
    "org.kde.Solid.PowerManagement.PolicyAgent",
)
GAME_MODE = DBusAddress(
    "/com/feralinteractive/GameMode",
    "com.feralinteractive.GameMode",
    "com.feralinteractive.GameMode",
)
SAVERS = (
    DBusAddress("/org/gnome/ScreenSaver", "org.gnome.ScreenSaver", "org.gnome.ScreenSaver"),
    DBusAddress("/ScreenSaver", "org.freedesktop.ScreenSaver", "org.freedesktop.ScreenSaver"),
    DBusAddress(
        "/org/freedesktop/ScreenSaver", "org.freedesktop.ScreenSaver", "org.freedesktop.ScreenSaver"
    ),
)
_GNOME_IDLE = 8
"""The flag of GNOME's inhibitors for `do not count as idle`."""
_KDE_SCREEN = 4
"""KDE's, for `do not switch the screen off`."""
_NO_BUS = "there is no such bus"
_SLOW_EVERY = 4
"""Input is asked for each time, the rest each fourth."""


@dataclass(frozen=True, slots=True)
class DesktopReading:
    """What the desktop's services say; None: there is no such service."""

    touched_at_s: float | None = None
    """Instant on the monotonic clock of the last input that Mutter saw."""
    inhibitors: tuple[str, ...] = ()
    games: int = 0
    is_saver_on: bool | None = None
    problem: str = ""
    """What one of them does not tell although it is there."""


class SessionBusSource:
    """The services of one user's session bus."""

    name = "session bus"

    def __init__(self, places: Places) -> None:
        """Ask this user's."""
        self._bus = Bus(places.session_bus)
        self._turn = 0
        self._slow = DesktopReading()
        self._problems: list[str] = []

    def read(self) -> DesktopReading | None:
        """Return what they say; None where there is no session bus."""
        self._bus.begin()
        problems: list[str] = []
        idle_ms = self._ask(problems, MUTTER, "GetIdletime")
        if problems == [_NO_BUS]:
            return None
        if self._turn % _SLOW_EVERY == 0:
            self._problems.clear()
            self._slow = self._read_slow()
        self._turn += 1
        return DesktopReading(
            touched_at_s=None if idle_ms is None else time.monotonic() - idle_ms / 1000.0,
            inhibitors=self._slow.inhibitors,
            games=self._slow.games,
            is_saver_on=self._slow.is_saver_on,
            problem="; ".join([*problems, *self._problems][:2]),
        )

    def close(self) -> None:
        """Close the connection."""
        self._bus.close()

    def _read_slow(self) -> DesktopReading:
        savers = [self._ask(self._problems, saver, "GetActive") for saver in SAVERS]
        told = [bool(is_on) for is_on in savers if is_on is not None]
        return DesktopReading(
            inhibitors=(*self._gnome_inhibitors(), *self._kde_inhibitors()),
            games=len(self._ask(self._problems, GAME_MODE, "ListGames") or ()),
            is_saver_on=any(told) if told else None,
        )

    def _gnome_inhibitors(self) -> tuple[str, ...]:
        problems = self._problems
        if not self._ask(problems, GNOME, "IsInhibited", "u", _GNOME_IDLE):
            return ()
        names = []
        for path in self._ask(problems, GNOME, "GetInhibitors") or ():
            one = DBusAddress(path, GNOME.bus_name, "org.gnome.SessionManager.Inhibitor")
            if (self._ask(problems, one, "GetFlags") or 0) & _GNOME_IDLE:
                names.append(self._ask(problems, one, "GetAppId") or "")
        return tuple(dict.fromkeys(filter(None, names))) or ("a program",)

    def _kde_inhibitors(self) -> tuple[str, ...]:
        if not self._ask(self._problems, KDE, "HasInhibition", "u", _KDE_SCREEN):
            return ()
        listed = self._ask(self._problems, KDE, "ListInhibitions") or ()
        return tuple(dict.fromkeys(name for name, _ in listed)) or ("a program",)

    def _ask(
        self,
        problems: list[str],
        address: DBusAddress,
        method: str,
        signature: str = "",
        *arguments: object,
    ) -> Any:  # noqa: ANN401 - each method answers with a type of its own
        """Return a method's first answer; None, and perhaps a problem, where there is none."""
        try:
            answer = self._bus.call(address, method, signature, *arguments)
        except NotThereError as error:
            if str(error) == _NO_BUS:
                problems.append(_NO_BUS)
            return None
        except SensorError as error:
            problems.append(str(error))
            return None
        return answer[0] if answer else None
