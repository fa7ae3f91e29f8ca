"""X11 and Wayland byte by byte: servers of our own that answer well, badly, late, or not at all.

Real servers are in tests/system/test_idle_desktops.py.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from volunteer.policy.sensors import wayland, x11
from volunteer.policy.sensors.display import DisplayReading, is_news
from volunteer.policy.sensors.places import Places
from volunteer.policy.sensors.watcher import SensorError
from volunteer.policy.sensors.wayland import WaylandSource, find_sockets
from volunteer.policy.sensors.x11 import X11Source, find_cookie, find_displays

pytestmark = pytest.mark.slow
Talk = Callable[[socket.socket], None]


@contextlib.contextmanager
def listening(file: Path, talk: Talk, times: int = 1) -> Iterator[None]:
    """Serve `times` connections by `talk`, one after another."""
    file.parent.mkdir(exist_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(file))
    listener.listen()

    def serve() -> None:
        for _ in range(times):
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(5)
                talk(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        thread.join(10)
        listener.close()
        file.unlink()


def exactly(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more = connection.recv(num_bytes - len(data))
        if not more:
            raise OSError("closed")
        data += more
    return data


# -------------------------------------------------------------------------------------------- X11

COOKIE = bytes(range(16))
ROOT = 0x4D2


def entry(family: int, address: bytes, display: bytes, name: bytes, secret: bytes) -> bytes:
    fields = b"".join(struct.pack(">H", len(f)) + f for f in (address, display, name, secret))
    return struct.pack(">H", family) + fields


def greeting() -> bytes:
    vendor, formats = b"The X.Org Foundation", 2
    vendor += b"\0" * (-len(vendor) % 4)
    body = struct.pack(
        "<IIIIHHBBBBBBBBI", 1, 0, 0, 0, 20, 65535, 1, formats, 0, 0, 32, 32, 8, 255, 0
    )
    body += vendor + b"\0" * (8 * formats) + struct.pack("<I", ROOT) + b"\0" * 36
    return struct.pack("<BBHHH", 1, 0, 11, 0, len(body) // 4) + body


def x_talk(
    idle_ms: int = 4200,
    *,
    is_there: bool = True,
    before: bytes = b"",
    state: int = 0,
    got: list[bytes] | None = None,
) -> Talk:
    def talk(connection: socket.socket) -> None:
        head = exactly(connection, 12)
        name_bytes, secret_bytes = struct.unpack_from("<HH", head, 6)
        auth = exactly(connection, (name_bytes + 3 & ~3) + (secret_bytes + 3 & ~3))
        if got is not None:
            got.append(auth)
        connection.sendall(greeting())
        query = exactly(connection, 8 + 16)
        assert query[8:] == b"MIT-SCREEN-SAVER"
        connection.sendall(struct.pack("<BxHIBBBB20x", 1, 1, 0, int(is_there), 143, 0, 0))
        while True:
            opcode, minor, length, drawable = struct.unpack("<BBHI", exactly(connection, 8))
            assert (opcode, minor, length, drawable) == (143, 1, 2, ROOT)
            reply = struct.pack("<BBHIIIIIB7x", 1, state, 2, 0, 0x55, 60_000, idle_ms, 0, 0)
            connection.sendall(before + reply)

    return talk


@pytest.fixture
def places(tmp_path: Path) -> Places:
    for name in ("x11", "lock", "run", "home", "proc"):
        (tmp_path / name).mkdir()
    return Places(
        x11_dir=tmp_path / "x11",
        lock_dir=tmp_path / "lock",
        runtime_dir=tmp_path / "run",
        home_dir=tmp_path / "home",
        proc_dir=tmp_path / "proc",
    )


def test_x11_says_when_it_was_touched_past_events(places: Places) -> None:
    event = bytes([12]) + b"\0" * 31
    with listening(places.x11_dir / "X5", x_talk(before=event)):
        source = X11Source(places, 5)
        reading = source.read()
        assert reading.touched_at_s == pytest.approx(time.monotonic() - 4.2, abs=0.5)
        assert not reading.is_saver_on
        assert source.read().touched_at_s == pytest.approx(reading.touched_at_s, abs=0.5)
        source.close()


def test_x11_is_shown_the_cookie_of_its_display(places: Places) -> None:
    got: list[bytes] = []
    entries = [
        entry(256, b"host", b"4", b"MIT-MAGIC-COOKIE-1", b"x" * 16),
        entry(256, b"host", b"5", b"XDM-AUTHORIZATION-1", b"y" * 16),
        entry(0, b"\x7f\0\0\1", b"5", b"MIT-MAGIC-COOKIE-1", b"z" * 16),
        entry(256, b"host", b"5", b"MIT-MAGIC-COOKIE-1", COOKIE),
    ]
    (places.home_dir / ".Xauthority").write_bytes(b"".join(entries))
    with listening(places.x11_dir / "X5", x_talk(got=got, state=1)):
        source = X11Source(places, 5)
        assert source.read().is_saver_on
        source.close()
    assert got == [b"MIT-MAGIC-COOKIE-1\0\0" + COOKIE]


@pytest.mark.parametrize(
    "where", ["run/gdm/Xauthority", "run/xauth_AbCdEf", "home/.Xauthority", "own"]
)
def test_cookies_are_found_where_login_managers_leave_them(
    places: Places, tmp_path: Path, where: str
) -> None:
    file = tmp_path / where
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(entry(65535, b"", b"", b"MIT-MAGIC-COOKIE-1", COOKIE))
    places = Places(
        runtime_dir=places.runtime_dir, home_dir=places.home_dir, x_authority=tmp_path / "own"
    )
    assert find_cookie(places, 0) == COOKIE


@settings(max_examples=50, deadline=None)
@given(data=st.binary(max_size=80))
def test_any_file_of_cookies_is_read(data: bytes) -> None:
    whole = entry(256, b"host", b"0", b"MIT-MAGIC-COOKIE-1", COOKIE)
    assert isinstance(x11._entries(data), list)
    assert x11._cookie_in(whole + data, 0) == COOKIE


def refusing(reason: bytes) -> Talk:
    def talk(connection: socket.socket) -> None:
        exactly(connection, 12)
        padded = reason + b"\0" * (-len(reason) % 4)
        connection.sendall(struct.pack("<BBHHH", 0, len(reason), 11, 0, len(padded) // 4) + padded)

    return talk


def saying(data: bytes) -> Talk:
    def talk(connection: socket.socket) -> None:
        connection.sendall(data)
        connection.recv(4096)
        connection.recv(4096)

    return talk


@pytest.mark.parametrize(
    ("talk", "problem"),
    [
        (refusing(b"No protocol specified\n"), r"does not let us in \(No protocol specified\)"),
        (x_talk(is_there=False), "does not know MIT-SCREEN-SAVER"),
        (x_talk(before=bytes([0, 3]) + b"\0" * 30), "answers with error 3"),
        (lambda connection: None, "closed|Broken pipe|reset by peer"),
        (saying(struct.pack("<BBHHH", 1, 0, 11, 0, 40) + b"\0" * 160), "no screen"),
    ],
    ids=["refused", "no extension", "error", "closed", "no screen"],
)
def test_an_x_server_that_does_not_tell_is_named(places: Places, talk: Talk, problem: str) -> None:
    with listening(places.x11_dir / "X5", talk):
        source = X11Source(places, 5)
        with pytest.raises(SensorError, match=problem):
            source.read()
        source.close()


def test_an_x_server_that_hangs_is_left_in_time(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(x11, "TIMEOUT_S", 0.2)

    def hang(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.recv(4096)  # until the other side gives up

    with listening(places.x11_dir / "X5", hang):
        begun_s = time.monotonic()
        with pytest.raises(SensorError, match=r"not answered within 0\.2 s"):
            X11Source(places, 5).read()
        assert time.monotonic() - begun_s < 2.0


def test_after_a_failure_it_is_asked_anew(places: Places) -> None:
    source = X11Source(places, 5)
    with pytest.raises(SensorError, match="No such file"):
        source.read()
    with listening(places.x11_dir / "X5", x_talk()):
        assert source.read().touched_at_s < time.monotonic()
        source.close()


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Xorg", [3]), ("Xvnc", [3]), ("Xwayland", []), ("gnome-shell", []), ("sway", []), (None, [])],
)
def test_only_real_x_servers_are_asked(
    places: Places, name: str | None, expected: list[int]
) -> None:
    """Xwayland's display is the compositor's by its lock file: no connection may start it."""
    (places.x11_dir / "X3").touch()
    (places.x11_dir / "Xfoo").touch()
    (places.lock_dir / ".X3-lock").write_text("      4242\n")
    if name is not None:
        (places.proc_dir / "4242").mkdir()
        (places.proc_dir / "4242" / "comm").write_text(name + "\n")
    assert find_displays(places) == expected


def test_a_server_without_a_lock_is_known_by_who_listens(places: Places) -> None:
    with listening(places.x11_dir / "X3", lambda connection: None):
        assert find_displays(places) == [], "its process has no name here"
    (places.proc_dir / str(os.getpid())).mkdir()
    (places.proc_dir / str(os.getpid()) / "comm").write_text("Xorg\n")
    with listening(places.x11_dir / "X3", lambda connection: None):
        assert find_displays(places) == [3]
    (places.x11_dir / "X3").touch()
    assert find_displays(places) == [], "nobody listens"


def test_without_x_there_are_no_displays(tmp_path: Path) -> None:
    assert find_displays(Places(x11_dir=tmp_path / "absent")) == []


# ---------------------------------------------------------------------------------------- Wayland


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
            source.read()

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
