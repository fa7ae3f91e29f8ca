"""Idleness seen on real desktops: input through the display server's own ways, told by itself."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system import desktops
from tests.system.agents import RealAgent, ending, is_alive, wait_until
from tests.system.desktops import kwin, sway, touch, type_at, x_server
from volunteer.policy.sensors.display import DisplayReading
from volunteer.policy.sensors.linux_presence import LinuxPresence
from volunteer.policy.sensors.places import Places
from volunteer.policy.sensors.wayland import _EXT, _KDE, WaylandSource, find_sockets
from volunteer.policy.sensors.x11 import X11Source, find_displays

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(180)]


def idle_s(reading: DisplayReading | None) -> float:
    assert reading is not None
    return time.monotonic() - reading.touched_at_s


def wait_idle(read: Callable[[], DisplayReading | None], least_s: float) -> None:
    wait_until(f"idle for {least_s:g} s", lambda: idle_s(read()) >= least_s, 20.0)


def test_an_x_server_tells_when_the_mouse_was_moved() -> None:
    with x_server() as display:
        places = Places.from_environment({})
        assert display in find_displays(places)
        source = X11Source(places, display)
        wait_idle(source.read, 2.0)
        touch(display)
        assert idle_s(source.read()) < 1.0
        wait_idle(source.read, 1.5)
        source.close()
    assert display not in find_displays(places), "gone with its server"


def test_a_wayland_compositor_tells_by_itself_when_a_key_was_pressed() -> None:
    with sway() as socket_file:
        assert find_sockets(Places(runtime_dir=socket_file.parent)) == [socket_file]
        source = WaylandSource(socket_file)
        wait_idle(source.read, 2.5)
        assert _KDE in source._globals
        type_at(socket_file)
        assert idle_s(source.read()) < 1.0, "told at once"
        wait_idle(source.read, 1.5)
        source.close()


@pytest.mark.full
def test_kwin_tells_over_ext_idle_notify() -> None:
    with kwin() as socket_file:
        source = WaylandSource(socket_file)
        wait_idle(source.read, 2.5)
        assert _EXT in source._globals, "and it is this one that is asked"
        # No tool of Debian's types at this KWin: the older protocol lets a client say `used`.
        other = WaylandSource(socket_file)
        other.read()
        other._bind(_KDE, 1, 7)
        other._send(7, 0, struct.pack("=III", 8, 4, 60_000))
        other._send(8, 1, b"")
        wait_until("it is told", lambda: idle_s(source.read()) < 1.0, 5.0)
        wait_idle(source.read, 1.5)
        source.close()
        other.close()


def test_displays_are_followed_as_they_come_and_go(tmp_path: Path) -> None:
    nowhere = f"unix:path={tmp_path / 'none'}"
    places = Places(runtime_dir=tmp_path, session_bus=nowhere, system_bus=nowhere, dev_dir=tmp_path)
    presence = LinuxPresence(places, lambda: None)
    presence.start()
    try:
        with x_server() as display:
            name = f"X11 :{display}"

            def is_seen() -> bool:
                reading = presence.read(time.monotonic()).input
                return reading.has_desktop is True and name in presence.sources().displays

            wait_until("the display is found", is_seen, 15.0)
            wait_until(
                "it is idle",
                lambda: (presence.read(time.monotonic()).input.idle_s or 0.0) > 1.0,
                15.0,
            )
            touch(display)
            wait_until(
                "it is used",
                lambda: (presence.read(time.monotonic()).input.idle_s or 9.0) < 1.0,
                2.0,
            )

        def is_gone() -> bool:
            presence.read(time.monotonic())
            return name not in presence.sources().displays

        wait_until("it is forgotten", is_gone, 15.0)
    finally:
        presence.stop()


CONFIG = """
idle_minutes = 0.2
resume_after_s = 1
others_cpu_limit = 1
pause_on_battery = false
ram_min_available_bytes = 0
"""


def test_an_agent_stops_when_the_mouse_moves_and_goes_on_when_it_rests(tmp_path: Path) -> None:
    agent = RealAgent(
        tmp_path / "a", ("--no-mdns", "--no-dht", "--device", "cpu", "--threads", "1")
    )
    agent.locations.prepare()
    agent.locations.config_file.write_text(CONFIG)
    with x_server() as display, ending([agent]):
        agent.start()
        for _ in range(2):
            running = agent.wait_for("it contributes", lambda s: s.state == "contributing", 60)
            trainer_pid = running.trainer_pid
            assert trainer_pid is not None
            begun_s = time.monotonic()
            touch(display)
            wait_until("the trainer is gone", lambda pid=trainer_pid: not is_alive(pid), 10.0)  # type: ignore[misc]
            assert time.monotonic() - begun_s < 5.0
            status = agent.status()
            assert status.state == "waiting"
            assert f"you are using the machine (X11 :{display} says)" in status.reason
            assert status.resumes_when.startswith("it has not been touched for")
        stats = agent.stats()
        parts = stats.tokens_confirmed + stats.tokens_in_flight + stats.tokens_pending
        assert parts + stats.tokens_refused + stats.tokens_dropped == stats.tokens_done
        assert stats.tokens_dropped == 0
    assert "not contributing: you are using the machine" in agent.logged()


def test_a_machine_that_nobody_can_see_waits_and_says_what_to_do(tmp_path: Path) -> None:
    """Settings that change hold at once: the sentence it says is what helps."""
    agent = RealAgent(
        tmp_path / "a", ("--no-mdns", "--no-dht", "--device", "cpu", "--threads", "1")
    )
    agent.locations.prepare()
    agent.locations.config_file.write_text(CONFIG + "terminals_count_as_use = false\n")
    if find_displays(Places.from_environment(os.environ)):
        pytest.skip("this machine has an X server: it can be seen")
    with ending([agent]):
        agent.start()
        status = agent.wait_for("it waits", lambda s: s.state == "waiting", 20)
        assert "nobody can tell whether you are using the machine" in status.reason
        assert "`allmende config set headless true`" in status.resumes_when
        assert agent.allmende("config", "set", "headless", "true").returncode == 0
        agent.wait_for("it contributes", lambda s: s.state == "contributing", 60)


def test_every_desktop_is_named_with_its_package() -> None:
    with pytest.raises(pytest.skip.Exception, match="needs Debian's package none-such"):
        desktops.need("no-such-program", "none-such")
