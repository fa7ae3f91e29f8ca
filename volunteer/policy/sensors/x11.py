"""How long an X11 display has been untouched, asked with the X protocol itself.

Runs in: agent. MIT-SCREEN-SAVER's QueryInfo over the display's socket: no library, no child, and
a deadline on every byte. Only a real X server is asked: on Wayland the display is Xwayland's, which
sees the input of X programs alone, may be started by the question, and can hang (BOINC PR#7064).

X protocol: https://www.x.org/releases/current/doc/xproto/x11protocol.html (Encoding),
https://www.x.org/releases/current/doc/scrnsaverproto/saver.html.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path

from volunteer.policy.sensors.display import DisplayReading
from volunteer.policy.sensors.places import Places
from volunteer.policy.sensors.watcher import SensorError

TIMEOUT_S = 1.0
_MAX_SETUP_BYTES = 1 << 20
_COOKIE = b"MIT-MAGIC-COOKIE-1"
_EXTENSION = b"MIT-SCREEN-SAVER"
_QUERY_EXTENSION = 98
_QUERY_INFO = 1
_SAVER_ON = 1


def find_displays(places: Places) -> list[int]:
    """Return the numbers of the displays that a real X server of this machine has."""
    try:
        names = [file.name for file in places.x11_dir.iterdir()]
    except OSError:
        return []
    numbers = sorted(int(name[1:]) for name in names if name[:1] == "X" and name[1:].isdigit())
    return [number for number in numbers if is_real_server(places, number)]


def is_real_server(places: Places, number: int) -> bool:
    """Return whether display `number` is an X server's own, and not a Wayland compositor's.

    The lock file names the process: `Xorg`, `Xvnc`, `Xvfb`; or the compositor, or `Xwayland`. A
    server that chose its number by itself has no lock file; compositors always do, so that it may
    be asked who listens without starting anything. One of another user is that user's; logind
    tells of it.
    """
    try:
        pid = int((places.lock_dir / f".X{number}-lock").read_text("ascii"))
    except (OSError, ValueError):
        pid = _listener(places.x11_dir / f"X{number}")
    try:
        comm_file = places.proc_dir / str(pid) / "comm"
        name = comm_file.read_text("utf-8", "replace").strip()
        if comm_file.stat().st_uid not in (0, os.getuid()):
            return False
    except OSError:
        return False
    return name.startswith("X") and not name.startswith("Xwayland")


def _listener(socket_file: Path) -> int:
    """Return the process that listens on a socket; 0 where nobody does, or the system hides it."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT_S)
        try:
            connection.connect(str(socket_file))
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        except OSError:
            return 0
    return int(struct.unpack("3i", credentials)[0])


def find_cookie(places: Places, number: int) -> bytes:
    """Return the password for a display; empty where none is found (some servers need none)."""
    files = [places.x_authority, places.home_dir / ".Xauthority"]
    files += [
        places.runtime_dir / "gdm" / "Xauthority",
        *sorted(places.runtime_dir.glob("xauth_*")),
    ]
    for file in files:
        try:
            data = file.read_bytes() if file is not None else b""
        except OSError:
            continue
        if cookie := _cookie_in(data, number):
            return cookie
    return b""


def _cookie_in(data: bytes, number: int) -> bytes:
    """Return the first local display's cookie in an Xauthority file."""
    entries = _entries(data)
    for family, display, name, secret in entries:
        is_local = family in (256, 65535)
        if is_local and name == _COOKIE and display in (b"", str(number).encode()):
            return secret
    return b""


def _entries(data: bytes) -> list[tuple[int, bytes, bytes, bytes]]:
    """Return (family, display, name, secret) of every whole entry."""
    entries: list[tuple[int, bytes, bytes, bytes]] = []
    place = 0
    while place + 2 <= len(data):
        (family,) = struct.unpack_from(">H", data, place)
        place += 2
        fields = []
        for _ in range(4):
            if place + 2 > len(data):
                return entries
            (length,) = struct.unpack_from(">H", data, place)
            fields.append(data[place + 2 : place + 2 + length])
            place += 2 + length
        if place > len(data):
            return entries
        entries.append((family, fields[1], fields[2], fields[3]))
    return entries


class X11Source:
    """One display."""

    def __init__(self, places: Places, number: int) -> None:
        """Ask display `number`."""
        self.name = f"X11 :{number}"
        self._places = places
        self._number = number
        self._socket: socket.socket | None = None
        self._root = 0
        self._opcode = 0

    def read(self) -> DisplayReading:
        """Return how long it has been untouched."""
        try:
            if self._socket is None:
                self._connect()
            reply = self._ask(struct.pack("<BBHI", self._opcode, _QUERY_INFO, 2, self._root))
        except (OSError, struct.error, SensorError) as error:
            self.close()
            raise error if isinstance(error, SensorError) else SensorError(_said(error)) from error
        _, since_input_ms = struct.unpack_from("<II", reply, 12)
        return DisplayReading(time.monotonic() - since_input_ms / 1000.0, reply[1] == _SAVER_ON)

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self) -> None:
        cookie = find_cookie(self._places, self._number)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(TIMEOUT_S)
        self._socket.connect(str(self._places.x11_dir / f"X{self._number}"))
        name = _COOKIE if cookie else b""
        head = struct.pack("<BxHHHHxx", ord("l"), 11, 0, len(name), len(cookie))
        self._socket.sendall(head + _padded(name) + _padded(cookie))
        self._root = self._read_setup()
        query = struct.pack("<BxHHxx", _QUERY_EXTENSION, 2 + len(_padded(_EXTENSION)) // 4, 16)
        reply = self._ask(query + _padded(_EXTENSION))
        if not reply[8]:
            raise SensorError("this X server does not know MIT-SCREEN-SAVER")
        self._opcode = reply[9]

    def _read_setup(self) -> int:
        """Read the server's greeting; return the root window of its first screen."""
        status, reason_bytes, _, _, words = struct.unpack("<BBHHH", self._receive(8))
        if 4 * words > _MAX_SETUP_BYTES:
            raise SensorError("this is no X server")
        body = self._receive(4 * words)
        if status != 1:
            told = body[:reason_bytes].decode("ascii", "replace").strip()
            raise SensorError(f"it does not let us in ({told or 'no reason told'})")
        vendor_bytes, _, num_screens, num_formats = struct.unpack_from("<HHBB", body, 16)
        if not num_screens:
            raise SensorError("it has no screen")
        first_screen = 32 + (vendor_bytes + 3 & ~3) + 8 * num_formats
        (root,) = struct.unpack_from("<I", body, first_screen)
        return int(root)

    def _ask(self, request: bytes) -> bytes:
        """Send a request; return its reply of 32 bytes, past any events."""
        assert self._socket is not None
        self._socket.sendall(request)
        while True:
            packet = self._receive(32)
            if packet[0] == 1:
                self._receive(4 * struct.unpack_from("<I", packet, 4)[0])
                return packet
            if packet[0] == 0:
                raise SensorError(f"it answers with error {packet[1]}")

    def _receive(self, num_bytes: int) -> bytes:
        assert self._socket is not None
        if num_bytes > _MAX_SETUP_BYTES:
            raise SensorError("this is no X server")
        data = bytearray()
        while len(data) < num_bytes:
            more = self._socket.recv(num_bytes - len(data))
            if not more:
                raise SensorError("it has closed the connection")
            data += more
        return bytes(data)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)


def _said(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"it has not answered within {TIMEOUT_S:g} s"
    return getattr(error, "strerror", None) or str(error)
