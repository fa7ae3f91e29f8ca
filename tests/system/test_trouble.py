"""One swarm of four through everything but death: newcomers, freezing, lost cables, hostile bytes.

The tests share the swarm, in any order: each begins when all four contribute on one head.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

from p2p.admission import NOT_LET_IN
from tests.system import hostile
from tests.system.agents import wait_until
from tests.system.network import Bridge, Node
from tests.system.swarms import (
    CHUNKED_MODEL,
    ROUND_S,
    SLACK_S,
    LocalSwarm,
    NodeAgent,
    local_swarm,
    longest_gap_s,
    one_tip,
    report,
    unbalanced,
    utc_now,
    wait_contributing,
)

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.full]
SETTLED_S = 90.0
AWAY_S = 20.0
LONG_AWAY_S = 120.0
MAX_ROUNDS_TO_ONE_HEAD = 8
MAX_LOG_LINES = 12
"""Of one kind of attack with 40 to 300 connections: what an owner can still read."""
MAX_GROWTH = 1.2
CALM_S = 40.0
"""An attacker's connections are given up after a handshake's time, and the memory is free again."""


class Scene(NamedTuple):
    """The swarm that the tests share."""

    swarm: LocalSwarm
    lan: Bridge

    @property
    def agents(self) -> list[NodeAgent]:
        return self.swarm.agents[:4]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with local_swarm(tmp_path_factory.mktemp("four"), model=CHUNKED_MODEL) as swarm:
        lan = swarm.network.add_bridge()
        agents = [swarm.add(lan) for _ in range(4)]
        swarm.start(*agents)
        yield Scene(swarm, lan)


@pytest.fixture
def scene(shared: Scene) -> Scene:
    """Wait until nothing is left of what an earlier test did."""
    wait_contributing(shared.agents, SETTLED_S)
    wait_until(
        "all four meet and agree",
        lambda: all(a.status().num_peers == 3 for a in shared.agents) and one_tip(shared.agents),
        SETTLED_S,
    )
    return shared


def wait_one_head(agents: Sequence[NodeAgent]) -> str:
    """Wait for one head; say how long that took."""
    begun, begun_s = max(agent.status().round_index for agent in agents), time.monotonic()
    deadline_s = (MAX_ROUNDS_TO_ONE_HEAD + 1) * (ROUND_S + SLACK_S)
    wait_until("one head", lambda: one_tip(agents), deadline_s)
    num_rounds = max(agent.status().round_index for agent in agents) - begun
    assert num_rounds <= MAX_ROUNDS_TO_ONE_HEAD
    return f"one head {time.monotonic() - begun_s:.1f} s ({num_rounds} rounds) later"


@contextlib.contextmanager
def going_on(agents: Sequence[NodeAgent], what: str) -> Iterator[None]:
    """Check that `agents` never stopped committing while the block ran."""
    since_utc = utc_now()
    first = max(agent.status().round_index for agent in agents)
    yield
    statuses = [agent.status() for agent in agents]
    gap_s = max(longest_gap_s(agent, since_utc) for agent in agents)
    wait_s = max(s.grace_s + s.failover_s for s in statuses)
    most_s = ROUND_S + wait_s + SLACK_S + 1.0  # instants are told to the second
    num_rounds = min(s.round_index for s in statuses) - first
    report(f"{what}: {num_rounds} rounds, longest gap {gap_s:.0f} s of {most_s:.0f} s allowed")
    assert gap_s <= most_s
    for agent in agents:
        assert agent.status().alarm == ""


def pass_time(agents: Sequence[NodeAgent], duration_s: float) -> None:
    """Let a time pass, while the status of `agents` is asked for."""
    end_s = time.monotonic() + duration_s

    def is_over() -> bool:
        return [a.status() for a in agents] != [] and time.monotonic() > end_s

    wait_until("the time is over", is_over, duration_s + 10)


@pytest.mark.timeout(240)
def test_a_newcomer_catches_up_from_several_and_contributes(scene: Scene) -> None:
    for agent in scene.agents:
        agent.wait_for("5 rounds", lambda s: s.round_index >= 5, 12 * ROUND_S)
        scene.swarm.network.shape(agent.node, "40mbit")
    newcomer = scene.swarm.add(scene.lan)
    begun_s = time.monotonic()
    newcomer.start()
    wait_until(
        "it has caught up",
        lambda: newcomer.status().round_index >= max(a.status().round_index for a in scene.agents),
        60,
    )
    caught_up_s = time.monotonic() - begun_s
    received = scene.swarm.network.received_bytes(newcomer.node)
    status = newcomer.wait_for("it contributes", lambda s: s.state == "contributing", 60)
    listed = wait_until(
        "a contribution of its own",
        lambda: [p.round_index for p in newcomer.history() if p.own_listed],
        4 * ROUND_S,
    )
    assert min(listed) <= status.round_index + 2
    given = {agent.home.name: received.get(agent.node.address, 0) for agent in scene.agents}
    report(
        f"newcomer: round {status.round_index} after {caught_up_s:.1f} s from its start, bytes "
        f"from each donor {given}, first listed in round {min(listed)}"
    )
    donors = [name for name, num_bytes in given.items() if num_bytes > 1 << 20]
    assert len(donors) >= 2, "a chunk of the state from at least two"
    assert unbalanced(newcomer) == ""
    newcomer.process().send_signal(signal.SIGTERM)
    assert newcomer.processes[-1].wait(20) == 0
    wait_until("nothing of it is left", lambda: not scene.swarm.strays(), 10)
    wait_until(
        "the others count on it no more",
        lambda: all(a.history()[-1].num_contributions == 4 for a in scene.agents),
        4 * ROUND_S,
    )


@pytest.mark.parametrize(
    "duration_s",
    [
        pytest.param(AWAY_S, marks=pytest.mark.timeout(240)),
        pytest.param(LONG_AWAY_S, marks=[pytest.mark.full, pytest.mark.timeout(500)]),
    ],
)
def test_a_frozen_agent_wakes_up_and_goes_on(scene: Scene, duration_s: float) -> None:
    frozen, *others = scene.agents
    family = frozen.family()
    with going_on(others, f"one of four frozen for {duration_s:g} s"):
        for process in family:
            process.suspend()
        try:
            pass_time(others, duration_s)
        finally:
            for process in reversed(family):
                process.resume()
    report(f"awake again: {wait_one_head(scene.agents)}")
    assert frozen.process() == family[0], "the same process"
    assert [unbalanced(agent) for agent in scene.agents] == [""] * 4


@pytest.mark.timeout(240)
def test_a_cable_is_pulled_and_plugged_in_again(scene: Scene) -> None:
    lonely, *others = scene.agents[1:] + scene.agents[:1]
    with going_on(others, f"one of four cut off for {AWAY_S:g} s"):
        scene.swarm.network.cut(lonely.node)
        try:
            pass_time(others, AWAY_S)
            alone = lonely.status()
        finally:
            scene.swarm.network.plug(lonely.node)
    begun_s = time.monotonic()
    for agent in scene.agents:
        agent.wait_for("three peers", lambda s: s.num_peers == 3, 60)
    met_s = time.monotonic() - begun_s
    report(
        f"cut off: {alone.state} with {alone.num_peers} peers in round {alone.round_index}; all "
        f"connected {met_s:.1f} s after plugging in, {wait_one_head(scene.agents)}"
    )
    assert [unbalanced(agent) for agent in scene.agents] == [""] * 4


@pytest.mark.timeout(240)
def test_a_machine_gets_another_address(scene: Scene) -> None:
    moved, *others = scene.agents[2:] + scene.agents[:2]
    with going_on(others, "one of four gets another address"):
        address = scene.swarm.network.readdress(moved.node)
        begun_s = time.monotonic()
        for agent in others:
            wait_until(
                "it is met at its new address",
                lambda agent=agent: any(address in peer.addr for peer in agent.peers()),  # type: ignore[misc]
                90,
            )
        met_s = time.monotonic() - begun_s
        head = wait_one_head(scene.agents)
    report(f"new address: met there after {met_s:.1f} s, {head}")
    assert any(address in addr for addr in moved.status().listen_addrs)


@contextlib.contextmanager
def attacked(node: Node, kind: str, target: NodeAgent, sources: Sequence[str]) -> Iterator[None]:
    """Have `hostile` at work on another machine, holding what it holds while the block runs."""
    port = next(a for a in target.status().listen_addrs if "10.77." in a).split("/")[4]
    argv = node.argv(sys.executable, hostile.__file__, kind, target.node.address, port, *sources)
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield
        process.stdin.close()
        report(f"hostile {kind}: {process.stdout.read().strip()} connections")


def alarming_lines(log: str) -> list[str]:
    """Return the log's lines but for those that every round writes."""
    return [line for line in log.splitlines() if " INFO volunteer." not in line]


@pytest.mark.timeout(240)
def test_hostile_bytes_change_nothing(scene: Scene) -> None:
    victim = scene.agents[3]
    attacker = scene.swarm.network.add_node(scene.lan)
    # More addresses than one, since the sockets of one address are few.
    sources = [attacker.address]
    sources += [scene.swarm.network.add_address(attacker) for _ in range(12)]
    process = victim.process()
    fds, rss = process.num_fds(), process.memory_info().rss
    log_size = len(victim.logged())
    with going_on(scene.agents, "hostile bytes"):
        for kind in hostile.KINDS:
            before = len(alarming_lines(victim.logged()))
            with attacked(attacker, kind, victim, sources):
                most_fds = _most_fds(victim) if kind == "silent" else process.num_fds()
            num_lines = len(alarming_lines(victim.logged())) - before
            report(f"hostile {kind}: fds {fds} -> {most_fds}, {num_lines} lines logged")
            assert num_lines <= MAX_LOG_LINES, victim.tail()
        _say_nonsense(victim)

        def is_calm() -> bool:
            now = process.memory_info().rss
            return process.num_fds() <= MAX_GROWTH * fds and now <= MAX_GROWTH * rss

        wait_until("file descriptors and memory are back", is_calm, CALM_S)
    lines = alarming_lines(victim.logged()[log_size:])
    report(
        f"hostile bytes: fds {fds} -> {process.num_fds()}, RSS {rss / 1e6:.0f} MB -> "
        f"{process.memory_info().rss / 1e6:.0f} MB, {len(lines)} lines logged in all"
    )
    told = victim.logged().count(NOT_LET_IN)
    assert 1 <= told <= 3, "once, and again after ten minutes, with how often meanwhile"
    # Some are only given up, and may only be told of, when their time is over.
    assert len(lines) <= MAX_LOG_LINES * len(hostile.KINDS), "\n".join(lines)
    assert victim.status().num_peers == 3


def _most_fds(victim: NodeAgent) -> int:
    """Wait for two commits; return the most file descriptors seen meanwhile."""
    first, most = victim.status().round_index, 0

    def look() -> bool:
        nonlocal most
        most = max(most, victim.process().num_fds())
        return victim.status().round_index >= first + 2

    wait_until("two commits meanwhile", look, 4 * ROUND_S + SLACK_S)
    return most


def _say_nonsense(victim: NodeAgent) -> None:
    """Write to the control socket what no client writes; it goes on answering."""
    log_size = len(victim.logged())
    nonsense = [
        bytes(range(256)) * 64 + b"\n",
        b"[" * 100_000 + b"\n",
        b'{"version": 1, "verb": "status", "args": []}\n',
        b'{"version": 99, "verb": "status"}\n',
        b"\xff" * (2 << 20),
        b'{"version": 1, "verb": "sta',
    ]
    for data in nonsense:
        with victim.raw_control() as connection, contextlib.suppress(OSError):
            connection.sendall(data)
            connection.shutdown(1)
            while connection.recv(65536):
                pass
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            with contextlib.suppress(BlockingIOError):  # its queue is full: refused
                stack.enter_context(victim.raw_control())
    wait_until("it answers again", victim.status_or_none, 20)
    lines = alarming_lines(victim.logged()[log_size:])
    report(f"hostile control socket: {len(lines)} lines logged")
    for what in ("too long", "not understood", "of another control version"):
        assert victim.logged().count(f"the request is {what}") == 1, victim.tail()
    assert len(lines) <= MAX_LOG_LINES, "\n".join(lines)
