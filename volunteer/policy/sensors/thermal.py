"""How hot the CPU is.

Runs in: agent. On Linux from the thermal zones and hardware monitors that belong to a CPU; others
(batteries, radios, ACPI's made-up constants) say nothing about our load.
"""

from __future__ import annotations

import re
from pathlib import Path

from volunteer.policy.sensors.places import Places

_CPU_ZONE = re.compile(r"x86_pkg_temp|cpu[\w-]*|soc[\w-]*thermal|[\w-]*cpu[\w-]*thermal")
_CPU_MONITORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
_POSSIBLE_CELSIUS = (1.0, 150.0)
"""What is outside is a driver's way of saying that it does not know."""


def read_cpu_celsius(places: Places) -> float | None:
    """Return the temperature of the hottest CPU sensor; None: none tells."""
    zones = _folders(places.sys_dir / "class" / "thermal", "thermal_zone*")
    files = [z / "temp" for z in zones if _CPU_ZONE.fullmatch(_read(z / "type").lower())]
    for monitor in _folders(places.sys_dir / "class" / "hwmon", "hwmon*"):
        if _read(monitor / "name") in _CPU_MONITORS:
            files += sorted(monitor.glob("temp*_input"))
    told = [celsius for file in files if (celsius := _celsius(file)) is not None]
    return max(told, default=None)


def _folders(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def _celsius(file: Path) -> float | None:
    try:
        celsius = int(_read(file)) / 1000.0
    except ValueError:
        return None
    least, most = _POSSIBLE_CELSIUS
    return celsius if least <= celsius <= most else None


def _read(file: Path) -> str:
    try:
        return file.read_text("ascii", "replace").strip()
    except OSError:
        return ""
