"""One of four is lost while the others fetch its contribution: they commit all the same, alike.

The victim's link is so slow that its blob takes seconds, so it is lost with its announcement known
to the others and its blob partly fetched. Whether that was so is looked at right after each loss;
a loss that came too early or too late does not count, and is tried again.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
import pytest

from tests.system.agents import wait_until
from tests.system.swarms import (
    CHUNKED_MODEL,
    ROUND_S,
    SLACK_S,
    LocalSwarm,
    NodeAgent,
    local_swarm,
    one_tip,
    report,
    unbalanced,
    wait_contributing,
)
from volunteer.answers import RoundPoint, Status
from volunteer.rounds.chain import rank_order
from volunteer.rounds.knowledge import Knowledge
from volunteer.rounds.records import DENSE_MODULE, Contribution

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.full]
LINK = "3mbit"
"""The blob of CHUNKED_MODEL, 0.47 MB, to three others: 3.7 s."""
MIN_GRACE_S = 3.0
"""So that nobody gives the victim up before it is lost."""
YOUNG_FRACTION = 0.6
"""Of a round: then nobody has closed it, and there is time to slow a link down."""
LEAST_PART_BYTES = 48 * 1024
SETTLED_S = 120.0
MAX_TRIES = 4
REPETITIONS = 10


class Round(NamedTuple):
    """A round that one of four will not end."""

    victim: NodeAgent
    author: str
    """The victim's peer id."""
    others: list[NodeAgent]
    base: str
    """The tip that all stand on."""
    rank: int
    """The victim's, among the proposers of the next commit."""


class Loss(NamedTuple):
    """What one loss cost."""

    rank: int
    part: float
    """How much of its blob one of the others had got from it, at most, 0..1."""
    committed_after_s: float
    """Until all others had applied the commit."""
    most_s: float
    """What is allowed: grace + one failover interval + 5 s."""
    num_listed: int


@pytest.mark.timeout(150)
def test_the_others_commit_when_one_is_lost_mid_exchange(tmp_path: Path) -> None:
    with four(tmp_path) as swarm:
        report(str(lose_one(swarm, signal.SIGSTOP, 0)))
        report(str(lose_one(swarm, signal.SIGKILL, 1, is_for_good=True)))


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_ten_losses_mid_exchange(tmp_path: Path, how: signal.Signals) -> None:
    with four(tmp_path) as swarm:
        losses = []
        for number in range(REPETITIONS):
            losses.append(lose_one(swarm, how, number))
            report(str(losses[-1]))
            wait_settled(swarm.agents)
        for agent in swarm.agents:
            wait_until("the books balance", lambda agent=agent: not unbalanced(agent), 20)  # type: ignore[misc]
    assert {loss.rank for loss in losses} >= {0, 1}, "proposers and others"
    after_s = sorted(loss.committed_after_s for loss in losses)
    report(
        f"{how.name}: {len(losses)} losses mid-exchange, ranks {[loss.rank for loss in losses]}, "
        f"parts {[round(loss.part, 2) for loss in losses]}: the others have all committed after "
        f"{median(after_s):.1f} s ({after_s[0]:.1f} to {after_s[-1]:.1f} s), listing "
        f"{[loss.num_listed for loss in losses]}; hashes equal, books balanced"
    )


@contextlib.contextmanager
def four(folder: Path) -> Iterator[LocalSwarm]:
    """Make a swarm whose chain has some commits: before that, nobody knows whom to expect."""
    with local_swarm(folder, model=CHUNKED_MODEL, min_grace_s=MIN_GRACE_S) as swarm:
        lan = swarm.network.add_bridge()
        for agent in [swarm.add(lan) for _ in range(4)]:
            swarm.network.keep_little_to_send(agent.node)
        swarm.start(*swarm.agents)
        for agent in swarm.agents:
            agent.wait_for("three rounds", lambda s: s.round_index >= 3, SETTLED_S)
        yield swarm


def wait_settled(agents: Sequence[NodeAgent]) -> None:
    """Wait until all contribute, know each other and stand on one tip."""
    wait_contributing(agents, SETTLED_S)
    wait_until(
        "all four meet and agree",
        lambda: all(a.status().num_peers == 3 for a in agents) and one_tip(agents),
        SETTLED_S,
    )


def lose_one(
    swarm: LocalSwarm, how: signal.Signals, number: int, *, is_for_good: bool = False
) -> Loss:
    """Lose one of four mid-exchange, check what the others make of it, and bring it back."""
    for _ in range(MAX_TRIES):
        wait_settled(swarm.agents)
        scene = begin_round(swarm, rank=number % 4)
        swarm.network.shape(scene.victim.node, LINK)
        loss = None
        try:
            loss = _lose(swarm, scene, how)
        finally:
            # A process that is frozen or dead does not mind its link.
            swarm.network.unshape(scene.victim.node)
            if loss is None or not is_for_good:
                _bring_back(scene.victim, how)
        if loss is not None:
            return loss
    raise AssertionError(f"{MAX_TRIES} losses, and none was mid-exchange")


def begin_round(swarm: LocalSwarm, rank: int) -> Round:
    """Wait for a round that has just begun; its victim is the one with that rank in it."""
    statuses: list[Status] = []

    def look() -> bool:
        statuses[:] = [agent.status() for agent in swarm.agents]
        is_young = all(s.round_elapsed_s < YOUNG_FRACTION * ROUND_S for s in statuses)
        return is_young and len({s.tip for s in statuses}) == 1

    wait_until("a round that has just begun", look, SETTLED_S)
    base = statuses[0].tip
    known = swarm.agents[0].chain()
    order = rank_order(known.rules, known.facts[base])
    assert len(order) == 4
    by_peer = {s.peer_id: a for s, a in zip(statuses, swarm.agents, strict=True)}
    victim = by_peer.pop(order[rank])
    return Round(victim, order[rank], list(by_peer.values()), base, rank)


def _lose(swarm: LocalSwarm, scene: Round, how: signal.Signals) -> Loss | None:
    """Lose the victim when the others have a part of its blob; None if it was not so after all."""
    others, network = scene.others, swarm.network
    before = {agent.home: _received(swarm, scene, agent) for agent in others}
    statuses = [agent.status() for agent in others]
    most_s = max(s.grace_s + s.failover_s for s in statuses) + SLACK_S

    def new_bytes() -> int:
        return max(_received(swarm, scene, agent) - before[agent.home] for agent in others)

    wait_until("its blob is on its way", lambda: new_bytes() >= LEAST_PART_BYTES, 4 * ROUND_S)
    _end_or_freeze(scene.victim, how, network.pids(scene.victim.node))
    lost_at_s = time.monotonic()
    num_bytes, tips = new_bytes(), {agent.status().tip for agent in others}
    chains = [agent.chain() for agent in others]
    announced = [_announcement(scene, chain) for chain in chains]
    if tips != {scene.base} or not all(announced):
        report(f"not mid-exchange: tips {tips}, announced {announced}")
        return None
    contribution = announced[0]
    assert contribution is not None
    holders = [a.home.name for a in others if _blob_file(a, contribution).exists()]
    if holders or num_bytes >= contribution.blob_bytes:
        report(f"not mid-exchange: {num_bytes} bytes, held by {holders}")
        return None
    height = statuses[0].round_index + 1
    commits = [_wait_commit(agent, height, lost_at_s + most_s) for agent in others]
    committed_after_s = time.monotonic() - lost_at_s
    assert committed_after_s <= most_s
    assert len({(c.commit_id, c.state_hash) for c in commits}) == 1, commits
    for agent in others:
        wait_until("the books balance", lambda agent=agent: not unbalanced(agent), 20)  # type: ignore[misc]
        assert agent.status().alarm == ""
    part = num_bytes / contribution.blob_bytes
    return Loss(scene.rank, part, committed_after_s, most_s, commits[0].num_contributions)


def _received(swarm: LocalSwarm, scene: Round, agent: NodeAgent) -> int:
    """Return the bytes that `agent` has received from the victim."""
    received = swarm.network.received_bytes(agent.node)
    address = scene.victim.node.address
    return sum(size for remote, size in received.items() if address in remote)


def _announcement(scene: Round, chain: Knowledge) -> Contribution | None:
    """Return the victim's contribution to this round, if that is known there."""
    made = [chain.contributions[i] for i in chain.based_on.get(scene.base, ())]
    return next((c for c in made if c.author == scene.author), None)


def _blob_file(agent: NodeAgent, contribution: Contribution) -> Path:
    return agent.locations.blobs_dir(contribution.run_id, DENSE_MODULE) / contribution.blob_id


def _end_or_freeze(victim: NodeAgent, how: signal.Signals, pids: Sequence[int]) -> None:
    """Send the signal to the agent first, then to what else runs on its machine."""
    agent_pid = victim.process().pid
    for pid in (agent_pid, *(pid for pid in pids if pid != agent_pid)):
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).send_signal(how)


def _wait_commit(agent: NodeAgent, height: int, deadline_at_s: float) -> RoundPoint:
    def look() -> RoundPoint | None:
        return next((p for p in agent.history() if p.round_index == height), None)

    left_s = max(0.1, deadline_at_s - time.monotonic())
    return wait_until(f"{agent.home.name} applies round {height}", look, left_s)


def _bring_back(victim: NodeAgent, how: signal.Signals) -> None:
    if how is signal.SIGSTOP:
        for process in reversed(victim.family()):
            process.resume()
    elif not victim.is_up():
        victim.spawn()
        victim.wait_up()
