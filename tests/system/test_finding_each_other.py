"""Six volunteers find each other: on one network by itself, across a router by one address."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from tests.system.agents import wait_until
from tests.system.swarms import (
    ROUND_S,
    SLACK_S,
    LocalSwarm,
    NodeAgent,
    joint_rounds,
    local_swarm,
    longest_gap_s,
    one_tip,
    report,
    utc_now,
    wait_one_tip,
)

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(300)]
NUM_AGENTS = 6
FOUND_S = 30.0
CONNECTED_S = 60.0
JOINT_S = 90.0
"""Six trainers and six aggregators load PyTorch on two shared cores before the first round."""


def wait_peers(agents: Sequence[NodeAgent], num_peers: int, deadline_s: float) -> float:
    """Wait until each has that many peers; return the seconds it took."""
    begun_s = time.monotonic()
    for agent in agents:
        left_s = deadline_s - (time.monotonic() - begun_s)
        agent.wait_for(f"{num_peers} peers", lambda s: s.num_peers == num_peers, left_s)
    return time.monotonic() - begun_s


def wait_joint_round(agents: Sequence[NodeAgent], after: int, deadline_s: float) -> int:
    """Wait for a commit after round `after` that lists a contribution of each."""

    def look() -> int | None:
        return next((r for r in joint_rounds(agents) if r > after), None)

    return wait_until(f"a commit of all {len(agents)}", look, deadline_s)


def test_six_on_one_network_meet_without_being_introduced(tmp_path: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        lan = swarm.network.add_bridge()
        agents = [swarm.add(lan) for _ in range(NUM_AGENTS)]
        swarm.start(*agents)
        found_s = wait_peers(agents, NUM_AGENTS - 1, FOUND_S)
        begun_s = time.monotonic()
        round_index = wait_joint_round(agents, 0, JOINT_S)
        joint_s = time.monotonic() - begun_s
        head_s = wait_one_tip(agents, 3 * ROUND_S)
        report(
            f"mdns: 6 agents, all connected {found_s:.1f} s after the last one was up, round "
            f"{round_index} lists all six after {joint_s:.1f} s, one head {head_s:.1f} s later"
        )


def test_one_address_joins_two_networks_and_is_not_needed_afterwards(tmp_path: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        near, far = swarm.network.add_bridge(), swarm.network.add_bridge()
        swarm.network.join(near, far)
        bootstrap = swarm.add(near)
        addr = bootstrap.start().listen_addrs[0]
        others = [swarm.add(bridge, "--bootstrap", addr) for bridge in (near, near, far, far, far)]
        swarm.start(*others)
        connected_s = wait_peers(swarm.agents, NUM_AGENTS - 1, CONNECTED_S)
        before = wait_joint_round(swarm.agents, 0, JOINT_S)

        killed_utc = utc_now()
        bootstrap.kill()
        after = wait_joint_round(others, before, 8 * ROUND_S)
        gap_s = max(longest_gap_s(agent, killed_utc) for agent in others)
        status = others[0].status()
        assert (
            gap_s <= ROUND_S + status.grace_s + status.failover_s + SLACK_S + 1.0
        )  # whole seconds
        report(
            f"router: 6 agents connected {connected_s:.1f} s after the last one was up; without "
            f"the bootstrap the next commit of all five is round {after} (was {before}), longest "
            f"gap between two commits {gap_s:.0f} s"
        )
        _one_comes_back_from_memory(swarm, others[-1], others[:-1])


def _one_comes_back_from_memory(
    swarm: LocalSwarm, agent: NodeAgent, others: Sequence[NodeAgent]
) -> None:
    """Restart `agent` where neither a bootstrap address nor mDNS can help it.

    The control, a newcomer without memory at its side, meets nobody there.
    """
    memory = agent.home / "peers.json"
    known = msgspec.json.decode(memory.read_bytes(), type=dict[str, list[str]])
    assert {other.status().peer_id for other in others} <= known.keys()
    agent.end()
    swarm.network.set_multicast(agent.node.bridge, is_carried=False)
    agent.flags = [flag for flag in agent.flags if flag != "--bootstrap" and "/p2p/" not in flag]
    control = swarm.add(agent.node.bridge)
    swarm.network.set_multicast(agent.node.bridge, is_carried=False)  # the new machine's as well
    swarm.start(agent, control)
    rejoined_s = wait_peers([agent], len(others), CONNECTED_S)
    directions = [peer.direction for peer in agent.peers()]
    back = max(other.status().round_index for other in others)
    wait_until(
        "it contributes again",
        lambda: any(p.own_listed and p.round_index > back for p in agent.history()),
        8 * ROUND_S,
    )
    wait_until("one head", lambda: one_tip([agent, *others]), 4 * ROUND_S)
    assert control.status().num_peers == 0, "nothing but its memory leads to the others"
    report(
        f"memory: {len(others)} peers {rejoined_s:.1f} s after the restart without --bootstrap "
        f"({directions.count('outbound')} of them dialled by it), listed again after round {back}"
    )
