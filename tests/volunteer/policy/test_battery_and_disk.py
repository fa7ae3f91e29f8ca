"""Batteries and disks: real machines are odd."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from volunteer.policy.sensors import battery
from volunteer.policy.sensors.battery import read_on_battery
from volunteer.policy.sensors.disk import read_free_bytes


def make_supply(folder: Path, name: str, **values: str) -> None:
    (folder / name).mkdir(parents=True)
    for key, value in values.items():
        (folder / name / key).write_text(value + "\n")


AC_ON = {"type": "Mains", "online": "1"}
AC_OFF = {"type": "Mains", "online": "0"}
MOUSE = {"type": "Battery", "scope": "Device", "status": "Discharging"}


def cell(status: str) -> dict[str, str]:
    return {"type": "Battery", "status": status}


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ([], False),
        ([AC_ON], False),
        ([AC_ON, cell("Discharging")], False),
        ([AC_OFF, cell("Discharging")], True),
        ([AC_OFF, cell("Full"), cell("Discharging")], True),
        ([AC_OFF, {"type": "USB", "online": "1"}, cell("Charging")], False),
        ([cell("Charging")], False),
        ([cell("Not charging")], False),
        ([cell("Unknown")], None),
        ([AC_ON, cell("Unknown")], False),
        ([{"type": "Battery"}], None),
        ([{"online": "1"}], None),
        ([MOUSE], False),
        ([MOUSE, AC_OFF, cell("Full")], False),
        ([{"type": "UPS", "status": "Discharging"}], True),
    ],
)
def test_linux_power_supplies(
    tmp_path: Path, supplies: list[dict[str, str]], expected: bool | None
) -> None:
    folder = tmp_path / "power_supply"
    folder.mkdir()
    for number, values in enumerate(supplies):
        make_supply(folder, f"supply{number}", **values)
    assert battery._read_linux(folder) is expected


def test_no_power_supply_class_means_no_battery(tmp_path: Path) -> None:
    assert battery._read_linux(tmp_path / "absent") is False


def test_this_machine_gives_some_reading() -> None:
    assert read_on_battery() in (True, False, None)


class FakeBattery(NamedTuple):
    power_plugged: bool | None


@pytest.mark.parametrize(
    ("reading", "expected"),
    [
        (None, False),
        (FakeBattery(True), False),
        (FakeBattery(False), True),
        (FakeBattery(None), None),
    ],
)
def test_other_systems_ask_psutil(
    monkeypatch: pytest.MonkeyPatch, reading: FakeBattery | None, expected: bool | None
) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: reading, raising=False)
    assert battery._read_psutil() is expected


def test_free_space_is_that_of_the_nearest_folder(tmp_path: Path) -> None:
    free = read_free_bytes(tmp_path / "not" / "there")
    status = os.statvfs(tmp_path)
    assert free is not None
    assert free == pytest.approx(status.f_bavail * status.f_frsize, rel=0.1)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOENT])
def test_an_unreadable_disk_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(folder: str) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(psutil, "disk_usage", fail)
    assert read_free_bytes(tmp_path) is None
