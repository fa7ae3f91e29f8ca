"""The agent's edges: its exit status and last words, its questions, its samples, kept pauses."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import trio
from trio.testing import MockClock

from p2p.errors import ListenError
from tests.fakes import child_programs as programs
from tests.fakes.virtual_time import in_nursery, let_processes_run, run_virtual, settle, until
from volunteer.agent import __main__ as agent_main
from volunteer.agent import demo_client
from volunteer.agent.bookkeeper import Bookkeeper
from volunteer.agent.kept_pause import keep_pause, read_pause
from volunteer.agent.sampling import SAMPLE_DEADLINE_S, Sampler
from volunteer.agent.traffic import TrafficMeter
from volunteer.errors import ControlError, NoAgentError, StorageFullError
from volunteer.files import lock_folder
from volunteer.locations import HOME_VARIABLE, Locations
from volunteer.messages import ControlFault, ControlReply, Generate, Status, encode_line
from volunteer.policy.signals import OwnerPause

# ------------------------------------------------------------------------------- __main__


def run_agent(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None, *argv: str
) -> tuple[int, str]:
    """Run main() with an agent that ends by `error`; return exit status and log."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    def run(options: object) -> None:
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


# -------------------------------------------------------------------------------- sampling

GENERATES = """
command = next(commands())
say(type="generated", text=command["prompt"] + "!", num_tokens=1)
"""
CANNOT = """
next(commands())
say(type="failed", message="no such state", hint="train first")
"""


def sampler(tmp_path: Path, script: str) -> Sampler:
    made = Sampler(tmp_path, "dense", tmp_path / "sampler.log")
    made._argv = programs.python(script)
    return made


def request() -> Generate:
    return Generate(prompt="to be", max_tokens=4, temperature=1.0, seed=1)


def test_a_sample_is_the_answer_of_one_process(tmp_path: Path) -> None:
    made = sampler(tmp_path, GENERATES)

    async def main(clock: MockClock) -> None:
        assert (await made.sample("s", request())).text == "to be!"
        assert (await made.sample("s", request())).num_tokens == 1
        assert not psutil.Process().children()

    run_virtual(main)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (CANNOT, "no such state"),
        (programs.CRASHES_AT_ONCE, "exit status 3"),
        (programs.GARBAGE + "sys.exit(0)", "exit status 0"),
        (programs.FLOOD, "exit status -9"),
    ],
    ids=["refused", "crash", "garbage", "flood"],
)
def test_a_sample_that_comes_to_nothing_is_told(tmp_path: Path, script: str, message: str) -> None:
    made = sampler(tmp_path, script.replace("sys.stdin.read()", ""))

    async def main(clock: MockClock) -> None:
        with pytest.raises(ControlError, match=message):
            await made.sample("s", request())
        assert not psutil.Process().children()

    run_virtual(main)


def test_one_sample_at_a_time_and_not_for_ever(tmp_path: Path) -> None:
    made = sampler(tmp_path, programs.DEAF)

    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        errors: list[str] = []

        async def sample() -> None:
            with pytest.raises(ControlError) as caught:
                await made.sample("s", request())
            errors.append(str(caught.value))

        nursery.start_soon(sample)
        await until(lambda: psutil.Process().children())
        await sample()
        assert "already" in errors[0]
        await let_processes_run(3)
        clock.jump(SAMPLE_DEADLINE_S)
        await until(lambda: len(errors) == 2)
        assert "no text within" in errors[1]
        assert not psutil.Process().children()
        made._argv = [str(tmp_path / "nothing")]
        await sample()
        assert "cannot be started" in errors[2]

    run_virtual(in_nursery(main))


# ------------------------------------------------------------------------------ kept pause


def test_a_pause_outlives_a_restart_on_another_clock(tmp_path: Path) -> None:
    file = tmp_path / "pause.json"
    assert read_pause(file, 5.0) is None
    keep_pause(file, OwnerPause(), 100.0)
    assert read_pause(file, 5.0) == OwnerPause()
    keep_pause(file, OwnerPause(until_s=3700.0), 100.0)
    kept = read_pause(file, 5.0)
    assert kept is not None
    assert kept.until_s == pytest.approx(3605.0, abs=5.0)
    keep_pause(file, OwnerPause(until_s=99.0), 100.0)
    assert read_pause(file, 5.0) is None, "it ended meanwhile"
    keep_pause(file, None, 100.0)
    assert not file.exists()
    keep_pause(file, None, 100.0)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b'{"until_unix_s": "x"}',
        b'{"until_unix_s": 1e999}',
        b"\xff",
        b"[" * 99999,
    ],
    ids=range(7),
)
def test_a_pause_that_cannot_be_read_is_a_pause(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "pause.json"
    file.write_bytes(content)
    assert read_pause(file, 5.0) == OwnerPause()


def test_a_pause_that_cannot_be_kept_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep_pause(tmp_path / "nowhere" / "pause.json", OwnerPause(), 1.0)
    assert "will not outlive" in caplog.text


# --------------------------------------------------------------------------------- traffic


def test_every_byte_is_accounted_once() -> None:
    written: list[tuple[str, int, int]] = []
    counters = SimpleNamespace(
        sent_bytes_by_purpose={"sync": 10}, received_bytes_by_purpose={"blobs": 5}
    )
    swarm = cast("Any", SimpleNamespace(statistics=lambda: counters))
    queue: list[Callable[[], object]] = []
    keeper = cast("Bookkeeper", SimpleNamespace(queue=queue.append))
    ledger = cast("Any", SimpleNamespace(add_bytes=lambda *row: written.append(row)))
    meter = TrafficMeter(swarm, keeper, ledger)

    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        await meter.flush()
        nursery.start_soon(meter.run)
        await settle()
        counters.sent_bytes_by_purpose = {"sync": 25}
        clock.jump(60.0)
        await settle()
        await meter.flush()
        for write in queue:
            write()

    run_virtual(in_nursery(main))
    assert written == [("blobs", 0, 5), ("sync", 10, 0), ("sync", 15, 0)]
