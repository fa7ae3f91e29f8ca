"""All sensors of this machine, each in a thread of its own, and their readings as one value.

Runs in: agent. `read` never waits: what a thread has not told in time is unknown, with its name.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Protocol

from volunteer.config import Config
from volunteer.locations import Locations
from volunteer.policy.report import SourceReport, report_sources
from volunteer.policy.sensors.drm import DrmSource, find_cards
from volunteer.policy.sensors.foreign import ForeignPresence
from volunteer.policy.sensors.linux_presence import LinuxPresence, Presence
from volunteer.policy.sensors.load import LoadSource, own_processes
from volunteer.policy.sensors.macos import MacSource
from volunteer.policy.sensors.nvidia import NvidiaSource, has_library
from volunteer.policy.sensors.places import Places
from volunteer.policy.sensors.small import ConfigSource, DiskSource, OwnDiskSource, PowerSource
from volunteer.policy.sensors.watcher import Watcher
from volunteer.policy.sensors.windows import WindowsSource
from volunteer.policy.signals import GpuReading, Signals

LOAD_EVERY_S = 2.0
SETTINGS_EVERY_S = 1.0
SLOW_EVERY_S = 5.0
OWN_DISK_EVERY_S = 20.0
AWAKE_JUMP_S = 2.0
"""The clocks with and without sleep drift apart by this only while the machine sleeps."""


class PresenceSensors(Protocol):
    """Who uses the machine, on one kind of system."""

    def start(self) -> None:
        """Begin to watch."""

    def stop(self) -> None:
        """End."""

    def hurry(self) -> None:
        """Ask at once."""

    def watchers(self) -> list[Watcher[object]]:
        """Return every watcher."""

    def note_client(self, pid: int) -> None:
        """Say that a process talks to this program."""

    def allow_sleep(self) -> None:
        """Say that nothing is left to save."""

    def read(self, now_s: float) -> Presence:
        """Return the reading."""


class MachineSensors:
    """Everything that the policy reads."""

    def __init__(
        self,
        config: Config,
        locations: Locations,
        notify: Callable[[], None] = lambda: None,
        places: Places | None = None,
    ) -> None:
        """Prepare the sensors; `start` begins.

        Args:
            config: the owner's wishes at the start: which GPUs, which programs.
            locations: of whose data the disk is looked at, and whose settings are followed.
            notify: called, in some thread, when a reading has changed.
            places: where to read; None: this machine's own.
        """
        places = places or Places.from_environment(os.environ)
        self._config = config
        self._settings = Watcher(ConfigSource(locations.config_file), SETTINGS_EVERY_S, notify)
        self._presence = _presence(places, notify)
        self._disk = Watcher(DiskSource(locations.data_dir), SLOW_EVERY_S, notify)
        self._own_disk = Watcher(
            OwnDiskSource(locations.data_dir, self.config), OWN_DISK_EVERY_S, notify
        )
        self._power = Watcher(PowerSource(places), SLOW_EVERY_S, notify)
        self._load = Watcher(LoadSource(places, self.config), LOAD_EVERY_S, notify)
        self._gpus = _gpu_watchers(config, places, notify)
        self._asleep_s = _asleep_s()
        self._woke_at_s: float | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._presence.start()
        for watcher in self._own_watchers():
            watcher.start()

    def stop(self) -> None:
        """End; does not wait."""
        self._presence.stop()
        for watcher in self._own_watchers():
            watcher.stop()

    def wait_told(self, deadline_s: float) -> None:
        """Wait, in a thread that may, until every source has told something or is overdue."""
        until_s = time.monotonic() + deadline_s
        told: set[str] = set()
        while True:
            # Displays are found by the first look, and told by the second.
            self._presence.read(time.monotonic())
            new = [w for w in self.watchers() if w.name not in told]
            if not new:
                return
            for watcher in new:
                watcher.wait_told(max(0.0, until_s - time.monotonic()))
                told.add(watcher.name)

    def watchers(self) -> list[Watcher[object]]:
        """Return every watcher there is now."""
        return [*self._presence.watchers(), *self._own_watchers()]

    def note_client(self, pid: int) -> None:
        """Say that a process, perhaps in a terminal, talks to this program."""
        self._presence.note_client(pid)

    def allow_sleep(self) -> None:
        """Say that nothing is left to save before the machine sleeps."""
        self._presence.allow_sleep()

    def reports(self) -> list[SourceReport]:
        """Return what each source says just now, in words."""
        return report_sources(self.watchers(), time.monotonic())

    def config(self) -> Config:
        """Return the owner's wishes as the file has them now; the last valid ones."""
        found = self._settings.latest()
        if found.value is not None:
            self._config = found.value
        return self._config

    @property
    def settings_problem(self) -> str:
        """What is wrong with the file now; the last valid settings go on to hold."""
        return self._settings.latest().problem

    def read(self, now_s: float) -> Signals:
        """Return all readings; never waits.

        Args:
            now_s: the agent's clock.
        """
        self._note_sleep(now_s)
        presence = self._presence.read(time.monotonic())
        power, load = self._power.latest(), self._load.latest().value
        own_disk = self._own_disk.latest().value
        config = self.config()
        asks_time = bool(config.hours or config.network_hours)
        return Signals(
            local_time=datetime.now().astimezone() if asks_time else None,
            is_going_to_sleep=presence.is_going_to_sleep,
            woke_at_s=self._woke_at_s,
            disk_free_bytes=self._disk.latest().value,
            own_disk_bytes=own_disk.taken_bytes if own_disk is not None else None,
            own_ram_bytes=load.own_ram_bytes if load is not None else None,
            ram_available_bytes=load.ram_available_bytes if load is not None else None,
            temperature_celsius=power.value.cpu_celsius if power.value is not None else None,
            on_battery=power.value.on_battery if power.value is not None else None,
            is_metered=presence.is_metered,
            input=presence.input,
            games=presence.games,
            exclusive_programs=load.exclusive if load is not None else (),
            others_cpu_fraction=load.others_cpu_fraction if load is not None else None,
            others_cpu=load.others_cpu if load is not None else (),
            gpu=_together([w.latest().value or GpuReading() for w in self._gpus]),
        )

    def _own_watchers(self) -> list[Watcher[object]]:
        few = [self._settings, self._disk, self._own_disk, self._power, self._load]
        return [*few, *self._gpus]  # type: ignore[list-item]

    def _note_sleep(self, now_s: float) -> None:
        asleep_s = _asleep_s()
        if asleep_s - self._asleep_s > AWAKE_JUMP_S:
            self._woke_at_s = now_s
            self._presence.hurry()
        self._asleep_s = asleep_s


def _presence(
    places: Places, notify: Callable[[], None], platform: str = sys.platform
) -> PresenceSensors:
    if platform == "darwin":
        return ForeignPresence(MacSource(), notify)
    if platform == "win32":
        return ForeignPresence(WindowsSource(), notify)
    return LinuxPresence(places, notify)


def _gpu_watchers(
    config: Config, places: Places, notify: Callable[[], None]
) -> list[Watcher[GpuReading]]:
    is_trained_on = config.device not in ("cpu", "mps")
    watchers: list[Watcher[GpuReading]] = []
    if has_library():
        nvidia = NvidiaSource(config.gpus, own_processes, is_trained_on=is_trained_on)
        watchers.append(Watcher(nvidia, LOAD_EVERY_S, notify))
    if sys.platform == "linux" and find_cards(places):
        drm = DrmSource(places, own_processes, is_trained_on=is_trained_on)
        watchers.append(Watcher(drm, LOAD_EVERY_S, notify))
    return watchers


def _together(readings: list[GpuReading]) -> GpuReading:
    if len(readings) == 1:
        return readings[0]
    used = [r.others_fraction for r in readings if r.others_fraction is not None]
    free = [r.free_bytes for r in readings if r.free_bytes is not None]
    hot = [r.temperature_celsius for r in readings if r.temperature_celsius is not None]
    return GpuReading(
        others_fraction=max(used, default=None),
        free_bytes=min(free, default=None),
        temperature_celsius=max(hot, default=None),
        others=tuple(name for r in readings for name in r.others),
    )


def _asleep_s() -> float:
    """Return how long this machine has slept since it started, where the system tells."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    if sys.platform == "darwin":
        # CLOCK_MONOTONIC goes on while a Mac sleeps; time.monotonic() does not.
        return time.clock_gettime(time.CLOCK_MONOTONIC) - time.monotonic()
    return 0.0
