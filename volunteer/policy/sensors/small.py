"""Sources of one number each: disk, power, displays that come and go.

Runs in: agent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from volunteer.config import Config, load_config
from volunteer.errors import ConfigError
from volunteer.policy.sensors import wayland, x11
from volunteer.policy.sensors.battery import read_on_battery
from volunteer.policy.sensors.disk import read_free_bytes, read_tree_bytes
from volunteer.policy.sensors.places import Places
from volunteer.policy.sensors.thermal import read_cpu_celsius
from volunteer.policy.sensors.watcher import SensorError


@dataclass(frozen=True, slots=True)
class PowerReading:
    """Battery and heat."""

    on_battery: bool | None
    cpu_celsius: float | None


class PowerSource:
    """Battery and heat, of which a broken driver may hang."""

    name = "power"

    def __init__(self, places: Places) -> None:
        """Read the sysfs of `places`."""
        self._places = places

    def read(self) -> PowerReading:
        """Return both."""
        supplies = self._places.sys_dir / "class" / "power_supply"
        return PowerReading(read_on_battery(supplies), read_cpu_celsius(self._places))

    def close(self) -> None:
        """Nothing is held open."""


class DiskSource:
    """Room where the data lies, perhaps on a network's disk that hangs."""

    name = "disk"

    def __init__(self, folder: Path) -> None:
        """Look at the disk of `folder`."""
        self._folder = folder

    def read(self) -> int | None:
        """Return the bytes that are free to us."""
        return read_free_bytes(self._folder)

    def close(self) -> None:
        """Nothing is held open."""


@dataclass(frozen=True, slots=True)
class OwnDiskReading:
    """What this program's data takes."""

    taken_bytes: int


class OwnDiskSource:
    """What this program's own data takes on the disk."""

    name = "own data"

    def __init__(self, folder: Path, config: Callable[[], Config]) -> None:
        """Add up the files below `folder`, where the owner limits them."""
        self._folder = folder
        self._config = config

    def read(self) -> OwnDiskReading | None:
        """Return what they take; None where no limit is set."""
        if not self._config().disk_max_bytes:
            return None
        return OwnDiskReading(read_tree_bytes(self._folder))

    def close(self) -> None:
        """Nothing is held open."""


class ConfigSource:
    """The owner's settings, which may change while we run."""

    name = "settings"

    def __init__(self, file: Path) -> None:
        """Read `file`."""
        self._file = file
        self._stamp: tuple[int, int] | None = None
        self._config: Config | None = None

    def read(self) -> Config | None:
        """Return the settings; None where there is no file.

        Raises:
            SensorError: they are not valid.
        """
        try:
            status = self._file.stat()
        except (FileNotFoundError, NotADirectoryError):
            self._stamp = self._config = None
            return None
        stamp = (status.st_mtime_ns, status.st_size)
        if stamp != self._stamp:
            self._stamp, self._config = stamp, None
            try:
                self._config = load_config(self._file, {})
            except ConfigError as error:
                self._stamp = None
                raise SensorError(str(error)) from error
        return self._config

    def close(self) -> None:
        """Nothing is held open."""


@dataclass(frozen=True, slots=True)
class Displays:
    """What can be asked now."""

    x11: tuple[int, ...]
    wayland: tuple[Path, ...]


class DisplayFinder:
    """Displays come with a login and go with a logout."""

    name = "displays"

    def __init__(self, places: Places) -> None:
        """Look in `places`."""
        self._places = places
        self._seen: tuple[int, float] | None = None
        self._x11: tuple[int, ...] = ()

    def read(self) -> Displays:
        """Return the displays that are there; X servers are only asked who they are if new."""
        seen = self._x11_stamp()
        if seen != self._seen:
            self._seen, self._x11 = seen, tuple(x11.find_displays(self._places))
        return Displays(self._x11, tuple(wayland.find_sockets(self._places)))

    def _x11_stamp(self) -> tuple[int, float] | None:
        """Return what changes whenever a socket or a lock comes or goes."""
        try:
            sockets = self._places.x11_dir.stat()
            return sockets.st_mtime_ns, self._places.lock_dir.stat().st_mtime
        except OSError:
            return None

    def close(self) -> None:
        """Nothing is held open."""


def can_hide_desktop(places: Places) -> bool:
    """Return whether a desktop may be around us that cannot be seen from inside.

    WSL always has Windows' one. A container may be on somebody's desktop machine: it is if a screen
    is connected to the machine's GPU, which containers see.
    """
    if sys.platform != "linux":
        return False
    kernel = _text(places.proc_dir / "sys" / "kernel" / "osrelease").lower()
    if "microsoft" in kernel:
        return True
    marks = (places.root_dir / ".dockerenv", places.run_dir / ".containerenv")
    is_container = any(mark.exists() for mark in (*marks, places.run_dir / "systemd" / "container"))
    screens = (places.sys_dir / "class" / "drm").glob("card*-*/status")
    return is_container and any(_text(screen) == "connected" for screen in screens)


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
