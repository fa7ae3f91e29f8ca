"""All sensors together on a machine of folders, and the small ones by themselves."""

from __future__ import annotations

import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fakes.bus_services import private_bus, serving
from volunteer.config import Config
from volunteer.locations import HOME_VARIABLE, Locations
from volunteer.policy.idle import IdleState, decide
from volunteer.policy.report import report_sources
from volunteer.policy.sensors import machine
from volunteer.policy.sensors.machine import MachineSensors
from volunteer.policy.sensors.places import Places
from volunteer.policy.sensors.session_bus import GAME_MODE, MUTTER
from volunteer.policy.sensors.shared_idle import SharedIdleSource
from volunteer.policy.sensors.small import ConfigSource, PowerReading, PowerSource, can_hide_desktop
from volunteer.policy.sensors.thermal import read_cpu_celsius
from volunteer.policy.sensors.watcher import SensorError
from volunteer.policy.veto import Cause
from volunteer.policy.wishes import idle_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="a Linux machine of folders"),
]
_never = threading.Event()


@pytest.fixture
def places(tmp_path: Path) -> Places:
    for name in ("x11", "lock", "run", "home", "dev", "sys/class/power_supply", "systemrun"):
        (tmp_path / name).mkdir(parents=True)
    return Places(
        x11_dir=tmp_path / "x11",
        lock_dir=tmp_path / "lock",
        runtime_dir=tmp_path / "run",
        home_dir=tmp_path / "home",
        dev_dir=tmp_path / "dev",
        sys_dir=tmp_path / "sys",
        run_dir=tmp_path / "systemrun",
        root_dir=tmp_path,
        session_bus=f"unix:path={tmp_path / 'bus'}",
        system_bus=f"unix:path={tmp_path / 'none'}",
    )


@pytest.fixture
def locations(tmp_path: Path) -> Locations:
    locations = Locations.from_environment({HOME_VARIABLE: str(tmp_path / "volunteer")})
    locations.prepare()
    return locations


def until(condition: Callable[[], object]) -> None:
    while not condition():
        _never.wait(0.01)  # pytest's timeout ends it


def test_a_bare_machine_contributes_and_says_what_it_saw(
    places: Places, locations: Locations
) -> None:
    sensors = MachineSensors(Config(others_cpu_limit=1.0), locations, places=places)
    sensors.start()
    try:
        sensors.wait_told(10.0)
        signals = sensors.read(0.0)
        assert signals.input.has_desktop is False
        assert signals.input.terminal_idle_s == float("inf")
        assert signals.on_battery is False
        assert signals.disk_free_bytes is not None
        assert signals.local_time is None, "nobody asks for it"
        config = idle_config(Config(disk_min_free_bytes=2**26), is_idle_ignored=False)
        assert decide(IdleState(), signals, config, 0.0)[1].cause is Cause.NOTHING
        reports = report_sources(sensors.watchers(), time.monotonic())
        assert {"terminals", "session bus", "disk", "load"} <= {r.name for r in reports}
        assert all(report.is_well and report.meaning for report in reports)
    finally:
        sensors.stop()


def test_gnome_touched_wakes_whoever_waits(
    places: Places, locations: Locations, tmp_path: Path
) -> None:
    news = threading.Semaphore(0)
    with private_bus(tmp_path) as address, serving(address, str(MUTTER.bus_name)) as desktop:
        desktop.answers[MUTTER.object_path, "GetIdletime"] = ("t", (600_000,))
        sensors = MachineSensors(Config(), locations, news.release, places)
        sensors.start()
        try:
            sensors.wait_told(10.0)
            reading = sensors.read(0.0).input
            assert reading.has_desktop is True
            assert reading.idle_s == pytest.approx(600.0, abs=2.0)
            while news.acquire(blocking=False):
                pass
            desktop.answers[MUTTER.object_path, "GetIdletime"] = ("t", (0,))
            assert news.acquire(timeout=5), "told, not polled for"
            until(lambda: (sensors.read(0.0).input.idle_s or 0.0) < 2.0)
        finally:
            sensors.stop()


def test_games_are_told_by_game_mode(places: Places, locations: Locations, tmp_path: Path) -> None:
    with private_bus(tmp_path) as address, serving(address, str(GAME_MODE.bus_name)) as service:
        service.answers[GAME_MODE.object_path, "ListGames"] = ("a(io)", ([(7, "/game")],))
        sensors = MachineSensors(Config(), locations, places=places)
        sensors.start()
        try:
            sensors.wait_told(10.0)
            assert sensors.read(0.0).games == 1
        finally:
            sensors.stop()


def test_settings_that_change_are_followed_and_bad_ones_are_not(
    places: Places, locations: Locations
) -> None:
    given = Config(threads=3)
    sensors = MachineSensors(given, locations, places=places)
    sensors.start()
    try:
        sensors.wait_told(10.0)
        assert sensors.config() is given
        locations.config_file.write_text('hours = ["mon-sun 00:00-24:00"]\n')
        until(lambda: sensors.config().hours)
        assert sensors.read(0.0).local_time is not None
        locations.config_file.write_text("hours = 3\n")
        until(lambda: sensors.settings_problem)
        assert sensors.config().hours == ("mon-sun 00:00-24:00",)
    finally:
        sensors.stop()


def test_sleep_is_noticed_by_the_clocks(
    places: Places, locations: Locations, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(machine, "_asleep_s", lambda: asleep.seconds)
    sensors = MachineSensors(Config(), locations, places=places)
    assert sensors.read(5000.0).woke_at_s is None
    asleep.seconds += 0.5
    assert sensors.read(5001.0).woke_at_s is None, "clocks are read one after the other"
    asleep.seconds += 3600.0
    assert sensors.read(8600.0).woke_at_s == 8600.0
    assert sensors.read(8601.0).woke_at_s == 8600.0


def test_this_machines_clocks_are_read() -> None:
    assert machine._asleep_s() == pytest.approx(machine._asleep_s(), abs=1.0)


# ---------------------------------------------------------------------------------- small sources


@pytest.mark.parametrize(
    ("updated_ago_s", "active_ago_s", "expected"), [(1, 30, 30.0), (59, 500, 500.0), (0, -5, 0.0)]
)
def test_idle_detect_says_when_somebody_was_active(
    places: Places, updated_ago_s: int, active_ago_s: int, expected: float
) -> None:
    (places.dev_dir / "shm").mkdir()
    now = int(time.time())
    data = struct.pack("=qq", now - updated_ago_s, now - active_ago_s)
    (places.dev_dir / "shm" / "idle_detect_shmem").write_bytes(data)
    reading = SharedIdleSource(places).read()
    assert reading is not None
    assert time.monotonic() - reading.touched_at_s == pytest.approx(expected, abs=2.0)


def test_idle_detect_that_is_old_or_broken_is_named(places: Places) -> None:
    source = SharedIdleSource(places)
    assert source.read() is None, "it is not installed"
    (places.dev_dir / "shm").mkdir()
    file = places.dev_dir / "shm" / "idle_detect_shmem"
    file.write_bytes(b"short")
    with pytest.raises(SensorError, match="too small"):
        source.read()
    file.write_bytes(struct.pack("=qq", int(time.time()) - 100, int(time.time())))
    with pytest.raises(SensorError, match="has not written for 10"):
        source.read()


def make_files(folder: Path, **values: str) -> None:
    folder.mkdir(parents=True)
    for name, value in values.items():
        (folder / name).write_text(value + "\n")


def test_heat_is_that_of_the_hottest_cpu_sensor(places: Places) -> None:
    thermal = places.sys_dir / "class" / "thermal"
    monitors = places.sys_dir / "class" / "hwmon"
    assert read_cpu_celsius(places) is None
    make_files(thermal / "thermal_zone0", type="acpitz", temp="105000")
    make_files(thermal / "thermal_zone1", type="iwlwifi_1", temp="99000")
    assert read_cpu_celsius(places) is None, "they say nothing about the CPU"
    make_files(thermal / "thermal_zone2", type="x86_pkg_temp", temp="61000")
    make_files(monitors / "hwmon0", name="nvme", temp1_input="99000")
    assert read_cpu_celsius(places) == 61.0
    make_files(monitors / "hwmon1", name="k10temp", temp1_input="71500", temp3_input="-273000")
    assert read_cpu_celsius(places) == 71.5
    make_files(thermal / "thermal_zone3", type="cpu-thermal", temp="")
    assert PowerSource(places).read() == PowerReading(on_battery=False, cpu_celsius=71.5)


def test_a_container_on_a_machine_with_a_screen_hides_its_desktop(places: Places) -> None:
    assert not can_hide_desktop(places)
    screen = places.sys_dir / "class" / "drm" / "card0-HDMI-A-1"
    make_files(screen, status="connected")
    assert not can_hide_desktop(places), "no container: its desktop is seen"
    (places.root_dir / ".dockerenv").touch()
    assert can_hide_desktop(places)
    (screen / "status").write_text("disconnected\n")
    assert not can_hide_desktop(places), "a server: nobody sits at it"


def test_wsl_hides_the_desktop_around_it(tmp_path: Path) -> None:
    make_files(tmp_path / "sys" / "kernel", osrelease="6.6.36.3-microsoft-standard-WSL2")
    assert can_hide_desktop(Places(proc_dir=tmp_path))


def test_settings_are_read_when_they_change(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    source = ConfigSource(file)
    assert source.read() is None
    file.write_text("threads = 3\n")
    first = source.read()
    assert first == Config(threads=3)
    assert source.read() is first
    file.write_text("threads = -1\n")
    for _ in range(2):
        with pytest.raises(SensorError, match="`threads` must be"):
            source.read()
    file.unlink()
    assert source.read() is None


def test_places_are_found_without_an_environment() -> None:
    daemon = Places.from_environment({})
    assert daemon.session_bus == f"unix:path=/run/user/{os.getuid()}/bus"
    user = Places.from_environment(
        {
            "XDG_RUNTIME_DIR": "/r",
            "XAUTHORITY": "/x",
            "DBUS_SESSION_BUS_ADDRESS": "unix:abstract=a",
            "DBUS_SYSTEM_BUS_ADDRESS": "unix:path=/s",
        }
    )
    assert (user.runtime_dir, user.x_authority) == (Path("/r"), Path("/x"))
    assert (user.session_bus, user.system_bus) == ("unix:abstract=a", "unix:path=/s")
