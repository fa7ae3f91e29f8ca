"""When a Wayland compositor last saw input, told by itself over its socket.

Runs in: agent. The idle protocols tell when the seat has been untouched for a time that we choose,
and the moment it is touched again; a second is enough to know the whole idle time. The few messages
of the wire are written here: no library, no child. `ext_idle_notifier_v1` is KDE's, wlroots',
COSMIC's and others'; `org_kde_kwin_idle` is that of older ones (Plasma 5, sway 1.7). GNOME has
neither, and tells over D-Bus. Input of a film's inhibitor is told apart from version 2 on.

Protocols: https://wayland.freedesktop.org/docs/html/ch04.html#sect-Protocol-Wire-Format,
https://wayland.app/protocols/ext-idle-notify-v1.
"""

from __future__ import annotations

import select
import socket
import stat
import struct
import time
from pathlib import Path

from volunteer.policy.sensors.display import DisplayReading
from volunteer.policy.sensors.places import Places
from volunteer.policy.sensors.watcher import SensorError

TIMEOUT_S = 1.5
WAIT_S = 0.5
IDLE_AFTER_MS = 1000
_MAX_PACKET_BYTES = 4096
_DISPLAY, _REGISTRY, _SYNC, _SEAT, _NOTIFIER, _IDLE, _INPUT_IDLE = range(1, 8)
_EXT, _KDE = "ext_idle_notifier_v1", "org_kde_kwin_idle"


def find_sockets(places: Places) -> list[Path]:
    """Return the sockets of this user's compositors."""
    try:
        files = sorted(places.runtime_dir.glob("wayland-*"))
        return [file for file in files if stat.S_ISSOCK(file.stat().st_mode)]
    except OSError:
        return []


class WaylandSource:
    """One compositor's first seat."""

    def __init__(self, socket_file: Path) -> None:
        """Ask the compositor that listens on `socket_file`."""
        self.name = f"Wayland {socket_file.name}"
        self._file = socket_file
        self._socket: socket.socket | None = None
        self._received = bytearray()
        self._globals: dict[str, tuple[int, int]] = {}
        self._is_synced = False
        self._idle_objects: set[int] = set()
        self._touched_at_s = 0.0

    def read(self) -> DisplayReading | None:
        """Return when it was touched; waits for news, half a second at most.

        None: nobody listens on that socket any more, or the compositor has no seat to touch.
        """
        try:
            if self._socket is None:
                if not self._connect():
                    self.close()
                    return None
                return self._reading()  # the first answer must not wait for news
            self._take_news(WAIT_S)
        except ConnectionRefusedError:
            self.close()
            return None
        except (OSError, struct.error, SensorError) as error:
            self.close()
            raise error if isinstance(error, SensorError) else SensorError(_said(error)) from error
        return self._reading()

    def close(self) -> None:
        """Close the connection; the compositor then forgets what it was asked."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _reading(self) -> DisplayReading:
        watched = _INPUT_IDLE if self._has_input_idle else _IDLE
        if watched not in self._idle_objects:
            self._touched_at_s = time.monotonic()
        is_inhibited = self._has_input_idle and self._idle_objects == {_INPUT_IDLE}
        return DisplayReading(self._touched_at_s, is_inhibited=is_inhibited)

    @property
    def _has_input_idle(self) -> bool:
        return self._globals.get(_EXT, (0, 0))[1] >= 2

    def _connect(self) -> bool:
        """Connect and subscribe; return whether there is a seat."""
        self._received.clear()
        self._globals.clear()
        self._idle_objects.clear()
        self._is_synced = False
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(TIMEOUT_S)
        self._socket.connect(str(self._file))
        self._send(_DISPLAY, 1, struct.pack("=I", _REGISTRY))
        self._send(_DISPLAY, 0, struct.pack("=I", _SYNC))
        deadline_s = time.monotonic() + TIMEOUT_S
        while not self._is_synced:
            if time.monotonic() > deadline_s:
                raise SensorError(f"it has not answered within {TIMEOUT_S:g} s")
            self._take_news(WAIT_S)
        if "wl_seat" not in self._globals:
            return False
        self._subscribe()
        return True

    def _subscribe(self) -> None:
        self._bind("wl_seat", 1, _SEAT)
        ask = struct.pack("=III", _IDLE, IDLE_AFTER_MS, _SEAT)
        if _EXT in self._globals:
            self._bind(_EXT, 2 if self._has_input_idle else 1, _NOTIFIER)
            self._send(_NOTIFIER, 1, ask)
            if self._has_input_idle:
                self._send(_NOTIFIER, 2, struct.pack("=III", _INPUT_IDLE, IDLE_AFTER_MS, _SEAT))
        elif _KDE in self._globals:
            self._bind(_KDE, 1, _NOTIFIER)
            self._send(_NOTIFIER, 0, struct.pack("=III", _IDLE, _SEAT, IDLE_AFTER_MS))
        else:
            raise SensorError(f"it does not tell: no {_EXT}")

    def _bind(self, interface: str, version: int, new_id: int) -> None:
        name, _ = self._globals[interface]
        text = interface.encode() + b"\0"
        text += b"\0" * (-len(text) % 4)
        head = struct.pack("=II", name, len(interface) + 1)
        self._send(_REGISTRY, 0, head + text + struct.pack("=II", version, new_id))

    def _send(self, target: int, opcode: int, arguments: bytes) -> None:
        assert self._socket is not None
        head = struct.pack("=II", target, (8 + len(arguments)) << 16 | opcode)
        self._socket.sendall(head + arguments)

    def _take_news(self, wait_s: float) -> None:
        """Take what has come, waiting for `wait_s` at most."""
        assert self._socket is not None
        if not select.select([self._socket], [], [], wait_s)[0]:
            return
        data = self._socket.recv(65536)
        if not data:
            raise SensorError("it has closed the connection")
        self._received += data
        while len(self._received) >= 8:
            target, word = struct.unpack_from("=II", self._received)
            size = word >> 16
            if not 8 <= size <= _MAX_PACKET_BYTES:
                raise SensorError("this is no Wayland compositor")
            if len(self._received) < size:
                return
            arguments = bytes(self._received[8:size])
            del self._received[:size]
            self._take(target, word & 0xFFFF, arguments)

    def _take(self, target: int, opcode: int, arguments: bytes) -> None:
        if target == _DISPLAY and opcode == 0:
            _, _, length = struct.unpack_from("=III", arguments)
            told = arguments[12 : 12 + length].rstrip(b"\0").decode("utf-8", "replace")
            raise SensorError(f"it refuses: {told}")
        if target == _SYNC:
            self._is_synced = True
        elif target == _REGISTRY and opcode == 0:
            name, length = struct.unpack_from("=II", arguments)
            interface = arguments[8 : 8 + length].rstrip(b"\0").decode("utf-8", "replace")
            (version,) = struct.unpack_from("=I", arguments, len(arguments) - 4)
            self._globals.setdefault(interface, (name, version))
        elif target in (_IDLE, _INPUT_IDLE):
            self._take_idle(target, is_idle=opcode == 0)

    def _take_idle(self, target: int, *, is_idle: bool) -> None:
        now_s = time.monotonic()
        watched = _INPUT_IDLE if self._has_input_idle else _IDLE
        if is_idle:
            self._idle_objects.add(target)
        else:
            self._idle_objects.discard(target)
        if target == watched:
            self._touched_at_s = now_s - (IDLE_AFTER_MS / 1000.0 if is_idle else 0.0)


def _said(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"it has not answered within {TIMEOUT_S:g} s"
    return getattr(error, "strerror", None) or str(error)
