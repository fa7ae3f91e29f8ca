"""The bare command in a real terminal, once."""

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

from tests.fakes.fake_agent import FakeAgent, run_in_thread
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


@pytest.mark.system
def test_the_view_opens_in_a_terminal_and_leaves_a_note(home: Path, locations: Locations) -> None:
    def script(agent: FakeAgent) -> None:
        del agent

    with run_in_thread(locations.control_socket, script) as agent:
        pid, terminal = pty.fork()
        if pid == 0:
            os.environ.update(PYTHONPATH=str(ROOT), ALLMENDE_HOME=str(home))
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
            os.execv(sys.executable, [sys.executable, "-m", "tui.cli"])
        try:
            read_until(terminal, b"by the swarm")
            os.write(terminal, b"q")
            read_until(terminal, b"goes on in the background")
            _, wait_status = os.waitpid(pid, 0)
            assert os.waitstatus_to_exitcode(wait_status) == 0
            assert "stop" not in [request.verb for request in agent.requests]
        finally:
            os.close(terminal)
