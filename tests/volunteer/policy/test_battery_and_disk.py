"""Batteries and disks: real machines are odd."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from volunteer.config import Config
from volunteer.policy.sensors import battery
from volunteer.policy.sensors.battery import read_on_battery
from volunteer.policy.sensors.disk import read_free_bytes, read_tree_bytes
from volunteer.policy.sensors.small import OwnDiskSource


def make_supply(folder: Path, name: str, **values: str) -> None:
    (folder / name).mkdir(parents=True)
    for key, value in values.items():
        (folder / name / key).write_text(value + "\n")


AC_ON = {"type": "Mains", "online": "1"}
AC_OFF = {"type": "Mains", "online": "0"}
MOUSE = {"type": "Battery", "scope": "Device", "status": "Discharging"}


def cell(status: str) -> dict[str, str]:
    return {"type": "Battery", "status": status}


USB_OFF = {"type": "USB", "online": "0", "usb_type": "[C] PD PD_PPS"}
MACHINES: dict[str, tuple[dict[str, dict[str, str]], bool | None]] = {
    "a server or a virtual machine": ({}, False),
    "a desktop with a wireless mouse and keyboard": (
        {
            "hidpp_battery_0": MOUSE,
            "hid-dc:2c:26:00:00:01-battery": {**MOUSE, "status": "Unknown"},
        },
        False,
    ),
    "a desktop with a gamepad whose driver leaves out what it is of": (
        {"AC": AC_ON, "sony_controller_battery": cell("Discharging")},
        False,
    ),
    "a ThinkPad with two batteries, one of them full, unplugged": (
        {"AC": AC_OFF, "BAT0": cell("Full"), "BAT1": cell("Discharging")},
        True,
    ),
    "a ThinkPad that is kept at 80 % by its thresholds": (
        {"AC": AC_ON, "BAT0": cell("Not charging"), "BAT1": cell("Not charging")},
        False,
    ),
    "a Framework on one of its four USB-C ports": (
        {
            "ACAD": AC_OFF,
            "BAT1": cell("Charging"),
            **{f"ucsi-source-psy-USBC000:00{port}": USB_OFF for port in (1, 2, 3)},
            "ucsi-source-psy-USBC000:004": {**USB_OFF, "online": "1"},
        },
        False,
    ),
    "the same, unplugged": (
        {"ACAD": AC_OFF, "BAT1": cell("Discharging"), "ucsi-source-psy-USBC000:001": USB_OFF},
        True,
    ),
    "a gaming laptop whose charger is too weak for it": (
        {"ADP1": AC_ON, "BAT0": cell("Discharging")},
        False,
    ),
    "a Surface whose battery driver sleeps": ({"ADP1": AC_OFF, "BAT1": cell("Unknown")}, None),
    "a Chromebook without a mains entry, charging": ({"sbs-9-000b": cell("Charging")}, False),
    "a Pinebook without a mains entry, unplugged": ({"cw2015-battery": cell("Discharging")}, True),
    "a Steam Deck in its dock": ({"ACAD": AC_ON, "BAT1": cell("Full")}, False),
    "an Intel Mac whose battery was taken out": ({"ADP1": AC_ON}, False),
    "an Apple silicon Mac": (
        {"macsmc-ac": AC_OFF, "macsmc-battery": cell("Discharging")},
        True,
    ),
    "a laptop whose battery gives no status at all": ({"BAT0": {"type": "Battery"}}, None),
    "a machine whose supply cannot be read": ({"BAT0": {"online": "1"}}, None),
    "a tablet on a wireless charger": (
        {"wireless": {"type": "Wireless", "online": "1"}, "battery": cell("Full")},
        False,
    ),
    "a server on its UPS after a power cut": (
        {"hidups": {"type": "UPS", "status": "Discharging"}},
        True,
    ),
    "a server on its UPS": ({"hidups": {"type": "UPS", "status": "Full"}}, False),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_odd_machines(tmp_path: Path, machine: str) -> None:
    folder = tmp_path / "power_supply"
    folder.mkdir()
    supplies, expected = MACHINES[machine]
    for name, values in supplies.items():
        make_supply(folder, name, **values)
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


def test_what_a_tree_takes_is_its_blocks_and_not_its_holes(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "one").write_bytes(b"x" * 100_000)
    (tmp_path / "a" / "b" / "two").write_bytes(b"x" * 200_000)
    with (tmp_path / "sparse.partial").open("wb") as stream:
        stream.truncate(10**9)
    (tmp_path / "elsewhere").symlink_to("/usr")
    taken = read_tree_bytes(tmp_path)
    assert 300_000 <= taken < 400_000
    assert read_tree_bytes(tmp_path / "gone") == 0


def test_a_file_of_two_names_counts_once(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "imported").write_bytes(b"x" * 100_000)
    alone = read_tree_bytes(tmp_path)
    os.link(tmp_path / "imported", tmp_path / "runs" / "state")
    assert read_tree_bytes(tmp_path) == alone


def test_own_data_is_added_up_only_where_it_is_limited(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    assert OwnDiskSource(tmp_path, Config).read() is None
    reading = OwnDiskSource(tmp_path, lambda: Config(disk_max_bytes=10**9)).read()
    assert reading is not None
    assert reading.taken_bytes >= 100_000
