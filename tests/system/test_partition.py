"""Four real agents fall apart and come together again: one head, and no token without a place.

Each side goes on by itself for three rounds. After healing, every contribution of every side is
asked after: the chain lists it, a later one carries it, or it was refused or dropped with a reason.
What an agent says of its own work is held against the chain as another agent has it on disk.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.system.agents import wait_until
from tests.system.swarms import (
    ROUND_S,
    SLACK_S,
    NodeAgent,
    local_swarm,
    one_tip,
    report,
    unbalanced,
)
from volunteer.answers import ContributionPoint
from volunteer.rounds.knowledge import Knowledge

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.full]
NUM_ROUNDS_APART = 3
MAX_ROUNDS_TO_ONE_HEAD = 8
SETTLED_S = 120.0
SIDE_ROUND_S = 4 * (ROUND_S + SLACK_S)
"""A side without a quorum waits for turns and votes that do not come; few ranks are on it."""
SETTLED = frozenset({"confirmed", "refused", "dropped"})


class Sides(NamedTuple):
    """Two groups that did not hear each other for some rounds."""

    one: Sequence[NodeAgent]
    other: Sequence[NodeAgent]
    first_height: int
    """Height of the common tip when they were parted."""
    last_heights: tuple[int, int]
    """Heights of their tips when they were united."""
    last_tips: tuple[str, str]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_alone", [2, 1], ids=["2-2", "3-1"])
def test_a_partition_heals_and_every_token_has_a_place(tmp_path: Path, num_alone: int) -> None:
    with local_swarm(tmp_path) as swarm:
        lan = swarm.network.add_bridge()
        agents = [swarm.add(lan) for _ in range(4)]
        swarm.start(*agents)
        for agent in agents:
            agent.wait_for("5 rounds", lambda s: s.round_index >= 5 and s.num_peers == 3, SETTLED_S)
        wait_until("all agree", lambda: one_tip(agents), SETTLED_S)
        alone = agents[:num_alone]
        swarm.network.part(*[agent.node for agent in alone])
        try:
            sides = _go_on_apart(agents[num_alone:], alone)
        finally:
            swarm.network.unite(*[agent.node for agent in alone])
        united_at_s, begun = time.monotonic(), max(sides.last_heights)
        deadline_s = MAX_ROUNDS_TO_ONE_HEAD * (ROUND_S + SLACK_S)
        wait_until("one head", lambda: one_tip(agents), deadline_s)
        num_rounds = max(a.status().round_index for a in agents) - begun
        report(
            f"apart from round {sides.first_height} to {sides.last_heights}; one head "
            f"{time.monotonic() - united_at_s:.1f} s ({num_rounds} rounds) after uniting"
        )
        assert num_rounds <= MAX_ROUNDS_TO_ONE_HEAD
        _verify_accounts(agents, sides)


def _go_on_apart(one: Sequence[NodeAgent], other: Sequence[NodeAgent]) -> Sides:
    """Wait until each side has made its three rounds, in agreement with itself alone."""
    first = max(agent.status().round_index for agent in (*one, *other))

    def is_done() -> bool:
        statuses = [agent.status() for agent in (*one, *other)]
        return all(s.round_index >= first + NUM_ROUNDS_APART for s in statuses)

    wait_until("three rounds on each side", is_done, NUM_ROUNDS_APART * SIDE_ROUND_S)
    (tip, height), (other_tip, other_height) = (_highest(side) for side in (one, other))
    return Sides(one, other, first, (height, other_height), (tip, other_tip))


def _highest(side: Sequence[NodeAgent]) -> tuple[str, int]:
    """Return the highest tip of a side."""
    return max(((s.tip, s.round_index) for s in (a.status() for a in side)), key=lambda t: t[1])


def _verify_accounts(agents: Sequence[NodeAgent], sides: Sides) -> None:
    """Hold each agent's account of the time apart against the chain that another one has."""
    until = max(sides.last_heights)

    def is_settled() -> bool:
        points = [point for agent in agents for point in agent.contributions()]
        return all(p.outcome in SETTLED for p in points if p.round_index <= until)

    # Carried work is listed a round or two later, and final another two later.
    wait_until("all of it is settled", is_settled, 10 * (ROUND_S + SLACK_S))
    best = _chain_of(agents[0].chain())
    kept = [tip in best for tip in sides.last_tips]
    report(f"the chain is that of: one side {kept[0]}, the other {kept[1]}")
    assert sum(kept) == 1, "they did not part, or neither side's chain was kept"
    carried = Counter[bool]()
    for agent, witness in zip(agents, [*agents[1:], agents[0]], strict=True):
        wait_until("the books balance", lambda agent=agent: not unbalanced(agent), 20)  # type: ignore[misc]
        assert agent.status().alarm == ""
        places = _verify_account(agent, witness.chain(), sides)
        report(f"{agent.home.name}: {dict(places)} tokens made apart")
        is_kept = kept[0] if agent in sides.one else kept[1]
        carried[is_kept] += places["carried"]
    assert carried[False] > 0, "the work of the side that gave way is carried"


def _verify_account(agent: NodeAgent, chain: Knowledge, sides: Sides) -> Counter[str]:
    """Check each contribution's account; return the tokens made apart by their places."""
    points = {p.contribution_id: p for p in agent.contributions()}
    listed = _listed(chain)
    covered = Counter(
        i for name in listed if name in points for i in (name, *chain.contributions[name].carries)
    )
    assert max(covered.values()) == 1, "no work is listed twice"
    places: Counter[str] = Counter()
    for point in points.values():
        place = _place_of(point, points)
        if point.outcome == "confirmed":
            # Its work is on the other's chain once: as itself, or in what carries it.
            assert covered[point.contribution_id] == 1
            assert (listed.get(point.contribution_id) is not None) == (place == "listed")
        if point.outcome in ("dropped", "pending"):
            assert covered[point.contribution_id] == 0
        if sides.first_height <= point.round_index <= max(sides.last_heights):
            assert place in ("listed", "carried") or place.startswith(("refused", "dropped"))
            places[place] += point.new_tokens
    return places


def _place_of(point: ContributionPoint, points: dict[str, ContributionPoint]) -> str:
    """Return what became of a contribution's work: every end has its where or its why."""
    if point.outcome == "confirmed":
        if point.listed_in_round is not None:
            return "listed"
        carriers = [points[i] for i in point.carried_by]
        assert any(c.state == "confirmed" and c.listed_in_round is not None for c in carriers)
        return "carried"
    if point.outcome in ("refused", "dropped"):
        reasons = [points[i].reason for i in point.carried_by if points[i].state == point.outcome]
        reason = point.reason or next(iter(reasons), "")
        assert reason, point
        return f"{point.outcome}: {reason}"
    return point.outcome


def _chain_of(known: Knowledge) -> list[str]:
    """Return the best chain in these records, the highest commit first."""
    return [*known.chain_down(known.header_choice.best(known.rules.genesis_id))]


def _listed(known: Knowledge) -> dict[str, int]:
    """Return what that chain lists -> height of the commit that lists it."""
    return {
        contribution_id: known.facts[commit_id].height
        for commit_id in _chain_of(known)
        for contribution_id in known.facts[commit_id].listed
    }
