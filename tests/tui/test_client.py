"""Both clients against an agent that answers well, badly, late or not at all."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.fake_agent import FakeAgent, make_status, run_in_thread
from tui import client
from tui.client import AsyncControlClient, ControlClient
from volunteer.answers import PeerStatus, Status
from volunteer.errors import ControlError, NoAgentError
from volunteer.locations import Locations
from volunteer.messages import MAX_LINE_BYTES, ControlFault, ControlReply, encode_line

BAD_REPLIES = {
    "not JSON": b"hello\n",
    "not UTF-8": b'{"version":1,"result":"\xff\xfe"}\n',
    "wrong shape": b"[1, 2]\n",
    "wrong result": b'{"version":1,"result":{"state":1}}\n',
    "no result": b'{"version":1}\n',
    "deep": b'{"version":1,"result":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    "too long": b"x" * (MAX_LINE_BYTES + 10) + b"\n",
    "long without an end": b"x" * (MAX_LINE_BYTES * 2),
}


def nothing(agent: FakeAgent) -> None:
    del agent


def test_a_status_comes_back_as_it_was_sent(locations: Locations) -> None:
    with (
        run_in_thread(locations.control_socket, nothing) as agent,
        ControlClient(locations.control_socket) as control,
    ):
        assert control.request("status", Status) == make_status()
        assert control.request("peers", list[PeerStatus]) == agent.peers
        assert [request.verb for request in agent.requests] == ["status", "peers"]


@pytest.mark.parametrize("reply", BAD_REPLIES.values(), ids=BAD_REPLIES.keys())
def test_a_broken_reply_is_a_control_error(locations: Locations, reply: bytes) -> None:
    def script(agent: FakeAgent) -> None:
        agent.raw_replies["status"] = reply

    with (
        run_in_thread(locations.control_socket, script),
        ControlClient(locations.control_socket, deadline_s=5.0) as control,
        pytest.raises(ControlError) as caught,
    ):
        control.request("status", Status)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("reply", BAD_REPLIES.values(), ids=BAD_REPLIES.keys())
async def test_a_broken_reply_is_a_control_error_in_the_view(
    agent: FakeAgent, reply: bytes
) -> None:
    agent.raw_replies["status"] = reply
    control = AsyncControlClient(agent.socket_file)
    with pytest.raises(ControlError):
        await control.request("status", Status)
    # The next request does not read what was left over.
    del agent.raw_replies["status"]
    assert await control.request("status", Status) == agent.status
    control.close()


def test_a_fault_carries_message_hint_and_status(locations: Locations) -> None:
    def script(agent: FakeAgent) -> None:
        agent.faults["pause"] = ControlFault(message="no\x1b[1m", hint="try", exit_code=2)
        agent.faults["resume"] = ControlFault(message="no", exit_code=99)

    with (
        run_in_thread(locations.control_socket, script),
        ControlClient(locations.control_socket) as control,
    ):
        with pytest.raises(ControlError) as caught:
            control.request("pause", object)
        assert (str(caught.value), caught.value.hint) == ("no [1m", "try")
        assert caught.value.exit_code == 2
        with pytest.raises(ControlError) as caught:
            control.request("resume", object)
        assert caught.value.exit_code == 1


def test_another_version_is_told_in_words() -> None:
    line = encode_line(ControlReply(version=2, result=make_status()))
    with pytest.raises(ControlError, match="control version 2, this program 1"):
        client.parse_reply(line, Status)
    assert client.parse_reply(line, Status, any_version=True) == make_status()


def test_no_socket_means_no_agent(locations: Locations) -> None:
    with ControlClient(locations.control_socket) as control, pytest.raises(NoAgentError):
        control.request("status", Status)


def test_a_socket_that_was_left_behind_means_no_agent(home: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(home / "s"))
    left.close()
    with ControlClient(home / "s") as control, pytest.raises(NoAgentError):
        control.request("status", Status)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_the_socket_of_another_user_is_not_trusted(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = home / "s"
    file.touch()
    os.chown(file, 12345, 12345)
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    with pytest.raises(ControlError, match="belongs to another user"):
        client.verify_socket(file)


def test_windows_is_told_plainly(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "AF_UNIX")
    with pytest.raises(ControlError, match="Windows"):
        client.verify_socket(home / "s")


def test_a_silent_agent_has_a_deadline(locations: Locations) -> None:
    def script(agent: FakeAgent) -> None:
        agent.silent_verbs.add("status")

    with (
        run_in_thread(locations.control_socket, script),
        ControlClient(locations.control_socket, deadline_s=0.05) as control,
        pytest.raises(ControlError, match=r"not answered within 0\.05 s"),
    ):
        control.request("status", Status)


@contextmanager
def one_shot_server(socket_file: Path, act: Callable[[socket.socket], None]) -> Iterator[None]:
    """Accept one connection and let `act` deal with it."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(socket_file))
        server.listen(1)

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                act(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            thread.join()


def test_an_agent_that_dies_before_it_answers(home: Path) -> None:
    with (
        one_shot_server(home / "s", lambda connection: None),
        ControlClient(home / "s") as control,
        pytest.raises(NoAgentError),
    ):
        control.request("status", Status)


def test_a_reply_in_pieces_is_put_together(home: Path) -> None:
    line = encode_line(ControlReply(result=make_status()))

    def act(connection: socket.socket) -> None:
        connection.recv(65536)
        for start in range(0, len(line), 100):
            connection.sendall(line[start : start + 100])

    with one_shot_server(home / "s", act), ControlClient(home / "s") as control:
        assert control.request("status", Status) == make_status()


def test_trickling_bytes_do_not_move_the_deadline(home: Path) -> None:
    is_over = threading.Event()

    def act(connection: socket.socket) -> None:
        connection.recv(65536)
        while not is_over.wait(0.01):
            connection.sendall(b" ")

    with one_shot_server(home / "s", act):
        with (
            ControlClient(home / "s", deadline_s=0.1) as control,
            pytest.raises(ControlError, match="not answered"),
        ):
            control.request("status", Status)
        is_over.set()


def test_waiting_for_the_end_ends_with_it(locations: Locations) -> None:
    with (
        run_in_thread(locations.control_socket, nothing) as agent,
        ControlClient(locations.control_socket) as control,
    ):
        control.request("stop", object)
        control.wait_closed(10.0)
        assert [request.verb for request in agent.requests] == ["stop"]


def test_waiting_for_the_end_has_a_deadline(locations: Locations) -> None:
    with (
        run_in_thread(locations.control_socket, nothing),
        ControlClient(locations.control_socket) as control,
    ):
        control.request("status", Status)
        with pytest.raises(ControlError, match="still ending"):
            control.wait_closed(0.05)


async def test_watch_yields_statuses_and_one_none_a_silence(agent: FakeAgent) -> None:
    control = AsyncControlClient(agent.socket_file, deadline_s=0.05)
    statuses = control.watch(Status)
    assert await anext(statuses) == agent.status
    assert await anext(statuses) is None
    await agent.push(round_index=13)
    following = await anext(statuses)
    assert following is not None
    assert following.round_index == 13
    await agent.close()
    with pytest.raises(NoAgentError):
        await anext(statuses)


async def test_a_cancelled_request_leaves_no_reply_behind(agent: FakeAgent) -> None:
    agent.silent_verbs.add("stats")
    control = AsyncControlClient(agent.socket_file)
    task = asyncio.create_task(control.request("stats", object))
    while not agent.requests:
        await asyncio.to_thread(lambda: None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await control.request("status", Status) == agent.status
    control.close()


async def test_the_view_has_a_deadline_too(agent: FakeAgent) -> None:
    agent.silent_verbs.add("status")
    control = AsyncControlClient(agent.socket_file, deadline_s=0.05)
    with pytest.raises(ControlError, match="no answer within"):
        await control.request("status", Status)


async def test_no_agent_for_the_view(locations: Locations) -> None:
    control = AsyncControlClient(locations.control_socket)
    with pytest.raises(NoAgentError):
        await control.request("status", Status)
