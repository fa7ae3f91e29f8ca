"""Agents, trainers and aggregators die at random moments: the others never notice, no work is lost.

`full` runs it with more deaths; the seed is fixed, so the victims and moments are the same each
time (the machine's own timing is not).
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
import pytest

from tests.system.agents import is_alive, wait_until
from tests.system.swarms import (
    ROUND_S,
    SLACK_S,
    LocalSwarm,
    NodeAgent,
    local_swarm,
    report,
    unbalanced,
    wait_contributing,
    wait_one_tip,
)
from volunteer.answers import Status

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.full]
SEED = 20261130
MAX_LOST_S = 60.0
"""`checkpoint_every_s` by default."""
NO_ORPHAN_S = 10.0
BACK_S = 60.0
"""To start Python and load PyTorch while three others train on two shared cores."""
PARTS = ("trainer", "agent", "aggregator")


class Death(NamedTuple):
    """What one kill cost."""

    part: str
    committed_after_s: float
    """Until all others had applied one more commit."""
    most_s: float
    """What the rule allows for it, on this machine."""
    lost_s: float
    """Training that was gone afterwards."""
    back_after_s: float
    """Until the killed one contributed again."""


@pytest.mark.timeout(280)
def test_ten_sudden_deaths(tmp_path: Path) -> None:
    _die_and_come_back(tmp_path, 10)


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_forty_sudden_deaths(tmp_path: Path) -> None:
    _die_and_come_back(tmp_path, 40)


def _die_and_come_back(folder: Path, num_deaths: int) -> None:
    chance = random.Random(SEED)
    with local_swarm(folder) as swarm:
        lan = swarm.network.add_bridge()
        agents = [swarm.add(lan) for _ in range(4)]
        swarm.start(*agents)
        for agent in agents:
            agent.wait_for("two rounds", lambda s: s.round_index >= 2 and s.num_peers == 3, 120)
        deaths = []
        for number in range(num_deaths):
            # Every part dies in turn; who, and when in the round, is drawn.
            part = PARTS[number % len(PARTS)]
            deaths.append(_one_death(swarm, chance.choice(agents), part, chance.random()))
            report(str(deaths[-1]))
        head_s = wait_one_tip(agents, 8 * ROUND_S)
        for agent in agents:
            assert unbalanced(agent) == ""
            assert agent.status().alarm == ""
        wait_until("no stray process", lambda: not swarm.strays(), NO_ORPHAN_S)
        for part in PARTS:
            some = [death for death in deaths if death.part == part]
            report(
                f"{len(some)} deaths of the {part}: the others commit after "
                f"{median(d.committed_after_s for d in some):.1f} s (at most "
                f"{max(d.committed_after_s for d in some):.1f} s), training lost "
                f"{max(d.lost_s for d in some):.1f} s at most, contributing again after "
                f"{max(d.back_after_s for d in some):.1f} s at most"
            )
        report(f"one head {head_s:.1f} s after the last one was back; the books balance")


def _one_death(swarm: LocalSwarm, victim: NodeAgent, part: str, moment: float) -> Death:
    others = [agent for agent in swarm.agents if agent is not victim]
    wait_contributing(swarm.agents, BACK_S)
    tip = victim.status().tip
    before = victim.wait_for(
        f"{moment:.0%} of the round",
        lambda s: s.tip != tip or s.round_elapsed_s >= moment * ROUND_S,
        4 * ROUND_S,
    )
    assert before.tokens_per_s > 0, "its loss is counted by its speed"
    other_statuses = {agent.home: agent.status() for agent in others}
    children = [process.pid for process in victim.process().children(recursive=True)]
    killed_at_s = time.monotonic()
    _kill(victim, before, part)

    most_s = max(ROUND_S - s.round_elapsed_s for s in other_statuses.values()) + max(
        s.grace_s + s.failover_s for s in other_statuses.values()
    )
    for agent in others:
        known = other_statuses[agent.home].round_index
        left_s = most_s + SLACK_S - (time.monotonic() - killed_at_s)
        agent.wait_for("a commit", lambda s, known=known: s.round_index > known, left_s)  # type: ignore[misc]
    committed_after_s = time.monotonic() - killed_at_s
    if part == "agent":
        left_s = NO_ORPHAN_S - committed_after_s
        wait_until("no orphan", lambda: not any(map(is_alive, children)), max(0.1, left_s))
        victim.spawn()
    lowest = _wait_back(victim, before, BACK_S)
    lost_steps = max(0, before.inner_step - lowest)
    lost_s = lost_steps / (before.tokens_per_s / _tokens_per_step(swarm))
    assert lost_s <= MAX_LOST_S, f"{lost_steps} steps of {part} {victim.home.name}"
    assert victim.status().peer_id == before.peer_id
    return Death(part, committed_after_s, most_s, lost_s, time.monotonic() - killed_at_s)


def _kill(victim: NodeAgent, before: Status, part: str) -> None:
    if part == "agent":
        victim.kill()
        return
    pid = before.trainer_pid if part == "trainer" else before.aggregator_pid
    assert pid is not None
    psutil.Process(pid).send_signal(signal.SIGKILL)
    wait_until(f"the {part} is gone", lambda: not is_alive(pid), 10)


def _wait_back(victim: NodeAgent, before: Status, deadline_s: float) -> int:
    """Wait until all its parts run and steps are taken; return the lowest step it told meanwhile.

    That is the step of the snapshot that it came back from: it is told when the trainer is up.
    """
    lowest = before.inner_step
    killed = {before.agent_pid, before.trainer_pid, before.aggregator_pid}

    def look() -> bool:
        nonlocal lowest
        status = victim.status_or_none()
        if status is None:
            return False
        if status.trainer_pid is not None and status.inner_step > 0:
            lowest = min(lowest, status.inner_step)
        parts = (status.agent_pid, status.trainer_pid, status.aggregator_pid)
        is_whole = all(parts) and len(killed - set(parts)) > 0
        return is_whole and status.state == "contributing" and status.inner_step > lowest

    wait_until(f"{victim.home.name} is back", look, deadline_s)
    return lowest


def _tokens_per_step(swarm: LocalSwarm) -> int:
    return swarm.spec.inner.batch_sequences * swarm.spec.model.context_tokens
