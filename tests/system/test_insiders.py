"""Members that mean harm, with a key and a connection: thrown out, and nobody else notices."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from p2p.swarm_types import Ban
from tests.system import insider
from tests.system.agents import wait_until
from tests.system.network import Bridge
from tests.system.swarms import (
    ROUND_S,
    SLACK_S,
    LocalSwarm,
    NodeAgent,
    local_swarm,
    longest_gap_s,
    report,
    unbalanced,
    utc_now,
    wait_contributing,
    wait_one_tip,
)
from volunteer.agent.network_memory import bans_of, read_network_facts

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(400)]
UP_S = 90.0
BANNED_S = 30.0
HARM_S = insider.HARM_S + 30.0
CALM_S = 60.0
MAX_GROWTH = 1.2
MAX_LINES_A_KIND = 12
"""What an owner can still read, of thousands of wrong messages."""
KEPT_S = 15.0


@contextlib.contextmanager
def harming(kind: str, swarm: LocalSwarm, lan: Bridge, victim: NodeAgent) -> Iterator[str]:
    """Have an insider do its harm to the end; give its peer id."""
    node = swarm.network.add_node(lan)
    status = victim.status()
    addr = next(addr for addr in status.listen_addrs if victim.node.address in addr)
    root = Path(__file__).parents[2]
    argv = node.argv(sys.executable, "-m", "tests.system.insider", kind, addr, status.run_id)
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        peer_id = process.stdout.readline().strip()
        assert peer_id, f"the {kind} insider did not get in"
        assert process.stdout.readline() == "done\n"
        yield peer_id
        process.stdin.close()


def bans(agent: NodeAgent) -> dict[str, Ban]:
    """Return whom an agent refuses, from what it keeps over a restart."""
    return bans_of(read_network_facts(agent.locations.data_dir / "network.json"))


def alarming(log: str) -> list[str]:
    return [line for line in log.splitlines() if " INFO volunteer." not in line]


def misdeed_of(line: str) -> str:
    return line.partition("misdeed=")[2].partition(":")[0]


def test_insiders_are_banned_and_the_swarm_goes_on(tmp_path: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        lan = swarm.network.add_bridge()
        agents = [swarm.add(lan) for _ in range(3)]
        swarm.start(*agents)
        for agent in agents:
            agent.wait_for("two rounds", lambda s: s.round_index >= 2 and s.num_peers == 2, UP_S)
        wait_contributing(agents, UP_S)
        victim, process = agents[0], agents[0].process()
        fds, rss = process.num_fds(), process.memory_info().rss
        since_utc, first = utc_now(), victim.status().round_index
        thrown_out = []
        for kind in insider.KINDS:
            num_lines = len(alarming(victim.logged()))
            with harming(kind, swarm, lan, victim) as peer_id:
                ban = wait_until(
                    f"the {kind} insider is banned", lambda: bans(victim).get(peer_id), BANNED_S
                )
                assert peer_id not in {peer.peer_id for peer in victim.peers()}
            lines = alarming(victim.logged())[num_lines:]
            report(f"insider {kind}: banned because it {ban.reason}; {len(lines)} lines logged")
            assert len(lines) <= MAX_LINES_A_KIND, "\n".join(lines)
            kinds = [misdeed_of(line) for line in lines if f"peer={peer_id} misdeed=" in line]
            assert len(kinds) == len(set(kinds)), "each kind of misdeed once"
            thrown_out.append(peer_id)

        def is_calm() -> bool:
            now = process.memory_info().rss
            return process.num_fds() <= MAX_GROWTH * fds and now <= MAX_GROWTH * rss

        wait_until("file descriptors and memory are back", is_calm, CALM_S)
        head_s = wait_one_tip(agents, 8 * ROUND_S)
        _went_on(agents, since_utc, first)
        report(
            f"insiders: fds {fds} -> {process.num_fds()}, RSS {rss / 1e6:.0f} -> "
            f"{process.memory_info().rss / 1e6:.0f} MB, one head {head_s:.1f} s after"
        )
        wait_until("it is on disk", lambda: set(thrown_out) <= bans(victim).keys(), KEPT_S)
        victim.end()
        victim.start()
        assert set(thrown_out) <= bans(victim).keys(), "a restart lifts no ban"


def _went_on(agents: Sequence[NodeAgent], since_utc: str, first: int) -> None:
    """Check that nobody missed a round because of it, and that no work is lost."""
    statuses = [agent.status() for agent in agents]
    gap_s = max(longest_gap_s(agent, since_utc) for agent in agents)
    most_s = ROUND_S + max(s.grace_s + s.failover_s for s in statuses) + SLACK_S + 1.0
    num_rounds = min(s.round_index for s in statuses) - first
    report(f"{num_rounds} rounds meanwhile, longest gap {gap_s:.0f} s of {most_s:.0f} s allowed")
    assert num_rounds > 0
    assert gap_s <= most_s
    for agent, status in zip(agents, statuses, strict=True):
        assert status.num_peers == len(agents) - 1
        assert status.alarm == ""
        assert unbalanced(agent) == ""
