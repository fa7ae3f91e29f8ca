"""The agent's twin at the control socket: scripted statuses, and commands that take effect.

Two hosts: `FakeAgent` in the caller's event loop, and `python -m tests.fakes.fake_agent` as a
process that takes the agent's flags and listens where `ALLMENDE_HOME` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from volunteer.answers import ContributionPoint, PeerStatus, Release, RoundPoint, Stats, Status
from volunteer.locations import Locations
from volunteer.messages import (
    ControlFault,
    ControlReply,
    ControlRequest,
    control_request_decoder,
    encode_line,
)

RUN_ID = "5f" * 32
STATE_HASH = "a1" * 32


def make_status(**changes: Any) -> Status:
    """A healthy, contributing volunteer in the middle of round 12."""
    status = Status(
        state="contributing",
        reason="Nobody uses this machine.",
        resumes_when="",
        run_id=RUN_ID,
        run_name="commons",
        round_index=12,
        inner_step=3100,
        state_hash=STATE_HASH,
        tip="c12",
        held_out_loss=1.4023,
        train_loss=1.3871,
        bytes_per_token=1.0,
        tokens_per_s=12_340.0,
        num_peers=3,
        peer_id="12D3KooWQYzAbCdEfGhJkLmNpQrStUvWxYz1234567890abcdefg",
        listen_addrs=("/ip4/192.168.1.7/tcp/4001",),
        agent_pid=4242,
        trainer_pid=4243,
        aggregator_pid=4244,
        device="cuda:0",
        last_confirmed_s=372.0,
        round_elapsed_s=250.0,
        round_s=600.0,
        final_round_index=10,
        swarm_tokens_per_s=45_120.0,
        tokens_done=12_431_360,
        tokens_confirmed=11_904_000,
        tokens_since_contribution=527_360,
    )
    return msgspec.structs.replace(status, **changes)


def make_stats(**changes: Any) -> Stats:
    stats = Stats(
        tokens_done=12_431_360,
        tokens_confirmed=11_904_000,
        tokens_in_flight=400_000,
        tokens_pending=127_360,
        inner_steps=3100,
        rounds_confirmed=10,
        rounds_refused=1,
        contributed_s=7384.0,
        energy_kwh=0.42,
        bytes_by_purpose={
            "contribution": {"sent": 14_200_000, "received": 39_800_000},
            "gossip": {"sent": 81_000, "received": 243_000},
        },
        done_as_of_utc="2026-11-30T14:03:22Z",
        confirmed_as_of_utc="2026-11-30T13:57:10Z",
    )
    return msgspec.structs.replace(stats, **changes)


def make_peers(num_peers: int = 3) -> list[PeerStatus]:
    return [
        PeerStatus(
            peer_id=f"12D3KooWPeerNumber{index:04d}abcdefghijk{index:08d}",
            addr=f"/ip4/203.0.113.{index + 1}/tcp/4001",
            direction="out" if index % 2 else "in",
            rtt_ms=None if index == 2 else 18.0 + 40 * index,
            connected_s=3600.0,
            round_index=12 - index % 2,
            tokens_per_s=None if index == 2 else 21_000.0 / (index + 1),
            state_hash=STATE_HASH if index != 1 else "b2" * 32,
            last_heard_s=2.0 + index,
        )
        for index in range(num_peers)
    ]


def make_history(num_rounds: int = 13) -> list[RoundPoint]:
    return [
        RoundPoint(
            round_index=index,
            commit_id=f"c{index}",
            state_hash=STATE_HASH,
            # One round without a measurement.
            held_out_loss=None if index == 5 else 1.2 + 4.3 / (1.0 + index),
            num_contributions=min(index, 4),
            applied_utc=f"2026-11-30T12:{index % 60:02d}:00Z",
            own_listed=index % 3 != 0,
        )
        for index in range(num_rounds)
    ]


def make_contributions() -> list[ContributionPoint]:
    """Return one contribution with each end that there is, the oldest first."""
    ends = [
        ("confirmed", "confirmed", "", (), 1),
        ("pending", "confirmed", "", (f"{2:064x}",), None),
        ("confirmed", "confirmed", "", (), 3),
        ("refused", "refused", "it points against the others", (), 4),
        ("dropped", "dropped", "its blob is no longer on this disk", (), None),
        ("pending", "in_flight", "", (f"{6:064x}",), None),
        ("in_flight", "in_flight", "", (), None),
    ]
    return [
        ContributionPoint(
            contribution_id=f"{index:064x}",
            round_index=index,
            tokens=100_000 + 50_000 * (index in (2, 6)),
            new_tokens=100_000,
            state=state,
            reason=reason,
            outcome=outcome,
            carried_by=carried_by,
            listed_in_round=listed,
            commit_id="" if listed is None else f"{100 + index:064x}",
            made_utc="2026-11-30T12:00:00Z",
            state_utc="2026-11-30T12:10:00Z",
        )
        for index, (state, outcome, reason, carried_by, listed) in enumerate(ends)
    ]


class FakeAgent:
    """Speaks the control protocol as the agent does.

    Attributes:
        status, stats, peers, history, contributions: what it answers; change them at will.
        requests: every request that came.
        faults: verb -> fault to refuse it with.
        raw_replies: verb -> bytes to send instead of a reply.
        silent_verbs: verbs that get no answer.
        version: control version of the replies.
    """

    def __init__(self, socket_file: Path) -> None:
        self.socket_file = socket_file
        self.status = make_status()
        self.stats = make_stats()
        self.peers = make_peers()
        self.history = make_history()
        self.contributions = make_contributions()
        self.requests: list[ControlRequest] = []
        self.faults: dict[str, ControlFault] = {}
        self.raw_replies: dict[str, bytes] = {}
        self.silent_verbs: set[str] = set()
        self.version = 1
        self.stopped = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._watchers: set[asyncio.StreamWriter] = set()
        self._handlers: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> FakeAgent:
        self.socket_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, str(self.socket_file))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Go away as a process does: every connection closes, the socket file vanishes."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        for writer in tuple(self._writers):
            writer.close()
        await asyncio.gather(*self._handlers, return_exceptions=True)
        await server.wait_closed()
        self.socket_file.unlink(missing_ok=True)
        self.stopped.set()

    async def push(self, **changes: Any) -> None:
        """Change the status and tell every watcher, as the agent does each second."""
        self.status = msgspec.structs.replace(self.status, **changes)
        for writer in tuple(self._watchers):
            writer.write(encode_line(ControlReply(version=self.version, result=self.status)))
            await writer.drain()

    async def push_raw(self, line: bytes) -> None:
        """Send `line` to every watcher."""
        for writer in tuple(self._watchers):
            writer.write(line)
            await writer.drain()

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        handler = asyncio.current_task()
        assert handler is not None
        self._handlers.add(handler)
        try:
            while line := await reader.readline():
                await self._answer(control_request_decoder.decode(line), writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._handlers.discard(handler)
            self._writers.discard(writer)
            self._watchers.discard(writer)
            writer.close()

    async def _answer(self, request: ControlRequest, writer: asyncio.StreamWriter) -> None:
        self.requests.append(request)
        verb = request.verb
        if verb in self.silent_verbs:
            return
        if verb in self.raw_replies:
            writer.write(self.raw_replies[verb])
        elif verb in self.faults:
            writer.write(encode_line(ControlReply(version=self.version, fault=self.faults[verb])))
        else:
            result = self._act(verb, request.args)
            writer.write(encode_line(ControlReply(version=self.version, result=result)))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        if verb == "watch":
            self._watchers.add(writer)
        if verb == "stop" and verb not in self.faults and not request.args.get("finish"):
            asyncio.get_running_loop().call_soon(self._stop_soon)

    def _stop_soon(self) -> None:
        self._closing = asyncio.ensure_future(self.close())

    def _act(self, verb: str, args: dict[str, Any]) -> object:
        if args.get("finish"):
            changes = {"finishes_round": self.status.round_index, "stops_then": verb == "stop"}
            self.status = msgspec.structs.replace(self.status, **changes)
            return {"stopping": False} if verb == "stop" else self.status
        if verb == "pause":
            until = "you say `allmende resume`"
            if "for_s" in args:
                until = f"the pause ends, or {until} (2 h 00 min left)"
            self.status = msgspec.structs.replace(
                self.status,
                state="paused",
                reason="You paused it.",
                resumes_when=until,
                trainer_pid=None,
                tokens_per_s=0.0,
                release=Release(after_s=1.2, num_processes=2, gpu_freed_bytes=7_600_000_000),
            )
        elif verb == "resume":
            self.status = make_status()
        elif verb == "history":
            return self.history[-args.get("limit", 100) :]
        elif verb == "contributions":
            return self.contributions[-args.get("limit", 200) :]
        elif verb in ("stats", "peers"):
            return getattr(self, verb)
        return self.status


@contextlib.contextmanager
def run_in_thread(socket_file: Path, script: Callable[[FakeAgent], None]) -> Iterator[FakeAgent]:
    """Run a FakeAgent in a thread, for tests that block; `script` prepares it."""
    is_ready, loop = threading.Event(), asyncio.new_event_loop()
    agents: list[FakeAgent] = []

    async def serve() -> None:
        async with FakeAgent(socket_file) as agent:
            script(agent)
            agents.append(agent)
            is_ready.set()
            await agent.stopped.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert is_ready.wait(10.0)
        yield agents[0]
    finally:
        loop.call_soon_threadsafe(agents[0].stopped.set)
        thread.join()
        loop.close()


async def _main() -> None:
    """Run as a process: a stand-in for `python -m volunteer.agent`."""
    if "--device" in sys.argv and sys.argv[sys.argv.index("--device") + 1] == "xpu:99":
        sys.stderr.write("error: no device of that name\n")
        sys.exit(1)
    home = Locations.from_environment(os.environ)
    async with FakeAgent(home.control_socket) as agent:
        agent.status = make_status(agent_pid=os.getpid(), round_elapsed_s=0.0)
        while not agent.stopped.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await agent.stopped.wait()
            if not agent.stopped.is_set():
                elapsed_s = agent.status.round_elapsed_s + 1.0
                await agent.push(round_elapsed_s=elapsed_s % agent.status.round_s)


if __name__ == "__main__":
    asyncio.run(_main())
