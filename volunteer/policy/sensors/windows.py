"""How long a Windows session has been untouched, whether it is locked, and what fills its screen.

Runs in: agent, in the user's session (a service sees nobody, and no GPU). The system's own C
functions by ctypes. Written after Microsoft's documents and tested with these functions faked;
never tried on Windows.

GetLastInputInfo (winuser.h), GetTickCount64 (sysinfoapi.h), SHQueryUserNotificationState
(shellapi.h, QUERY_USER_NOTIFICATION_STATE).
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
_TICKS = 1 << 32
"""The tick of the last input has 32 bits: it begins anew every 49.7 days."""
_NOT_PRESENT, _BUSY, _FULL_SCREEN_GAME, _PRESENTATION = 1, 2, 3, 4


class LastInputInfo(ctypes.Structure):
    """LASTINPUTINFO."""

    _fields_ = (("cbSize", ctypes.c_uint32), ("dwTime", ctypes.c_uint32))


class WindowsSource:
    """One session of Windows."""

    name = "Windows"

    def __init__(self, load: Loader | None = None) -> None:
        """Ask the system; its libraries are loaded when first needed."""
        own: Loader = getattr(ctypes, "WinDLL", ctypes.CDLL)
        self._load = own if load is None else load
        self._libraries: tuple[Any, Any, Any] | None = None

    def read(self) -> ForeignReading:
        """Return what the system says."""
        user, kernel, shell = self._loaded()
        last = LastInputInfo(cbSize=ctypes.sizeof(LastInputInfo))
        if not user.GetLastInputInfo(ctypes.byref(last)):
            raise SensorError("the system does not say when it was touched")
        idle_ms = (kernel.GetTickCount64() - last.dwTime) % _TICKS
        state = ctypes.c_int()
        if shell.SHQueryUserNotificationState(ctypes.byref(state)) != 0:
            state.value = 0  # it does not say what fills the screen
        inhibitors = {_BUSY: "a full-screen program", _PRESENTATION: "a presentation"}
        shown = inhibitors.get(state.value)
        return ForeignReading(
            touched_at_s=time.monotonic() - idle_ms / 1000.0,
            is_locked=state.value == _NOT_PRESENT if state.value else None,
            inhibitors=(shown,) if shown else (),
            games=int(state.value == _FULL_SCREEN_GAME),
        )

    def close(self) -> None:
        """Nothing is held open."""

    def _loaded(self) -> tuple[Any, Any, Any]:
        if self._libraries is None:
            user, kernel, shell = (self._load(name) for name in ("user32", "kernel32", "shell32"))
            kernel.GetTickCount64.restype = ctypes.c_uint64
            user.GetLastInputInfo.restype = ctypes.c_int
            shell.SHQueryUserNotificationState.restype = ctypes.c_long
            self._libraries = (user, kernel, shell)
        return self._libraries
