"""Three agents started by hand reach one head, and go on when the proposer is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.agents import RealAgent, ending, is_alive, wait_until
from volunteer.rounds.chain import rank_order

pytestmark = [pytest.mark.system, pytest.mark.slow]
ROUND_S = 12
FLAGS = (
    "--no-mdns",
    "--ignore-idle",
    "--device",
    "cpu",
    "--threads",
    "1",
    "--round-s",
    str(ROUND_S),
)
LISTEN = ("--listen", "/ip4/127.0.0.1/tcp/0")
SLACK_S = 5.0
"""Processes on two shared cores: to compute, sign, send and apply a commit."""


def one_head(agents: list[RealAgent]) -> str | None:
    """Return the tip that all stand on, if it is one."""
    tips = {agent.status().tip for agent in agents}
    return tips.pop() if len(tips) == 1 else None


def next_proposer(agents: list[RealAgent]) -> RealAgent:
    """Return whose turn it is on the tip that all stand on, from the signed records."""
    known = agents[0].chain()
    tip = known.facts[agents[0].status().tip]
    first = rank_order(known.rules, tip)[0]
    return next(agent for agent in agents if agent.status().peer_id == first)


@pytest.mark.timeout(400)
def test_the_swarm_outlives_its_proposer_and_takes_it_back(tmp_path: Path) -> None:
    first = RealAgent(tmp_path / "a", (*FLAGS, *LISTEN))
    agents = [first]
    with ending(agents):
        addr = first.start().listen_addrs[0]
        for name in "bc":
            agents.append(RealAgent(tmp_path / name, (*FLAGS, *LISTEN, "--bootstrap", addr)))
            agents[-1].start()
        for agent in agents:
            agent.wait_for("two peers", lambda s: s.num_peers == 2, 60)
        for agent in agents:
            agent.wait_for("4 rounds", lambda s: s.round_index >= 4, 150)
        wait_until("one head", lambda: one_head(agents), 3 * ROUND_S)
        for agent in agents:
            assert any(p.own_listed for p in agent.history()), "each one contributes"

        victim = next_proposer(agents)
        tip = victim.status().tip
        others = [agent for agent in agents if agent is not victim]
        closing = victim.wait_for(
            "the round closes",
            lambda s: s.tip != tip or s.round_elapsed_s >= ROUND_S - 0.3,
            3 * ROUND_S,
        )
        children = victim.kill()
        before = {agent.home: agent.status() for agent in others}
        for agent in others:
            status = before[agent.home]
            most_s = ROUND_S - closing.round_elapsed_s + status.grace_s + status.failover_s
            agent.wait_for(
                "a commit without the proposer",
                lambda s, status=status: s.round_index > status.round_index,  # type: ignore[misc]
                most_s + SLACK_S,
            )
        wait_until("no orphan", lambda: not any(is_alive(pid) for pid in children), 10)

        steps_before = closing.inner_step
        restarted_at = victim.start()
        assert restarted_at.peer_id == closing.peer_id
        victim.wait_for("it trains again", lambda s: s.state == "contributing", 90)
        assert victim.status().inner_step > 0
        assert victim.status().inner_step >= steps_before - 60 * 20, "resumed, not from nothing"
        back = max(agent.status().round_index for agent in others)
        wait_until(
            "it contributes again",
            lambda: any(p.own_listed and p.round_index > back for p in victim.history()),
            8 * ROUND_S,
        )
        wait_until("one head at the end", lambda: one_head(agents), 4 * ROUND_S)
        states = {agent.status().state_hash for agent in agents if one_head(agents)}
        assert len(states) <= 1
