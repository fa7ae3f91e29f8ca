"""When somebody last typed in a terminal: on the console, in a window, over SSH.

Runs in: agent. A terminal's access time moves when a program reads what was typed (to within 8 s:
Linux hides the rhythm of keys). Terminals that talk to this program, as the dashboard does or the
shell in which `allmende status` was typed, do not count up to that moment; nor does one whose keys
tmux or screen passes on to another terminal, which counts for itself.

Wall-clock time is only used for what was typed before we looked: a clock set by a day then moves
nobody's keys.
"""

from __future__ import annotations

import math
import os
import re
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from volunteer.policy.sensors.places import Places

RELAYS = ("tmux: client", "screen", "zellij")
"""Foreground programs that pass keys on to terminals of their own."""
TALK_S = 1.5
"""For so long after a terminal has talked to us its keys are for us."""
_RELAY_EVERY_S = 5.0
_CONSOLE = re.compile(r"tty\d+")


@dataclass(frozen=True, slots=True)
class TerminalReading:
    """The terminal that was typed in last."""

    touched_at_s: float
    """Instant on the monotonic clock; minus infinity where nobody has typed."""
    name: str = ""


class TerminalSource:
    """Every terminal of the machine."""

    name = "terminals"

    def __init__(
        self, places: Places, read_status: Callable[[Path], os.stat_result] = os.stat
    ) -> None:
        """Read the terminals of `places`.

        Args:
            places: where /dev and /proc are.
            read_status: os.stat; a test has no devices to make.
        """
        self._read_status = read_status
        self._dev_dir = places.dev_dir
        self._proc_dir = places.proc_dir
        self._access: dict[str, float] = {}
        self._touched: dict[str, float] = {}
        self._devices: dict[str, int] = {}
        self._talked: dict[int, float] = {}
        self._relays: frozenset[int] = frozenset()
        self._relays_at_s = -math.inf
        self._lock = threading.Lock()

    def note_talk(self, device: int) -> None:
        """Say that terminal `device` talks to this program just now."""
        with self._lock:
            self._talked[device] = time.monotonic() + TALK_S

    def read(self) -> TerminalReading:
        """Return which terminal was typed in last, and when."""
        self._look()
        with self._lock:
            talked = dict(self._talked)
        latest = TerminalReading(-math.inf)
        for name, at_s in sorted(self._touched.items(), key=lambda item: -item[1]):
            device = self._devices[name]
            if at_s <= talked.get(device, -math.inf):
                continue
            if device in self._relay_devices():
                continue
            latest = TerminalReading(at_s, name)
            break
        return latest

    def close(self) -> None:
        """Nothing is held open."""

    def _look(self) -> None:
        """Note which terminals have been read from since the last look."""
        now_s, now_utc_s = time.monotonic(), time.time()
        seen = set()
        for name, status in self._terminals():
            seen.add(name)
            before = self._access.get(name)
            self._access[name], self._devices[name] = status.st_atime, status.st_rdev
            if before is None:
                self._touched[name] = now_s - max(0.0, now_utc_s - status.st_atime)
            elif status.st_atime != before:
                self._touched[name] = now_s
        for name in set(self._access) - seen:
            del self._access[name], self._touched[name], self._devices[name]

    def _terminals(self) -> list[tuple[str, os.stat_result]]:
        found = []
        for folder, prefix, names in (
            (self._dev_dir, "", [n for n in os.listdir(self._dev_dir) if _CONSOLE.fullmatch(n)]),
            (self._dev_dir / "pts", "pts/", _numbers(self._dev_dir / "pts")),
        ):
            for name in names:
                try:
                    status = self._read_status(folder / name)
                except OSError:  # closed meanwhile
                    continue
                if stat.S_ISCHR(status.st_mode):
                    found.append((prefix + name, status))
        return found

    def _relay_devices(self) -> frozenset[int]:
        now_s = time.monotonic()
        if now_s - self._relays_at_s > _RELAY_EVERY_S:
            self._relays_at_s = now_s
            self._relays = find_relays(self._proc_dir)
        return self._relays


def _numbers(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.isdigit()]
    except FileNotFoundError:
        return []


def terminal_of(pid: int, proc_dir: Path = Path("/proc")) -> int | None:
    """Return the device number of a process's terminal; None where it has none."""
    fields = _stat_fields(proc_dir / str(pid) / "stat")
    return fields[1] or None if fields is not None else None


def find_relays(proc_dir: Path) -> frozenset[int]:
    """Return the terminals whose foreground program passes its keys on."""
    devices = set()
    for name in os.listdir(proc_dir):
        if not name.isdigit():
            continue
        fields = _stat_fields(proc_dir / name / "stat")
        if fields is not None and fields[0] in RELAYS and fields[1] and fields[2]:
            devices.add(fields[1])
    return frozenset(devices)


def _stat_fields(file: Path) -> tuple[str, int, bool] | None:
    """Return (name, terminal's device number, whether in its foreground) of a process."""
    try:
        text = file.read_text("utf-8", "replace")
    except OSError:
        return None
    name = text[text.find("(") + 1 : text.rfind(")")]
    rest = text[text.rfind(")") + 1 :].split()
    if len(rest) < 6:
        return None
    group, tty, foreground = int(rest[2]), int(rest[4]), int(rest[5])
    return name, _device_number(tty), group == foreground


def _device_number(encoded: int) -> int:
    """Return a device number as st_rdev has it, from the form of /proc/PID/stat."""
    major = (encoded >> 8) & 0xFFF
    minor = (encoded & 0xFF) | ((encoded >> 12) & 0xFFF00)
    return os.makedev(major, minor) if encoded else 0
