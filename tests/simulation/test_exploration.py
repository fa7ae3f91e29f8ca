"""The commit core under every order of events, as far as the bounds go; LOGBOOK.md says how far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from unittest import mock

import pytest

from tests.simulation.bounds import Bounds, Outcome
from tests.simulation.explore import Explorer
from tests.simulation.mutations import carry_in_flight, no_lock
from volunteer.rounds import chain, turn
from volunteer.rounds.ballot import Ballot
from volunteer.rounds.chain import ChainFacts, ChainRules, Rosters
from volunteer.rounds.records import Contribution

pytestmark = [pytest.mark.simulation, pytest.mark.slow, pytest.mark.timeout(300)]


def explore(**bounds: float) -> Outcome:
    return Explorer(Bounds(**bounds)).run()  # type: ignore[arg-type]


def verify(outcome: Outcome) -> None:
    assert not outcome.broken, "\n".join((outcome.broken, *outcome.trace))
    assert outcome.num_forked > 0


COMPLETE: dict[str, dict[str, float]] = {
    "one round with a crash": {"num_rounds": 1},
    "one round, commits heard before what they list": {
        "num_rounds": 1,
        "num_crashes": 0,
        "is_hearing_whole": False,
    },
    "two members, two rounds, a crash": {"num_members": 2, "num_rounds": 2},
    "one round with a crash, looking twice at states held to be one": {
        "num_rounds": 1,
        "is_checking_merges": True,
        "most_visible_steps": 4,
    },
    "three rounds with a crash, up to 5 records": {"num_rounds": 3, "most_visible_steps": 5},
}


@pytest.mark.parametrize("name", COMPLETE)
def test_every_order_of_events_keeps_the_rules(name: str) -> None:
    outcome = explore(**COMPLETE[name])
    verify(outcome)
    assert outcome.is_complete


def wander(seed: int, num_rounds: int = 12, num_steps: int = 600) -> Outcome:
    return Explorer(Bounds(num_rounds=num_rounds, num_crashes=3)).wander(seed, num_steps)


def test_long_ways_at_random_keep_the_rules() -> None:
    outcomes = [wander(seed) for seed in range(30)]
    assert [outcome.broken for outcome in outcomes] == [""] * 30
    assert max(outcome.highest_final for outcome in outcomes) >= 8
    assert max(outcome.num_forked for outcome in outcomes) >= 20


def test_without_the_lock_an_honest_member_that_forgets_nothing_keeps_to_it_all_the_same() -> None:
    # The choice of the tip prefers what is certified, and what was known stays known: the lock is
    # for members whose knowledge shrinks (adversary.memory_errs_after_a_vote).
    with ExitStack() as stack:
        no_lock(stack)
        assert [wander(seed).broken for seed in range(100, 130)] == [""] * 30


# ------------------------------------------------------------------------- faults that it finds


def quorum_of_a_third(stack: ExitStack) -> None:
    def is_quorum(rules: ChainRules, rosters: Rosters, peers: frozenset[str]) -> bool:
        assert rules.quorum_denominator == 2
        return all(len(peers & roster) * 3 >= len(roster) for roster in rosters)

    for module in (chain, turn):
        stack.enter_context(mock.patch.object(module, "is_quorum", is_quorum))


def two_votes_a_height(stack: ExitStack) -> None:
    def may_vote(self: Ballot, base: ChainFacts) -> bool:
        return self.lock_height >= 0 and base.height >= 0

    stack.enter_context(mock.patch.object(Ballot, "may_vote", may_vote))


def votes_forgotten_by_a_crash(stack: ExitStack) -> None:
    def count_none(
        facts: Mapping[str, ChainFacts], genesis_id: str, own: Iterable[Contribution]
    ) -> Ballot:
        return Ballot(facts, lock_id=genesis_id)

    stack.enter_context(mock.patch.object(Ballot, "of", count_none))


FAULTS: dict[str, tuple[Callable[[ExitStack], None], str]] = {
    "two votes a height": (two_votes_a_height, "I1"),
    "votes forgotten by a crash": (votes_forgotten_by_a_crash, "I1"),
    "a third is a quorum": (quorum_of_a_third, "I2"),
    "carry what is in flight": (carry_in_flight, "I3"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    patch, broken = FAULTS[name]
    num_crashes = int("crash" in name)
    most = 8 if num_crashes else 12
    with ExitStack() as stack:
        patch(stack)
        outcome = explore(
            num_rounds=2,
            num_crashes=num_crashes,
            most_commits=2 + 2 * (1 - num_crashes),
            most_visible_steps=most,
        )
    assert outcome.broken.startswith(broken)
    assert outcome.trace, "the visible steps that led there"


# ------------------------------------------------------------------------------------- hours

LARGER: dict[str, dict[str, float]] = {
    "three rounds with a crash, up to 7 records": {"num_rounds": 3, "most_visible_steps": 7},
    "three rounds, up to 8 records": {"num_rounds": 3, "most_visible_steps": 8, "num_crashes": 0},
    "two rounds, two proposals": {"num_rounds": 2, "most_commits": 2, "num_crashes": 0},
    "two members, three rounds, a crash": {"num_members": 2, "num_rounds": 3},
    "one round, slow answers": {"num_rounds": 1, "num_crashes": 0, "are_answers_slow": True},
}


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", LARGER)
def test_every_order_of_events_further(name: str) -> None:
    verify(explore(**LARGER[name], most_states=3_000_000, most_seconds=3000.0))


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_many_long_ways_at_random() -> None:
    for seed in range(1000, 3000):
        assert not wander(seed, num_rounds=30, num_steps=1500).broken, seed
