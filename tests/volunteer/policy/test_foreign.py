"""macOS and Windows: their C functions are faked at the lowest level, with recorded answers.

No such machine was at hand. The answers are those that the systems' documents give.
"""

from __future__ import annotations

import ctypes
import time
from types import SimpleNamespace
from typing import Any

import pytest

from volunteer.config import Config
from volunteer.policy.idle import IdleState, decide
from volunteer.policy.sensors import machine
from volunteer.policy.sensors.foreign import ForeignPresence, ForeignReading
from volunteer.policy.sensors.linux_presence import LinuxPresence
from volunteer.policy.sensors.macos import MacSource
from volunteer.policy.sensors.places import Places
from volunteer.policy.sensors.watcher import SensorError
from volunteer.policy.sensors.windows import LastInputInfo, WindowsSource
from volunteer.policy.signals import Signals
from volunteer.policy.veto import Cause
from volunteer.policy.wishes import idle_config

TRUE, FALSE = 0x1001, 0x1002
"""Addresses of CoreFoundation's two booleans."""


class Mac:
    """A Mac's libraries; objects of CoreFoundation are numbers, counted as they are released."""

    def __init__(self) -> None:
        self.idle_s = 3.5
        self.session: dict[bytes, int] | None = {}
        self.assertions: dict[bytes, int] | None = {}
        self.objects: dict[int, Any] = {}
        self.num_released = 0

    def load(self, file: str) -> Any:  # noqa: ANN401 - a library
        assert file.startswith("/System/Library/Frameworks/")
        functions = {
            "ApplicationServices": (self.seconds_since, self.copy_session),
            "IOKit": (self.copy_assertions,),
            "CoreFoundation": (self.string, self.value, self.boolean, self.number, self.release),
        }[file.rpartition("/")[2]]
        names = {
            "seconds_since": "CGEventSourceSecondsSinceLastEventType",
            "copy_session": "CGSessionCopyCurrentDictionary",
            "copy_assertions": "IOPMCopyAssertionsStatus",
            "string": "CFStringCreateWithCString",
            "value": "CFDictionaryGetValue",
            "boolean": "CFBooleanGetValue",
            "number": "CFNumberGetValue",
            "release": "CFRelease",
        }
        library = SimpleNamespace()
        for function in functions:
            # ctypes lets types be set on its functions, as Python does on functions of its own.
            setattr(library, names[function.__name__], lambda *a, f=function: f(*a))
        return library

    def new(self, value: object) -> int:
        address = 0x2000 + len(self.objects)
        self.objects[address] = value
        return address

    def seconds_since(self, state: int, kind: int) -> float:
        assert (state, kind) == (1, 0xFFFFFFFF), "the HID system's state, any input"
        return self.idle_s

    def copy_session(self) -> int | None:
        return None if self.session is None else self.new(self.session)

    def copy_assertions(self, result: Any) -> int:  # noqa: ANN401 - byref's
        if self.assertions is None:
            return -536870208  # kIOReturnNotReady and the like
        result._obj.value = self.new(self.assertions)
        return 0

    def string(self, allocator: None, text: bytes, encoding: int) -> int:
        assert encoding == 0x08000100
        return self.new(text)

    def value(self, dictionary: int, key: int) -> int | None:
        found = self.objects[dictionary].get(self.objects[key])
        return found if found in (None, TRUE, FALSE) else self.new(found)

    def boolean(self, address: int) -> int:
        return {TRUE: 1, FALSE: 0}[address]

    def number(self, address: int, kind: int, result: Any) -> int:  # noqa: ANN401
        assert kind == 3, "kCFNumberSInt32Type"
        result._obj.value = self.objects[address]
        return 1

    def release(self, address: int) -> None:
        assert address in self.objects
        self.num_released += 1


def test_a_mac_says_when_it_was_touched() -> None:
    mac = Mac()
    mac.session = {b"kCGSSessionOnConsoleKey": TRUE}
    reading = MacSource(mac.load).read()
    assert reading.touched_at_s == pytest.approx(time.monotonic() - 3.5, abs=0.5)
    assert (reading.is_locked, reading.inhibitors, reading.games) == (False, (), 0)
    # The session, the assertions and three keys were made for us: none may leak, twice a second.
    assert mac.num_released == 5


def test_a_locked_mac_and_a_film_on_it() -> None:
    mac = Mac()
    mac.session = {b"CGSSessionScreenIsLocked": TRUE}
    mac.assertions = {b"PreventUserIdleDisplaySleep": 1, b"PreventUserIdleSystemSleep": 3}
    source = MacSource(mac.load)
    reading = source.read()
    assert reading.is_locked is True
    assert reading.inhibitors == ("a program",)
    mac.assertions = {b"PreventUserIdleSystemSleep": 3, b"PreventUserIdleDisplaySleep": 0}
    mac.session = {b"CGSSessionScreenIsLocked": FALSE}
    again = source.read()
    assert (again.is_locked, again.inhibitors) == (False, ())


def test_a_mac_that_does_not_say_is_unknown() -> None:
    mac = Mac()
    mac.session = mac.assertions = None
    reading = MacSource(mac.load).read()
    assert (reading.is_locked, reading.inhibitors) == (None, ())
    mac.idle_s = -1.0
    with pytest.raises(SensorError):
        MacSource(mac.load).read()


class Windows:
    """Windows' libraries."""

    def __init__(self) -> None:
        self.tick_ms = 5_000_000
        self.last_ms = 4_990_000
        self.state: int | None = 5
        self.can_tell = True

    def load(self, name: str) -> Any:  # noqa: ANN401 - a library
        functions: dict[str, dict[str, Any]] = {
            "user32": {"GetLastInputInfo": lambda info: self.last_input(info)},
            "kernel32": {"GetTickCount64": lambda: self.tick_ms},
            "shell32": {"SHQueryUserNotificationState": lambda result: self.notification(result)},
        }
        return SimpleNamespace(**functions[name])

    def last_input(self, info: Any) -> int:  # noqa: ANN401 - byref's
        assert isinstance(info._obj, LastInputInfo)
        assert info._obj.cbSize == 8, "or Windows refuses"
        info._obj.dwTime = ctypes.c_uint32(self.last_ms).value
        return int(self.can_tell)

    def notification(self, result: Any) -> int:  # noqa: ANN401 - byref's
        if self.state is None:
            return -2147467259  # E_FAIL
        result._obj.value = self.state
        return 0


def test_windows_says_when_it_was_touched_also_after_49_days() -> None:
    windows = Windows()
    source = WindowsSource(windows.load)
    assert source.read().touched_at_s == pytest.approx(time.monotonic() - 10.0, abs=0.5)
    windows.tick_ms = (1 << 32) + 2_000  # up for 49.7 days and two seconds
    windows.last_ms = (1 << 32) - 3_000
    assert source.read().touched_at_s == pytest.approx(time.monotonic() - 5.0, abs=0.5)


@pytest.mark.parametrize(
    ("state", "is_locked", "inhibitors", "games"),
    [
        (1, True, (), 0),
        (2, False, ("a full-screen program",), 0),
        (3, False, (), 1),
        (4, False, ("a presentation",), 0),
        (5, False, (), 0),
        (6, False, (), 0),
        (7, False, (), 0),
        (None, None, (), 0),
    ],
)
def test_windows_says_what_fills_its_screen(
    state: int | None, is_locked: bool | None, inhibitors: tuple[str, ...], games: int
) -> None:
    windows = Windows()
    windows.state = state
    reading = WindowsSource(windows.load).read()
    assert (reading.is_locked, reading.inhibitors, reading.games) == (is_locked, inhibitors, games)


def test_windows_that_does_not_say_is_unknown() -> None:
    windows = Windows()
    windows.can_tell = False
    with pytest.raises(SensorError):
        WindowsSource(windows.load).read()


class Fixed:
    """A source that always says the same."""

    name = "macOS"

    def __init__(self, reading: ForeignReading | SensorError) -> None:
        self.reading = reading

    def read(self) -> ForeignReading:
        if isinstance(self.reading, SensorError):
            raise self.reading
        return self.reading

    def close(self) -> None:
        pass


def cause_of(reading: ForeignReading | SensorError) -> Cause:
    presence = ForeignPresence(Fixed(reading), lambda: None)
    presence.start()
    try:
        (watcher,) = presence.watchers()
        assert watcher.wait_told(5)
        read = presence.read(time.monotonic())
    finally:
        presence.stop()
    signals = Signals(disk_free_bytes=10**12, input=read.input, games=read.games)
    config = idle_config(Config(), is_idle_ignored=False)
    return decide(IdleState(), signals, config, 0.0)[1].cause


def test_the_policy_takes_their_readings() -> None:
    long_ago = time.monotonic() - 1000.0
    calm = ForeignReading(touched_at_s=long_ago, is_locked=False)
    assert cause_of(calm) is Cause.NOTHING
    assert cause_of(ForeignReading(touched_at_s=time.monotonic(), is_locked=False)) is Cause.INPUT
    film = ForeignReading(touched_at_s=long_ago, is_locked=None, inhibitors=("a program",))
    assert cause_of(film) is Cause.INHIBITED
    assert cause_of(ForeignReading(touched_at_s=long_ago, is_locked=False, games=1)) is Cause.GAME
    assert cause_of(SensorError("it does not say")) is Cause.UNKNOWN


def test_each_system_has_its_own_sensors() -> None:
    places = Places()
    assert isinstance(machine._presence(places, lambda: None, "darwin"), ForeignPresence)
    assert isinstance(machine._presence(places, lambda: None, "win32"), ForeignPresence)
    assert isinstance(machine._presence(places, lambda: None, "linux"), LinuxPresence)
