"""Whether the machine runs on battery.

Runs in: agent. On Linux from /sys/class/power_supply, since psutil looks at one battery only and
takes a wireless mouse's for the machine's; elsewhere from psutil.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

import psutil

POWER_SUPPLY_DIR = Path("/sys/class/power_supply")


def read_on_battery(power_supply_dir: Path = POWER_SUPPLY_DIR) -> bool | None:
    """Return whether the machine runs on battery; False without one; None: cannot tell."""
    if sys.platform == "linux":
        return _read_linux(power_supply_dir)
    return _read_psutil()  # pragma: no cover


def _read_linux(power_supply_dir: Path) -> bool | None:
    """Look at every supply: mains in use means no, else a battery being emptied means yes."""
    if not power_supply_dir.is_dir():
        return False  # containers and kernels without power management know of no battery
    batteries, can_read_all = [], True
    for supply_dir in sorted(power_supply_dir.iterdir()):
        kind = _read_text(supply_dir / "type")
        if kind in ("Mains", "USB", "Wireless") and _read_text(supply_dir / "online") == "1":
            return False
        if kind in ("Battery", "UPS") and _read_text(supply_dir / "scope") != "Device":
            batteries.append(_read_text(supply_dir / "status"))
        can_read_all = can_read_all and kind is not None
    if "Discharging" in batteries:
        return True
    if not can_read_all or any(status in (None, "Unknown") for status in batteries):
        return None
    return False


def _read_text(file: Path) -> str | None:
    try:
        return file.read_text("ascii", "replace").strip()
    except OSError:  # absent, or the driver refuses just now
        return None


def _read_psutil() -> bool | None:
    """Ask psutil, whose None means that there is no battery."""
    battery = psutil.sensors_battery()
    if battery is None:
        return False
    is_plugged = cast("bool | None", battery.power_plugged)  # the type stubs know no None
    return None if is_plugged is None else not is_plugged
