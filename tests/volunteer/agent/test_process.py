"""The agent's edges: its exit status and last words, its questions and its traffic."""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import threading
from pathlib import Path

import pytest
import trio

from p2p.errors import ListenError
from volunteer.agent import __main__ as agent_main
from volunteer.agent import demo_client
from volunteer.agent.handover import HANDOVER_VARIABLE, Handover
from volunteer.answers import Status
from volunteer.errors import ControlError, NoAgentError, StorageFullError
from volunteer.files import lock_folder
from volunteer.locations import HOME_VARIABLE, Locations
from volunteer.messages import ControlFault, ControlReply, encode_line

# ------------------------------------------------------------------------------- __main__


@pytest.fixture(autouse=True)
def collect_garbage_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` freezes what was imported, for an agent's life; here that would be pytest's."""
    monkeypatch.setattr(gc, "freeze", lambda: None)


def run_agent(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None, *argv: str
) -> tuple[int, str]:
    """Run main() with an agent that ends by `error`; return exit status and log."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    def run(options: object, handover: Handover) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(agent_main, "_run", run)
    monkeypatch.setattr(logging, "basicConfig", lambda **options: None)
    handler = Handler()
    agent_main.log.addHandler(handler)
    try:
        with pytest.raises(SystemExit) as caught:
            agent_main.main(list(argv))
    finally:
        agent_main.log.removeHandler(handler)
    assert isinstance(caught.value.code, int)
    return caught.value.code, "\n".join(lines)


FULL = StorageFullError("no space left", hint="make some")


@pytest.mark.parametrize(
    ("error", "exit_code", "text"),
    [
        (None, 0, ""),
        (FULL, 1, "no space left (hint: make some)"),
        (NoAgentError("nobody"), 3, "nobody (hint: start one with `allmende start`)"),
        (ListenError("the port is taken"), 1, "the port is taken"),
        (ExceptionGroup("g", [ExceptionGroup("h", [FULL])]), 1, "no space left (hint: make some)"),
    ],
)
def test_the_last_word_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None, exit_code: int, text: str
) -> None:
    assert run_agent(monkeypatch, error) == (exit_code, text)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a bug"),
        ExceptionGroup("g", [ValueError("a bug")]),
        ExceptionGroup("g", [FULL, ValueError("a bug")]),
    ],
)
def test_an_error_of_its_own_is_told_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    exit_code, text = run_agent(monkeypatch, error)
    assert exit_code == 1
    assert "please report it" in text
    assert "a bug" in text
    assert "Traceback" in text


def test_who_begins_anew_does_so_with_its_own_arguments_once_all_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[tuple[str, list[str], dict[str, str]]] = []

    def run(options: object, handover: Handover) -> None:
        handover.want(12.5, 400_000_000)

    monkeypatch.setattr(agent_main, "_run", run)
    monkeypatch.setattr(logging, "basicConfig", lambda **options: None)
    monkeypatch.setattr(os, "execve", lambda *call: started.append(call))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-P", "-m", "volunteer.agent", "--no-dht"])
    with pytest.raises(SystemExit):
        agent_main.main(["--no-dht"])
    ((program, argv, environ),) = started
    assert program == sys.executable
    assert argv == [sys.executable, "-P", "-m", "volunteer.agent", "--no-dht"]
    after = Handover.take(environ, os.getpid())
    assert (after.last_restart_at_s, after.last_rss_bytes) == (12.5, 400_000_000)
    assert HANDOVER_VARIABLE not in os.environ


def test_a_second_agent_for_a_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    monkeypatch.setattr(logging, "basicConfig", lambda **options: None)
    with lock_folder(tmp_path), pytest.raises(SystemExit) as caught:
        agent_main.main([])
    assert caught.value.code == 1


# ---------------------------------------------------------------------------- demo_client


@pytest.fixture
def home(tmp_path: Path) -> Locations:
    locations = Locations.from_environment({HOME_VARIABLE: str(tmp_path)})
    locations.prepare()
    return locations


def ask(home: Locations, reply: bytes | None) -> Status:
    """Ask an agent that answers `reply`, or nothing at all."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(home.control_socket))
    listener.listen()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(65536).endswith(b"\n")
            if reply is not None:
                connection.sendall(reply)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        status: Status = trio.run(demo_client.ask, home, "status", Status, {})
        return status
    finally:
        thread.join()
        listener.close()
        home.control_socket.unlink()


def test_an_answer_is_read(home: Locations) -> None:
    status = Status(state="paused", reason="r", resumes_when="w")
    assert ask(home, encode_line(ControlReply(result=status))) == status


def test_a_refusal_is_an_error_with_its_hint(home: Locations) -> None:
    fault = ControlFault(message="not now", hint="later")
    with pytest.raises(ControlError, match="not now") as caught:
        ask(home, encode_line(ControlReply(fault=fault)))
    assert caught.value.hint == "later"


@pytest.mark.parametrize(
    "reply",
    [None, b"", b"nonsense\n", b"{}\n", b"half", b"[" * 100_000 + b"\n", b'{"result": 5}\n'],
    ids=range(7),
)
def test_what_is_no_answer_is_an_error(home: Locations, reply: bytes | None) -> None:
    with pytest.raises(ControlError, match="answer"):
        ask(home, reply)


def test_nobody_there_is_no_agent(home: Locations) -> None:
    with pytest.raises(NoAgentError):
        trio.run(demo_client.ask, home, "status", Status, {})
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stale.bind(str(home.control_socket))
    stale.close()
    with pytest.raises(NoAgentError):
        trio.run(demo_client.ask, home, "status", Status, {})
