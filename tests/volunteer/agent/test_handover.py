"""What one program of the agent leaves to the next: its socket, and when and why it went."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from volunteer.agent.handover import HANDOVER_VARIABLE, Handover

PID = 4711


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    found.bind(str(tmp_path / "control.sock"))
    found.listen(4)
    with found:
        yield found


def handed_on(listener: socket.socket) -> dict[str, str]:
    """Return the environment that a program leaves which listens."""
    before = Handover()
    before.hold(listener)
    before.want(1000.0, 512)
    before.release()  # it is handed on: it stays open
    listener.close()
    environ = before.environment({"A": "b"}, PID)
    assert before._listener is not None
    before._listener.detach()  # as exec does: the descriptor outlives the program
    return environ


def test_who_connects_meanwhile_is_waiting_at_the_socket(
    listener: socket.socket, tmp_path: Path
) -> None:
    environ = handed_on(listener)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(tmp_path / "control.sock"))
        client.sendall(b"hello\n")
        after = Handover.take(environ, PID)
        assert environ == {"A": "b"}  # for no child
        assert (after.last_restart_at_s, after.last_rss_bytes) == (1000.0, 512)
        assert not after.is_wanted
        taken = after.take_listener(tmp_path / "control.sock")
        assert taken is not None
        with taken:
            assert not os.get_inheritable(taken.fileno())
            connection, _ = taken.accept()
            with connection:
                assert connection.recv(10) == b"hello\n"
        assert after.take_listener(tmp_path / "control.sock") is None


def test_it_is_for_the_same_process_alone(listener: socket.socket, tmp_path: Path) -> None:
    environ = handed_on(listener)
    other = Handover.take(dict(environ), PID + 1)
    assert other.last_restart_at_s is None
    assert other.take_listener(tmp_path / "control.sock") is None
    for text in ("", "{}", "no json", '{"pid": "x"}', "null"):
        assert Handover.take({HANDOVER_VARIABLE: text}, PID).last_restart_at_s is None
    elsewhere = Handover.take(environ, PID)
    assert elsewhere.take_listener(tmp_path / "another.sock") is None


def test_a_descriptor_that_is_something_else_is_not_taken(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    text = f'{{"pid": {PID}, "descriptor": {descriptor}, "at_s": 1.0, "rss_bytes": 1}}'
    found = Handover.take({HANDOVER_VARIABLE: text}, PID)
    assert found.take_listener(tmp_path / "control.sock") is None
    assert stat.S_ISREG(os.fstat(descriptor).st_mode)  # and it is not closed
    os.close(descriptor)


def test_who_is_told_to_end_leaves_nothing(listener: socket.socket, tmp_path: Path) -> None:
    handover = Handover()
    handover.hold(listener)
    handover.want(1.0, 1)
    handover.cancel()
    assert not handover.is_wanted
    handover.release()
    listener.close()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client,
        pytest.raises(ConnectionRefusedError),
    ):
        client.connect(str(tmp_path / "control.sock"))
