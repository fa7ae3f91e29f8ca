"""What the system says over its bus: who is logged in, locks, sleep, the price of the network.

Runs in: agent. logind for sessions, its own inhibitors and sleep; NetworkManager for metering.
logind's IdleHint alone is never trusted: some desktops leave it at `no` for ever
(super-productivity#5554), others set it late.

A delay lock is held, so that the machine's sleep waits (5 s at most, as logind is configured) until
the trainer has saved its steps. It never keeps the machine awake.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from jeepney import DBusAddress

from volunteer.policy.sensors.bus import Bus, NotThereError
from volunteer.policy.sensors.places import Places
from volunteer.policy.sensors.watcher import SensorError

MANAGER = DBusAddress(
    "/org/freedesktop/login1", "org.freedesktop.login1", "org.freedesktop.login1.Manager"
)
NETWORK = DBusAddress(
    "/org/freedesktop/NetworkManager",
    "org.freedesktop.NetworkManager",
    "org.freedesktop.NetworkManager",
)
_METERED = {1: True, 2: False, 3: True, 4: False}
"""NMMetered: yes, no, guessed yes, guessed no."""
_SLOW_EVERY = 4
"""Sleep is asked for each time, the rest each fourth."""
_GRAPHICAL = ("x11", "wayland", "mir")


@dataclass(frozen=True, slots=True)
class Session:
    """One graphical session of a person."""

    user: str
    is_own: bool
    is_active: bool
    is_locked: bool
    idle_since_s: float | None
    """Instant on the monotonic clock, where the desktop has told logind that it is idle."""


@dataclass(frozen=True, slots=True)
class SystemReading:
    """What logind and NetworkManager say."""

    sessions: tuple[Session, ...] = ()
    inhibitors: tuple[str, ...] = ()
    is_going_to_sleep: bool = False
    is_metered: bool | None = None
    problem: str = ""


class SystemBusSource:
    """The services of the system bus."""

    name = "system bus"

    def __init__(self, places: Places) -> None:
        """Ask this machine's."""
        self._bus = Bus(places.system_bus, with_files=True)
        self._uid = os.getuid()
        self._turn = 0
        self._slow = SystemReading()
        self._sleep_lock: int | None = None
        self.may_sleep = False
        """Set by the agent once nothing is left to save; cleared when the machine has woken."""

    def read(self) -> SystemReading | None:
        """Return what they say; None where there is no logind, nor a NetworkManager."""
        self._bus.begin()
        try:
            is_going_to_sleep = bool(self._bus.get(MANAGER, "PreparingForSleep"))
        except NotThereError:
            is_metered = self._metered()
            return None if is_metered is None else SystemReading(is_metered=is_metered)
        self._hold_sleep(is_going_to_sleep)
        if self._turn % _SLOW_EVERY == 0:
            self._slow = SystemReading(
                sessions=self._sessions(), inhibitors=self._inhibitors(), is_metered=self._metered()
            )
        self._turn += 1
        return SystemReading(
            sessions=self._slow.sessions,
            inhibitors=self._slow.inhibitors,
            is_going_to_sleep=is_going_to_sleep,
            is_metered=self._slow.is_metered,
        )

    def close(self) -> None:
        """Let the machine sleep and close the connection."""
        self._release_sleep()
        self._bus.close()

    def _sessions(self) -> tuple[Session, ...]:
        sessions = []
        for _, uid, user, _, path in self._bus.call(MANAGER, "ListSessions")[0]:
            address = DBusAddress(path, MANAGER.bus_name, "org.freedesktop.login1.Session")
            try:
                values = self._bus.get_all(address)
            except NotThereError:  # it has just ended
                continue
            is_person = values.get("Class", "user").startswith("user")
            if is_person and values.get("Type") in _GRAPHICAL:
                sessions.append(_session(user, uid == self._uid, values))
        return tuple(sessions)

    def _inhibitors(self) -> tuple[str, ...]:
        listed = self._bus.call(MANAGER, "ListInhibitors")[0]
        return tuple(
            dict.fromkeys(
                who
                for what, who, _, mode, *_ in listed
                if mode == "block" and "idle" in what.split(":")
            )
        )

    def _metered(self) -> bool | None:
        try:
            return _METERED.get(self._bus.get(NETWORK, "Metered"))
        except NotThereError:
            return None

    def _hold_sleep(self, is_going_to_sleep: bool) -> None:
        """Hold the delay lock while awake; give it back when all is saved."""
        if is_going_to_sleep:
            if self.may_sleep:
                self._release_sleep()
            return
        self.may_sleep = False
        if self._sleep_lock is not None:
            return
        try:
            arguments = ("sleep", "Allmende", "saves its training steps", "delay")
            (lock,) = self._bus.call(MANAGER, "Inhibit", "ssss", *arguments)
        except SensorError:  # not allowed here: sleep is then noticed afterwards, by the clock
            self._sleep_lock = -1
            return
        self._sleep_lock = lock.to_raw_fd()

    def _release_sleep(self) -> None:
        if self._sleep_lock is not None and self._sleep_lock >= 0:
            os.close(self._sleep_lock)
        self._sleep_lock = None


def _session(user: str, is_own: bool, values: dict[str, Any]) -> Session:
    idle_since_s = None
    if values.get("IdleHint"):
        idle_since_s = time.monotonic() - max(0.0, time.time() - values["IdleSinceHint"] / 1e6)
    return Session(
        user=user,
        is_own=is_own,
        is_active=bool(values.get("Active")),
        is_locked=bool(values.get("LockedHint")),
        idle_since_s=idle_since_s,
    )
