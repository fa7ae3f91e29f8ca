"""The bare command in a real terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import sys
import termios
from pathlib import Path

import pytest

from tests.fakes.fake_agent import run_in_thread
from volunteer.locations import Locations

ROOT = Path(__file__).parents[2]


def read_until(terminal: int, words: bytes, seen: bytes = b"") -> bytes:
    """Return what the terminal got, up to `words`; pytest's timeout bounds it."""
    while words not in seen:
        select.select([terminal], [], [])
        try:
            data = os.read(terminal, 65536)
        except OSError:
            data = b""
        assert data, f"the terminal was closed before {words!r}; it got {seen[-2000:]!r}"
        seen += data
    return seen


def open_view(home: Path, *arguments: str, **environ: str) -> tuple[int, int]:
    """Run the program in a terminal of its own; return its process id and the terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(PYTHONPATH=str(ROOT), ALLMENDE_HOME=str(home), **environ)
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        os.execv(sys.executable, [sys.executable, "-m", "tui.cli", *arguments])
    return pid, terminal


def exit_status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.system
@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "ctrl+c"])
def test_the_view_opens_in_a_terminal_and_leaves_a_note(
    home: Path, locations: Locations, key: bytes
) -> None:
    with run_in_thread(locations.control_socket, lambda agent: None) as agent:
        pid, terminal = open_view(home)
        try:
            read_until(terminal, b"by the swarm")
            os.write(terminal, key)
            read_until(terminal, b"goes on in the background")
            assert exit_status(pid) == 0
            assert "stop" not in [request.verb for request in agent.requests]
        finally:
            os.close(terminal)


@pytest.mark.system
def test_on_a_dumb_terminal_it_prints_the_status(home: Path, locations: Locations) -> None:
    with run_in_thread(locations.control_socket, lambda agent: None):
        pid, terminal = open_view(home, TERM="dumb")
        try:
            shown = read_until(terminal, b"Peer id")
            assert shown.startswith(b"Contributing: Nobody uses this machine.")
            assert b"\x1b" not in shown
            assert exit_status(pid) == 0
        finally:
            os.close(terminal)


@pytest.mark.system
def test_a_home_that_cannot_be_used_opens_no_view(home: Path) -> None:
    (home / "file").touch()
    pid, terminal = open_view(home / "file" / "home")
    try:
        shown = read_until(terminal, b"hint: ")
        assert b"cannot be made: a file is in the way" in shown
        assert b"\x1b" not in shown
        assert exit_status(pid) == 2
    finally:
        os.close(terminal)
