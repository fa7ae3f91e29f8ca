"""X11 byte by byte: servers of our own that answer well, badly, late, or not at all.

Real servers are in tests/system/test_idle_desktops.py.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.socket_servers import Talk, exactly, listening, saying
from volunteer.policy.sensors import x11
from volunteer.policy.sensors.places import Places
from volunteer.policy.sensors.watcher import SensorError
from volunteer.policy.sensors.x11 import X11Source, find_cookie, find_displays

pytestmark = pytest.mark.slow
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
