"""Wayland byte by byte: compositors of our own that answer well, badly, late, or not at all.

Real servers are in tests/system/test_idle_desktops.py.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.socket_servers import exactly, listening, saying
from volunteer.policy.sensors import wayland
from volunteer.policy.sensors.display import DisplayReading, is_news
from volunteer.policy.sensors.places import Places
from volunteer.policy.sensors.watcher import SensorError
from volunteer.policy.sensors.wayland import WaylandSource, find_sockets

pytestmark = pytest.mark.slow


class Compositor:
    """Speaks Wayland to one client; `say` sends events from the test's thread."""

    def __init__(self, *globals_: tuple[str, int]) -> None:
        self.globals = globals_
        self.requests: list[tuple[int, int, bytes]] = []
        self.connection: socket.socket | None = None
        self.is_subscribed = threading.Event()

    def talk(self, connection: socket.socket) -> None:
        self.connection = connection
        while True:
            target, word = struct.unpack("=II", exactly(connection, 8))
            arguments = exactly(connection, (word >> 16) - 8)
            self.requests.append((target, word & 0xFFFF, arguments))
            if (target, word & 0xFFFF) == (1, 1):
                for number, (interface, version) in enumerate(self.globals, 1):
                    text = interface.encode() + b"\0"
                    text += b"\0" * (-len(text) % 4)
                    body = struct.pack("=II", number, len(interface) + 1) + text
                    self.say(2, 0, body + struct.pack("=I", version))
            elif (target, word & 0xFFFF) == (1, 0):
                self.say(3, 0, struct.pack("=I", 0))
                self.say(1, 1, struct.pack("=I", 3))
            elif target == 5:
                self.is_subscribed.set()

    def say(self, target: int, opcode: int, arguments: bytes = b"") -> None:
        assert self.connection is not None
        head = struct.pack("=II", target, (8 + len(arguments)) << 16 | opcode)
        self.connection.sendall(head + arguments)


EXT_1, EXT_2 = ("ext_idle_notifier_v1", 1), ("ext_idle_notifier_v1", 2)
KDE, SEAT = ("org_kde_kwin_idle", 1), ("wl_seat", 9)


@contextlib.contextmanager
def composing(
    folder: Path, *globals_: tuple[str, int]
) -> Iterator[tuple[Compositor, WaylandSource]]:
    compositor = Compositor(*globals_)
    file = folder / "wayland-0"
    with listening(file, compositor.talk):
        source = WaylandSource(file)
        try:
            yield compositor, source
        finally:
            source.close()


def idle_s(source: WaylandSource) -> float:
    reading = source.read()
    assert reading is not None
    return time.monotonic() - reading.touched_at_s


@pytest.mark.parametrize("globals_", [(SEAT, EXT_1), (KDE, SEAT), (KDE, EXT_1, SEAT)])
def test_a_compositor_tells_of_itself(
    tmp_path: Path, globals_: tuple[tuple[str, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wayland, "WAIT_S", 0.05)
    with composing(tmp_path, *globals_) as (compositor, source):
        assert idle_s(source) < 0.5, "used, as far as is known"
        assert compositor.is_subscribed.wait(5)
        compositor.say(6, 0)
        first = idle_s(source)
        assert 1.0 <= first < 1.5, "it has been idle for the second that was asked for"
        assert idle_s(source) > first, "and stays so without any message"
        compositor.say(6, 1)
        assert idle_s(source) < 0.5
        compositor.say(6, 0)
        assert idle_s(source) >= 1.0
    bound = [r for r in compositor.requests if r[:2] == (2, 0)]
    interface = bound[1][2][8:].split(b"\0")[0].decode()
    assert interface == (EXT_1 if EXT_1 in globals_ else KDE)[0]


def test_a_film_is_told_apart_from_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wayland, "WAIT_S", 0.05)
    with composing(tmp_path, SEAT, EXT_2) as (compositor, source):
        idle_s(source)
        assert compositor.is_subscribed.wait(5)
        compositor.say(7, 0)
        reading = source.read()
        assert reading is not None
        assert reading.is_inhibited, "no input, and yet not idle"
        assert time.monotonic() - reading.touched_at_s >= 1.0
        compositor.say(6, 0)
        reading = source.read()
        assert reading is not None
        assert not reading.is_inhibited


@pytest.mark.parametrize(
    ("globals_", "problem"), [((SEAT,), "it does not tell: no ext_idle_notifier_v1")]
)
def test_a_compositor_without_the_protocol_says_so(
    tmp_path: Path, globals_: tuple[tuple[str, int], ...], problem: str
) -> None:
    with composing(tmp_path, *globals_) as (_, source), pytest.raises(SensorError, match=problem):
        source.read()


def test_a_compositor_without_a_seat_is_no_desktop(tmp_path: Path) -> None:
    with composing(tmp_path, EXT_1) as (_, source):
        assert source.read() is None


def test_a_socket_that_nobody_listens_on_is_no_desktop(tmp_path: Path) -> None:
    file = tmp_path / "wayland-0"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(file))
    assert find_sockets(Places(runtime_dir=tmp_path)) == [file]
    assert WaylandSource(file).read() is None
    (tmp_path / "wayland-0.lock").touch()
    assert find_sockets(Places(runtime_dir=tmp_path)) == [file]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (struct.pack("=IIIII", 1, 24 << 16, 2, 0, 4) + b"bad\0", "it refuses: bad"),
        (b"\0\0\0\0\0\0\0\0", "no Wayland compositor"),
        (b"HTTP/1.1 400 Bad Request\r\n", "no Wayland compositor"),
        (struct.pack("=III", 2, 12 << 16, 7), "unpack"),
    ],
    ids=["error", "zeros", "http", "short"],
)
def test_a_peer_that_is_no_compositor_is_named(tmp_path: Path, data: bytes, problem: str) -> None:
    with listening(tmp_path / "wayland-0", saying(data)):
        source = WaylandSource(tmp_path / "wayland-0")
        with pytest.raises(SensorError, match=problem):
            source.read()
        source.close()


def read_to_the_end(source: WaylandSource) -> None:
    for _ in range(5):  # what was said before the end may come first
        source.read()


def test_a_compositor_that_ends_or_hangs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wayland, "WAIT_S", 0.05)
    monkeypatch.setattr(wayland, "TIMEOUT_S", 0.2)
    with composing(tmp_path, SEAT, EXT_1) as (compositor, source):
        idle_s(source)
        assert compositor.connection is not None
        compositor.connection.shutdown(socket.SHUT_RDWR)
        with pytest.raises(SensorError, match=r"closed the connection|reset by peer"):
            read_to_the_end(source)

    def hang(connection: socket.socket) -> None:
        while connection.recv(4096):
            pass

    with listening(tmp_path / "wayland-0", hang):
        source = WaylandSource(tmp_path / "wayland-0")
        with pytest.raises(SensorError, match=r"not answered within 0\.2 s"):
            source.read()


def test_news_is_a_touch_and_not_the_passing_of_time() -> None:
    before = DisplayReading(100.0)
    assert not is_news(before, DisplayReading(100.1))
    assert is_news(before, DisplayReading(101.0))
    assert is_news(before, DisplayReading(100.0, is_inhibited=True))
    assert is_news(None, before)
    assert is_news(before, None)
    assert not is_news(None, None)
