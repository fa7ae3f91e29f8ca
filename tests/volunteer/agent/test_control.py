"""The control socket: whatever a client does, it gets an answer or its end; the agent goes on."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import stat
from pathlib import Path

import msgspec
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.fakes.control_clients import Agent, Connect, serve
from tests.fakes.virtual_time import (
    let_processes_run,
    settle,
)
from volunteer.agent.control import (
    MAX_CLIENTS,
    SEND_DEADLINE_S,
    WATCH_EVERY_S,
    serve_control,
)
from volunteer.answers import Status
from volunteer.errors import ControlError
from volunteer.messages import (
    CONTROL_VERSION,
    MAX_LINE_BYTES,
    ControlReply,
    ControlRequest,
    encode_line,
)


@pytest.fixture
def socket_file(tmp_path: Path) -> Path:
    return tmp_path / "control.sock"


def test_a_socket_of_the_owner_alone_that_goes_with_the_agent(socket_file: Path) -> None:
    mask = os.umask(0)

    async def body(connect: Connect, clock: MockClock) -> None:
        assert stat.S_IMODE(os.stat(socket_file).st_mode) == 0o600
        assert os.umask(0) == 0, "the process keeps its umask"
        await (await connect()).echo(a=1)

    try:
        serve(socket_file, body)
    finally:
        os.umask(mask)
    assert not socket_file.exists()


def test_a_stale_socket_is_replaced(socket_file: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stale:
        stale.bind(str(socket_file))

    async def body(connect: Connect, clock: MockClock) -> None:
        await (await connect()).echo()

    serve(socket_file, body)


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_socket_is_left_alone(socket_file: Path, kind: str) -> None:
    if kind == "file":
        socket_file.write_text("precious")
    elif kind == "folder":
        socket_file.mkdir()
    else:
        socket_file.symlink_to("precious")
    with pytest.raises(ControlError, match="in the way"):
        trio.run(functools.partial(serve_control, socket_file, {}))
    assert os.path.lexists(socket_file)
    if kind == "file":
        assert socket_file.read_text() == "precious"


def test_a_name_that_is_too_long_is_told(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match="cannot listen"):
        trio.run(functools.partial(serve_control, tmp_path / ("x" * 150), {}))


def test_one_connection_asks_many_things(socket_file: Path) -> None:
    agent = Agent()

    async def body(connect: Connect, clock: MockClock) -> None:
        client = await connect()
        requests = [encode_line(ControlRequest(verb="echo", args={"n": n})) for n in range(20)]
        await client.stream.send_all(b"".join(requests))
        for n in range(20):
            reply = await client.line()
            assert reply is not None
            assert reply.result == {"n": n}
            assert reply.version == CONTROL_VERSION

    serve(socket_file, body, agent)
    assert len(agent.calls) == 20


@pytest.mark.parametrize(
    ("verb", "message", "hint", "exit_code"),
    [
        ("full", "no space left", "make some", 1),
        ("broken", "the books cannot be read: disk I/O error", "see the agent's log", 1),
        (
            "fly",
            "unknown verb 'fly'",
            "known: broken, echo, full, status, stop, watch",
            2,
        ),
        ("", "unknown verb ''", "known: broken, echo, full, status, stop, watch", 2),
    ],
)
def test_what_goes_wrong_is_a_fault(
    socket_file: Path, verb: str, message: str, hint: str, exit_code: int
) -> None:
    async def body(connect: Connect, clock: MockClock) -> None:
        client = await connect()
        reply = await client.ask(encode_line(ControlRequest(verb=verb)))
        assert reply is not None
        assert reply.fault is not None
        fault = reply.fault
        assert (fault.message, fault.hint, fault.exit_code) == (message, hint, exit_code)
        await client.echo(still="here")

    serve(socket_file, body)


GARBAGE = [
    b"",
    b"hello",
    b"GET / HTTP/1.1",
    b"{}",
    b"null",
    b"[]",
    b'{"verb": 3}',
    b'{"verb": "echo", "args": []}',
    b'{"verb": "echo", "args": {"n": 1e999}}',
    b'{"verb": "\xff"}',
    b'{"verb": "\\ud800"}',
    b'{"version": "1", "verb": "echo"}',
    b"\x00" * 100,
    b"[" * 100_000,
    b'{"verb": "echo", "args": {"a": ' + b"[" * 100_000,
    b'{"verb": "echo", "args": {"a": ' + b'{"a":' * 100_000,
    b'{"verb": "echo", "args": {"n": 1' + b"0" * 5000 + b"}}",
]


@pytest.mark.parametrize("line", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_told_and_the_connection_goes_on(socket_file: Path, line: bytes) -> None:
    async def body(connect: Connect, clock: MockClock) -> None:
        client = await connect()
        reply = await client.ask(line + b"\n")
        assert reply is not None
        assert reply.fault is not None
        assert reply.fault.exit_code == 2
        assert "not understood" in reply.fault.message
        await client.echo(still="here")

    serve(socket_file, body)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=300))
def test_any_bytes_end_in_replies(socket_file: Path, data: bytes) -> None:
    async def body(connect: Connect, clock: MockClock) -> None:
        client = await connect()
        await client.stream.send_all(data + b"\n")
        for _ in range(data.count(b"\n") + 1):
            reply = await client.line()
            assert reply is not None
            assert reply.fault is not None
        await client.echo()

    serve(socket_file, body)


def test_a_line_that_is_too_long_is_told(socket_file: Path) -> None:
    async def body(connect: Connect, clock: MockClock) -> None:
        client = await connect()
        replies: list[ControlReply | None] = []

        async def read() -> None:
            replies.append(await client.line())
            replies.append(await client.line())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            with contextlib.suppress(trio.BrokenResourceError):  # it does not read to the end
                await client.stream.send_all(b"x" * (2 * MAX_LINE_BYTES))
        reply, end = replies
        assert reply is not None
        assert reply.fault is not None
        assert "too long" in reply.fault.message
        assert end is None
        await (await connect()).echo()

    serve(socket_file, body)


def test_a_whole_line_that_is_too_long_is_told(socket_file: Path) -> None:
    async def body(connect: Connect, clock: MockClock) -> None:
        client = await connect()
        request = encode_line(ControlRequest(verb="echo", args={"a": "x" * MAX_LINE_BYTES}))
        reply = await client.ask(request)
        assert reply is not None
        assert reply.fault is not None
        assert "at most" in reply.fault.message or "too long" in reply.fault.message

    serve(socket_file, body)


def test_half_lines_wait_for_the_rest(socket_file: Path) -> None:
    async def body(connect: Connect, clock: MockClock) -> None:
        client = await connect()
        request = encode_line(ControlRequest(verb="echo", args={"ü": "ß"}))
        for i in range(len(request)):
            await client.stream.send_all(request[i : i + 1])
            await let_processes_run() if i % 20 == 0 else await settle(2)
        reply = await client.line()
        assert reply is not None
        assert reply.result == {"ü": "ß"}

    serve(socket_file, body)


def test_half_a_line_and_the_end_is_nothing(socket_file: Path) -> None:
    agent = Agent()

    async def body(connect: Connect, clock: MockClock) -> None:
        client = await connect()
        await client.stream.send_all(b'{"verb": "stop"}')
        await client.stream.send_eof()
        assert await client.line() is None
        await (await connect()).echo()

    serve(socket_file, body, agent)
    assert [verb for verb, _ in agent.calls] == ["echo"]


def test_another_version_may_only_stop(socket_file: Path) -> None:
    agent = Agent()

    async def body(connect: Connect, clock: MockClock) -> None:
        client = await connect()
        for verb in ("echo", "watch", "fly"):
            request = ControlRequest(version=CONTROL_VERSION + 1, verb=verb)
            reply = await client.ask(encode_line(request))
            assert reply is not None
            assert reply.fault is not None
            assert f"version {CONTROL_VERSION}, not {CONTROL_VERSION + 1}" in reply.fault.message
            assert "stop" in reply.fault.hint
        reply = await client.ask(encode_line(ControlRequest(version=99, verb="stop")))
        assert reply is not None
        assert reply.result == {"stopping": True}

    serve(socket_file, body, agent)
    assert [verb for verb, _ in agent.calls] == ["stop"]


def test_one_client_too_many_is_refused_until_another_goes(socket_file: Path) -> None:
    async def body(connect: Connect, clock: MockClock) -> None:
        clients = [await connect() for _ in range(MAX_CLIENTS)]
        for client in clients:
            await client.echo()
        extra = await connect()
        assert await extra.line() is None
        for client in clients:
            await client.echo()
        await clients[0].stream.aclose()
        await let_processes_run(3)
        await (await connect()).echo()

    serve(socket_file, body)


def test_watching_is_a_status_a_second(socket_file: Path) -> None:
    agent = Agent()

    async def body(connect: Connect, clock: MockClock) -> None:
        client = await connect()
        for number in range(1, 4):
            reply = await (
                client.ask(encode_line(ControlRequest(verb="watch")))
                if number == 1
                else client.line()
            )
            assert reply is not None
            assert msgspec.convert(reply.result, Status).state == "contributing"
            await let_processes_run(3)
            assert agent.num_statuses == number, "none before the second has passed"
            clock.jump(WATCH_EVERY_S)
        await client.stream.aclose()
        await let_processes_run(3)
        num_statuses = agent.num_statuses
        clock.jump(10 * WATCH_EVERY_S)
        await let_processes_run(3)
        assert agent.num_statuses == num_statuses, "nobody watches any more"
        await (await connect()).echo()

    serve(socket_file, body, agent)


@pytest.mark.parametrize("verb", ["watch", "status"])
def test_a_client_that_never_reads_is_cut_off(socket_file: Path, verb: str) -> None:
    agent = Agent()
    agent.size = 400_000

    async def body(connect: Connect, clock: MockClock) -> None:
        deaf = await connect()
        await deaf.stream.send_all(encode_line(ControlRequest(verb=verb)) * 20)
        await let_processes_run(10)
        stuck_at = agent.num_statuses
        other = await connect()
        await other.echo(waits="for nobody")
        clock.jump(SEND_DEADLINE_S / 2)
        await let_processes_run(5)
        assert agent.num_statuses == stuck_at
        clock.jump(SEND_DEADLINE_S)
        await let_processes_run(5)
        while await deaf.line() is not None:
            pass
        await other.echo(still="here")

    serve(socket_file, body, agent)


def test_a_client_that_goes_before_its_answer_hurts_nobody(socket_file: Path) -> None:
    agent = Agent()
    agent.size = 300_000

    async def body(connect: Connect, clock: MockClock) -> None:
        for verb in ("status", "watch", "echo"):
            client = await connect()
            await client.stream.send_all(encode_line(ControlRequest(verb=verb)) * 5)
            await trio.aclose_forcefully(client.stream)
        await let_processes_run(5)
        await (await connect()).echo()

    serve(socket_file, body, agent)
