"""Two of eight real agents poison the run: found out, excluded, and told why, by all in the open.

One sends its work times -10, which the blobs alone show; the other copies, which only those can
tell who heard of the original first. Both are honest until all eight have been listed together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import pytest

from tests.system import poisoner
from tests.system.agents import wait_until
from tests.system.swarms import (
    LocalSwarm,
    NodeAgent,
    local_swarm,
    report,
    tiny_spec,
    unbalanced,
    wait_one_tip,
)
from volunteer.answers import ContributionPoint, Status
from volunteer.rounds.chain import ChainFacts, excluded_at
from volunteer.rounds.knowledge import Knowledge
from volunteer.run import RunSpec

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(600)]
NUM_HONEST = 6
KINDS = ("opposed", "copied")
ROUND_S = 8.0
MIN_GRACE_S = 4.0
"""The copier has to see another's work first, and is to be listed with it."""
SETTINGS = "duty_fraction = 0.1\n"
"""Eight trainers on two cores leave nothing to the aggregators, which score when they are idle."""
UP_S = 150.0
EXCLUDED_S = 200.0
AFTERWARDS = 3
"""Rounds: what was refused is then final, and so in the ledger."""
MAX_LISTINGS = 3
OPPOSED_REASON = "its direction disagrees with the others'"


def spec() -> RunSpec:
    """Return the tiny run, its evaluations shorter still: the aggregators are to score."""
    tiny = tiny_spec(ROUND_S, min_grace_s=MIN_GRACE_S)
    evaluation = msgspec.structs.replace(tiny.evaluation, num_sequences=4)
    return msgspec.structs.replace(tiny, evaluation=evaluation)


def add(swarm: LocalSwarm) -> tuple[list[NodeAgent], dict[str, NodeAgent]]:
    """Return the honest ones, and the poisoners by what they do."""
    lan = swarm.network.add_bridge()
    agents = [swarm.add(lan) for _ in range(NUM_HONEST + len(KINDS))]
    poisoners = dict(zip(KINDS, agents[NUM_HONEST:], strict=True))
    for kind, agent in poisoners.items():
        agent.program = ("tests.system.poisoner", kind)
    for agent in agents:
        agent.locations.prepare()
        agent.locations.config_file.write_text(SETTINGS, "utf-8")
    return agents[:NUM_HONEST], poisoners


def path_to(known: Knowledge, tip: str) -> list[ChainFacts]:
    """Return the chain up to `tip`, without the genesis."""
    path = []
    while known.facts[tip].parent_id:
        path.append(known.facts[tip])
        tip = known.facts[tip].parent_id
    return path[::-1]


def authors_of(known: Knowledge, facts: ChainFacts) -> frozenset[str]:
    return frozenset(known.contributions[i].author for i in facts.listed)


def forged_by(agent: NodeAgent) -> frozenset[str]:
    """Return the ids of the forged blobs of a poisoner."""
    file = agent.home / poisoner.FORGED_FILE
    return frozenset(file.read_text().split() if file.exists() else ())


def listings_until_excluded(
    known: Knowledge, path: Iterable[ChainFacts], author: str, forged: frozenset[str]
) -> int:
    """Return how many commits listed forged work until, with the last of them, its author is out.

    A commit that lists none of it, in between, does not count.
    """
    num = 0
    for facts in path:
        num += any(known.contributions[i].blob_id in forged for i in facts.listed)
        if author in excluded_at(facts):
            return num
    raise AssertionError(f"{author} is not excluded")


def refusals(agent: NodeAgent) -> list[ContributionPoint]:
    return [point for point in agent.contributions() if point.state == "refused"]


def test_two_poisoners_of_eight_are_excluded_and_told_why(tmp_path: Path) -> None:
    with local_swarm(tmp_path, spec=spec()) as swarm:
        honest, poisoners = add(swarm)
        everyone = [*honest, *poisoners.values()]
        swarm.start(*everyone)
        ids = {agent.home: agent.status().peer_id for agent in everyone}

        def all_together() -> bool:
            return any(p.num_contributions == len(everyone) for p in honest[0].history())

        wait_until("a commit lists all eight", all_together, UP_S)
        first = honest[0].status().round_index
        for agent in poisoners.values():
            (agent.home / poisoner.START_FILE).touch()

        def all_excluded() -> bool:
            return all(a.status().excluded_until_round is not None for a in poisoners.values())

        wait_until("both are excluded", all_excluded, EXCLUDED_S)
        last = max(agent.status().round_index for agent in everyone) + AFTERWARDS
        for agent in everyone:
            agent.wait_for("three rounds more", lambda s: s.round_index >= last, EXCLUDED_S)
        wait_one_tip(everyone, 5 * ROUND_S)
        known = honest[0].chain()
        path = path_to(known, honest[0].status().tip)
        bad = {ids[agent.home] for agent in poisoners.values()}
        for facts in path:
            assert excluded_at(facts) | facts.strikes.marks.keys() <= bad, "an honest one is struck"
        for kind, agent in poisoners.items():
            num = listings_until_excluded(known, path, ids[agent.home], forged_by(agent))
            report(f"{kind}: excluded with the {num}. commit that lists its forged work")
            assert num <= MAX_LISTINGS
        _honest_went_on(known, path[first:], [ids[a.home] for a in honest])
        for agent in honest:
            assert refusals(agent) == []
            assert unbalanced(agent) == ""
        for agent in poisoners.values():
            _is_told(agent, honest[0])
        _is_in_the_ledger(poisoners["opposed"], forged_by(poisoners["opposed"]))


def _honest_went_on(known: Knowledge, path: Sequence[ChainFacts], honest: list[str]) -> None:
    """Check that every commit since the beginning of the poison lists all the honest ones."""
    missed = [(f.height, a) for f in path for a in honest if a not in authors_of(known, f)]
    report(f"{len(path)} commits since, {len(missed)} times an honest one was not in time")
    assert len(path) >= MAX_LISTINGS + AFTERWARDS
    assert missed == []


def _is_told(agent: NodeAgent, honest: NodeAgent) -> None:
    """Check that a poisoner is told what became of it, and others in `peers`."""
    status: Status = agent.status()
    assert status.excluded_until_round is not None
    until = f"through round {status.excluded_until_round}"
    own = " ".join(agent.allmende("status").stdout.split())
    assert f"our work has no weight {until}: found bad twice" in own, own
    shown = " ".join(honest.allmende("peers").stdout.split())
    assert f"{status.peer_id} is excluded {until}: its work was found bad twice" in shown, shown
    (line,) = [p for p in honest.peers() if p.peer_id == status.peer_id]
    assert line.excluded_until_round == status.excluded_until_round


def _is_in_the_ledger(opposed: NodeAgent, forged: frozenset[str]) -> None:
    """Check that each listed forgery is refused in its author's books, in words."""
    reasons = [point.reason for point in refusals(opposed)]
    report(f"its ledger says: {reasons}; {len(forged)} forged")
    assert reasons
    assert all(reason.startswith(OPPOSED_REASON) for reason in reasons), reasons
    assert opposed.stats().tokens_refused_by_reason.keys() == {*reasons}
