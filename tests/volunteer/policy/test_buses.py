"""What desktops and systems say over D-Bus: a real daemon, services that answer as theirs do."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.bus_services import Service, private_bus, serving
from volunteer.policy.sensors import bus as bus_source
from volunteer.policy.sensors.places import Places
from volunteer.policy.sensors.session_bus import (
    GAME_MODE,
    GNOME,
    KDE,
    MUTTER,
    DesktopReading,
    SessionBusSource,
)
from volunteer.policy.sensors.system_bus import (
    MANAGER,
    NETWORK,
    SystemBusSource,
    SystemReading,
)
from volunteer.policy.sensors.watcher import SensorError

pytestmark = pytest.mark.slow
SAVER = "org.gnome.ScreenSaver"


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with private_bus(tmp_path) as address:
        yield address


@pytest.fixture
def desktop(address: str) -> Iterator[Service]:
    names = (MUTTER.bus_name, GNOME.bus_name, KDE.bus_name, GAME_MODE.bus_name, SAVER)
    with serving(address, *filter(None, names)) as service:
        yield service


@pytest.fixture
def session(address: str) -> Iterator[SessionBusSource]:
    source = SessionBusSource(Places(session_bus=address))
    yield source
    source.close()


def read_slowly(source: SessionBusSource) -> DesktopReading:
    """Read until everything has been asked anew."""
    for _ in range(3):
        source.read()
    reading = source.read()
    reading = source.read()
    assert reading is not None
    return reading


def test_gnome_says_when_it_was_touched(desktop: Service, session: SessionBusSource) -> None:
    desktop.answers[MUTTER.object_path, "GetIdletime"] = ("t", (90_000,))
    reading = session.read()
    assert reading is not None
    assert reading.touched_at_s == pytest.approx(time.monotonic() - 90.0, abs=1.0)
    assert (reading.inhibitors, reading.games, reading.is_saver_on) == ((), 0, None)
    assert reading.problem == ""
    desktop.answers[MUTTER.object_path, "GetIdletime"] = ("t", (5,))
    again = session.read()
    assert again is not None
    assert again.touched_at_s == pytest.approx(time.monotonic(), abs=1.0)


def test_gnomes_inhibitors_of_idleness_are_named(
    desktop: Service, session: SessionBusSource
) -> None:
    film, update = "/org/gnome/SessionManager/Inhibitor1", "/org/gnome/SessionManager/Inhibitor2"
    desktop.answers[GNOME.object_path, "IsInhibited"] = lambda flags: ("b", (flags == 8,))
    desktop.answers[GNOME.object_path, "GetInhibitors"] = ("ao", ([film, update],))
    desktop.answers[film, "GetFlags"] = ("u", (8 | 4,))
    desktop.answers[film, "GetAppId"] = ("s", ("org.videolan.VLC",))
    desktop.answers[update, "GetFlags"] = ("u", (1,))
    desktop.answers[update, "GetAppId"] = ("s", ("packagekit",))
    assert read_slowly(session).inhibitors == ("org.videolan.VLC",)
    desktop.answers[film, "GetAppId"] = ("s", ("",))
    assert read_slowly(session).inhibitors == ("a program",)
    desktop.answers[GNOME.object_path, "IsInhibited"] = ("b", (False,))
    assert read_slowly(session).inhibitors == ()


def test_kdes_inhibitors_games_and_the_screen_saver(
    desktop: Service, session: SessionBusSource
) -> None:
    desktop.answers[KDE.object_path, "HasInhibition"] = lambda kinds: ("b", (kinds == 4,))
    desktop.answers[KDE.object_path, "ListInhibitions"] = ("a(ss)", ([("mpv", "plays a film")],))
    desktop.answers[GAME_MODE.object_path, "ListGames"] = (
        "a(io)",
        ([(4242, "/com/feralinteractive/GameMode/Games/4242")],),
    )
    desktop.answers["/org/gnome/ScreenSaver", "GetActive"] = ("b", (True,))
    reading = read_slowly(session)
    assert reading.inhibitors == ("mpv",)
    assert reading.games == 1
    assert reading.is_saver_on is True
    assert reading.touched_at_s is None, "no Mutter: others tell"
    assert reading.problem == ""


def test_nobody_is_started_by_asking(address: str, session: SessionBusSource) -> None:
    """GameMode could be started by a question; a bus without services answers for nobody."""
    reading = session.read()
    assert reading == DesktopReading()


def test_a_service_that_hangs_is_named_in_time(desktop: Service, session: SessionBusSource) -> None:
    desktop.answers[MUTTER.object_path, "GetIdletime"] = ("t", (0,))
    session.read()
    desktop.is_hung = True
    begun_s = time.monotonic()
    reading = session.read()
    assert time.monotonic() - begun_s < 2.0 + 0.5
    assert reading is not None
    assert reading.touched_at_s is None
    assert "org.gnome.Mutter.IdleMonitor has not answered in time" in reading.problem
    desktop.is_hung = False
    again = read_slowly(session)
    assert again.touched_at_s is not None, "it is asked again, over a new connection"


def test_a_bus_that_ends_is_no_crash(tmp_path: Path) -> None:
    with private_bus(tmp_path) as address:
        source = SessionBusSource(Places(session_bus=address))
        assert source.read() == DesktopReading()
    reading = source.read()
    assert reading is None or reading.problem
    source.close()


def test_without_a_bus_there_is_nothing_to_tell(tmp_path: Path) -> None:
    nowhere = f"unix:path={tmp_path / 'absent'}"
    assert SessionBusSource(Places(session_bus=nowhere)).read() is None
    assert SystemBusSource(Places(system_bus=nowhere)).read() is None


@pytest.mark.parametrize("address", ["", "nonsense", "tcp:host=127.0.0.1,port=1", "unix:path"])
def test_an_address_that_is_none_is_told(address: str) -> None:
    bus = bus_source.Bus(address)
    bus.begin()
    with pytest.raises(SensorError):
        bus.call(MUTTER, "GetIdletime")


# ----------------------------------------------------------------------------------------- system

SESSION = "/org/freedesktop/login1/session/_32"


@pytest.fixture
def system(address: str) -> Iterator[Service]:
    with serving(address, str(MANAGER.bus_name), str(NETWORK.bus_name)) as service:
        service.set_property(MANAGER.object_path, "PreparingForSleep", "b", False)
        service.answers[MANAGER.object_path, "ListSessions"] = ("a(susso)", ([],))
        service.answers[MANAGER.object_path, "ListInhibitors"] = ("a(ssssuu)", ([],))
        yield service


@pytest.fixture
def source(address: str) -> Iterator[SystemBusSource]:
    source = SystemBusSource(Places(system_bus=address))
    yield source
    source.close()


def read_all(source: SystemBusSource) -> SystemReading:
    for _ in range(4):
        reading = source.read()
    reading = source.read()
    assert reading is not None
    return reading


def with_sessions(system: Service, *sessions: tuple[str, int, dict[str, object]]) -> None:
    signatures = {"Active": "b", "LockedHint": "b", "IdleHint": "b", "IdleSinceHint": "t"}
    listed = []
    for number, (user, uid, values) in enumerate(sessions):
        path = f"/org/freedesktop/login1/session/_{number}"
        listed.append((str(number), uid, user, "seat0", path))
        given = {"Type": "x11", "Class": "user", "Active": True, "LockedHint": False, **values}
        system.set_all(path, {k: (signatures.get(k, "s"), v) for k, v in given.items()})
    system.answers[MANAGER.object_path, "ListSessions"] = ("a(susso)", (listed,))


def test_logind_says_who_is_there(system: Service, source: SystemBusSource) -> None:
    own = os.getuid()
    since_us = int((time.time() - 600) * 1e6)
    with_sessions(
        system,
        ("me", own, {"Type": "wayland", "LockedHint": True}),
        ("anna", own + 1, {"Active": False, "IdleHint": True, "IdleSinceHint": since_us}),
        ("gdm", 120, {"Class": "greeter"}),
        ("me", own, {"Type": "tty"}),
    )
    reading = read_all(source)
    assert [(s.user, s.is_own, s.is_active, s.is_locked) for s in reading.sessions] == [
        ("me", True, True, True),
        ("anna", False, False, False),
    ]
    assert reading.sessions[0].idle_since_s is None
    assert reading.sessions[1].idle_since_s == pytest.approx(time.monotonic() - 600, abs=2.0)


def test_a_session_that_ends_meanwhile_is_left_out(
    system: Service, source: SystemBusSource
) -> None:
    system.answers[MANAGER.object_path, "ListSessions"] = (
        "a(susso)",
        ([("9", 1000, "me", "seat0", SESSION)],),
    )
    assert read_all(source).sessions == ()


def test_loginds_inhibitors_of_idleness(system: Service, source: SystemBusSource) -> None:
    listed = [
        ("sleep:idle", "mpv", "plays", "block", 1000, 1),
        ("idle", "caffeine", "stays", "delay", 1000, 2),
        ("handle-lid-switch", "gsd-power", "lid", "block", 1000, 3),
    ]
    system.answers[MANAGER.object_path, "ListInhibitors"] = ("a(ssssuu)", (listed,))
    assert read_all(source).inhibitors == ("mpv",)


@pytest.mark.parametrize(
    ("value", "expected"), [(0, None), (1, True), (2, False), (3, True), (4, False)]
)
def test_a_guess_at_metering_counts(
    system: Service, source: SystemBusSource, value: int, expected: bool | None
) -> None:
    system.set_property(NETWORK.object_path, "Metered", "u", value)
    assert read_all(source).is_metered is expected


def test_metering_is_told_without_logind(address: str, source: SystemBusSource) -> None:
    with serving(address, str(NETWORK.bus_name)) as service:
        service.set_property(NETWORK.object_path, "Metered", "u", 1)
        assert source.read() == SystemReading(is_metered=True)


def test_the_machine_sleeps_when_all_is_saved(system: Service, source: SystemBusSource) -> None:
    """The delay lock is a pipe, as logind's: it is held as long as our end is open."""
    locks: list[tuple[int, tuple[object, ...]]] = []

    def inhibit(*arguments: object) -> tuple[str, tuple[int]]:
        read_end, write_end = os.pipe()
        locks.append((read_end, arguments))
        handed.append(write_end)
        return ("h", (write_end,))

    handed: list[int] = []
    system.answers[MANAGER.object_path, "Inhibit"] = inhibit
    assert not read_all(source).is_going_to_sleep
    assert len(locks) == 1, "one lock, held over many readings"
    assert locks[0][1] == ("sleep", "Allmende", "saves its training steps", "delay")
    os.close(handed.pop())
    os.set_blocking(locks[0][0], False)

    system.set_property(MANAGER.object_path, "PreparingForSleep", "b", True)
    reading = source.read()
    assert reading is not None
    assert reading.is_going_to_sleep
    with pytest.raises(BlockingIOError):
        os.read(locks[0][0], 1)  # still held: steps are being saved
    source.may_sleep = True
    source.read()
    assert os.read(locks[0][0], 1) == b"", "given back"

    system.set_property(MANAGER.object_path, "PreparingForSleep", "b", False)
    source.read()
    assert not source.may_sleep, "for the next sleep all must be saved anew"
    assert len(locks) == 2
    os.close(handed.pop())
    for read_end, _ in locks:
        os.close(read_end)


def test_where_no_lock_is_given_sleep_is_seen_all_the_same(
    system: Service, source: SystemBusSource
) -> None:
    system.set_property(MANAGER.object_path, "PreparingForSleep", "b", True)
    assert read_all(source).is_going_to_sleep
