"""How long a Mac has been untouched, whether it is locked, and who keeps its screen on.

Runs in: agent, as a LaunchAgent in the user's session (a daemon would see nobody). The system's own
C functions by ctypes. Written after Apple's documents and tested with these functions faked; never
tried on a Mac.

CGEventSource.h (CGEventSourceSecondsSinceLastEventType), CGSession.h
(CGSessionCopyCurrentDictionary), IOPMLib.h (IOPMCopyAssertionsStatus).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

from volunteer.policy.sensors.foreign import ForeignReading
from volunteer.policy.sensors.watcher import SensorError

Loader = Callable[[str], Any]
"""Loads a library; its functions are called with C's values."""
_GRAPHICS = "/System/Library/Frameworks/ApplicationServices.framework/ApplicationServices"
_POWER = "/System/Library/Frameworks/IOKit.framework/IOKit"
_FOUNDATION = "/System/Library/Frameworks/CoreFoundation.framework/CoreFoundation"
_HID_SYSTEM_STATE = 1
_ANY_INPUT = 0xFFFFFFFF
_UTF8 = 0x08000100
_SINT32 = 3
_LOCKED = b"CGSSessionScreenIsLocked"
_SCREEN_ON = (b"PreventUserIdleDisplaySleep", b"NoDisplaySleepAssertion")


class MacSource:
    """One Mac, in the session of the user who runs this."""

    name = "macOS"

    def __init__(self, load: Loader = ctypes.CDLL) -> None:
        """Ask the system; its libraries are loaded when first needed."""
        self._load = load
        self._libraries: tuple[Any, Any, Any] | None = None

    def read(self) -> ForeignReading:
        """Return what the system says."""
        graphics, _, _ = self._loaded()
        seconds = graphics.CGEventSourceSecondsSinceLastEventType(_HID_SYSTEM_STATE, _ANY_INPUT)
        if seconds < 0:
            raise SensorError("the system does not say when it was touched")
        return ForeignReading(
            touched_at_s=time.monotonic() - seconds,
            is_locked=self._is_locked(),
            inhibitors=("a program",) if self._keeps_screen_on() else (),
        )

    def close(self) -> None:
        """Nothing is held open."""

    def _loaded(self) -> tuple[Any, Any, Any]:
        if self._libraries is None:
            graphics, power, foundation = (self._load(f) for f in (_GRAPHICS, _POWER, _FOUNDATION))
            seconds_since = graphics.CGEventSourceSecondsSinceLastEventType
            seconds_since.restype = ctypes.c_double
            seconds_since.argtypes = (ctypes.c_int32, ctypes.c_uint32)
            graphics.CGSessionCopyCurrentDictionary.restype = ctypes.c_void_p
            power.IOPMCopyAssertionsStatus.argtypes = (ctypes.POINTER(ctypes.c_void_p),)
            power.IOPMCopyAssertionsStatus.restype = ctypes.c_int32
            _declare_foundation(foundation)
            self._libraries = (graphics, power, foundation)
        return self._libraries

    def _is_locked(self) -> bool | None:
        graphics, _, foundation = self._loaded()
        session = graphics.CGSessionCopyCurrentDictionary()
        if not session:
            return None  # nobody is logged in at the screen
        try:
            value = self._value(session, _LOCKED)
            return bool(value) and bool(foundation.CFBooleanGetValue(value))
        finally:
            foundation.CFRelease(session)

    def _keeps_screen_on(self) -> bool:
        _, power, foundation = self._loaded()
        assertions = ctypes.c_void_p()
        if power.IOPMCopyAssertionsStatus(ctypes.byref(assertions)) != 0 or not assertions.value:
            return False
        try:
            return any(self._count(assertions.value, name) > 0 for name in _SCREEN_ON)
        finally:
            foundation.CFRelease(assertions.value)

    def _count(self, dictionary: int, name: bytes) -> int:
        _, _, foundation = self._loaded()
        value = self._value(dictionary, name)
        count = ctypes.c_int32()
        if not value or not foundation.CFNumberGetValue(value, _SINT32, ctypes.byref(count)):
            return 0
        return count.value

    def _value(self, dictionary: int, name: bytes) -> int | None:
        """Return a dictionary's value, which stays the dictionary's."""
        _, _, foundation = self._loaded()
        key = foundation.CFStringCreateWithCString(None, name, _UTF8)
        try:
            value: int | None = foundation.CFDictionaryGetValue(dictionary, key)
            return value
        finally:
            foundation.CFRelease(key)


def _declare_foundation(foundation: Any) -> None:  # noqa: ANN401 - a library has no type
    pointer = ctypes.c_void_p
    foundation.CFStringCreateWithCString.restype = pointer
    foundation.CFStringCreateWithCString.argtypes = (pointer, ctypes.c_char_p, ctypes.c_uint32)
    foundation.CFDictionaryGetValue.restype = pointer
    foundation.CFDictionaryGetValue.argtypes = (pointer, pointer)
    foundation.CFBooleanGetValue.restype = ctypes.c_ubyte
    foundation.CFBooleanGetValue.argtypes = (pointer,)
    foundation.CFNumberGetValue.restype = ctypes.c_ubyte
    foundation.CFNumberGetValue.argtypes = (pointer, ctypes.c_long, pointer)
    foundation.CFRelease.restype = None
    foundation.CFRelease.argtypes = (pointer,)
