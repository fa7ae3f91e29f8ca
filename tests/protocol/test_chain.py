"""What a chain says: a second implementation finds the same on random chains, good and bad."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import pytest

from tests.protocol import second_chain
from tests.protocol.second_wire import MalformedError
from volunteer.rounds import chain
from volunteer.rounds.records import (
    Commit,
    Contribution,
    Leaving,
    encode_body,
    genesis_id,
    record_id_of,
)

RUN = "ab" * 32
GENESIS = genesis_id(RUN, "dense")
PEOPLE = [f"peer {letter}" for letter in "abcdef"]
NUM_SEEDS, NUM_COMMITS = 25, 30


@dataclass
class Pair:
    """One chain, as both see it."""

    rules: chain.ChainRules
    seconds: second_chain.Rules
    facts: dict[str, chain.ChainFacts] = field(default_factory=dict)
    second: dict[str, second_chain.Commit] = field(default_factory=dict)
    contributions: dict[str, Contribution] = field(default_factory=dict)
    leavings: dict[str, Leaving] = field(default_factory=dict)

    def judge(self, commit_id: str, commit: Commit) -> bool:
        """Return whether the commit is valid; both must say so, and find the same facts."""
        parent = self.facts[commit.parent]
        problem = chain.commit_problem(
            self.rules, parent, commit, self.contributions, self.leavings
        )
        made = second_chain.Commit(
            commit_id,
            self.second[commit.parent],
            commit.round_index,
            commit.rank,
            commit.proposer,
            [work_of(i, self.contributions[i]) for i in commit.contributions],
            [work_of(i, self.leavings[i]) for i in commit.leaving],
            commit.marks,
        )
        try:
            self.seconds.verify(made)
        except MalformedError:
            assert problem
            return False
        assert not problem
        self.second[commit_id] = self.seconds.apply(made)
        self.facts[commit_id] = chain.next_facts(
            self.rules, self.facts, commit_id, commit, self.contributions, self.leavings
        )
        self.compare(self.facts[commit_id], made)
        return True

    def compare(self, ours: chain.ChainFacts, theirs: second_chain.Commit) -> None:
        assert ours.rosters == theirs.rosters
        assert (ours.rosters_since, ours.resets) == (theirs.since, theirs.resets)
        assert (ours.certified_height, ours.final_height) == (theirs.certified, theirs.final)
        assert dict(ours.seen) == self.seconds.seen(theirs)
        assert ours.away == theirs.away
        assert list(chain.rank_order(self.rules, ours)) == self.seconds.order(theirs)
        for peer in [*PEOPLE, "a stranger"]:
            assert chain.rank_of(self.rules, ours, peer) == self.seconds.rank(theirs, peer)
            is_new = ours.times_listed.get(peer, 0) < chain.PROBATION_ROUNDS
            is_new |= ours.strikes.is_on_probation(peer, ours.height + 1)
            assert is_new is self.seconds.on_probation(theirs, peer)
            assert (peer in chain.excluded_at(ours)) is theirs.is_out(peer)
        bits = {a: int("".join(map(str, b)), 2) for a, b in theirs.strikes.items()}
        assert dict(ours.strikes.marks) == bits


def work_of(record_id: str, record: Contribution | Leaving) -> second_chain.Work:
    vote, harmful = False, None
    if isinstance(record, Contribution):
        vote = record.vote
        harmful = None if record.harmful is msgspec.UNSET else record.harmful
    place = (record.author, record.base, record.round_index)
    return second_chain.Work(record_id, *place, vote, harmful)


def new_pair(chance: random.Random) -> Pair:
    publisher = chance.choice(["", PEOPLE[0]])
    expiry, demote = chance.randint(2, 5), chance.randint(1, 4)
    quorum = chance.choice([(1, 2), (2, 3)])
    rules = chain.ChainRules(
        run_id=RUN,
        module_id="dense",
        genesis_id=GENESIS,
        publisher=publisher,
        expiry_rounds=expiry,
        demote_rounds=demote,
        max_contributions=5,
        quorum_numerator=quorum[0],
        quorum_denominator=quorum[1],
    )
    seconds = second_chain.Rules(RUN, "dense", publisher, expiry, demote, 5, quorum)
    pair = Pair(rules, seconds)
    pair.facts[GENESIS] = chain.genesis_facts(rules)
    pair.second[GENESIS] = seconds.genesis(GENESIS)
    return pair


def grow(pair: Pair, parent_id: str, chance: random.Random) -> tuple[str, Commit]:
    """Make a random child, mostly a valid one, of mostly those who are at home just then."""
    parent = pair.facts[parent_id]
    bases = [parent, *([pair.facts[parent.parent_id]] if parent.parent_id else [])]
    at_home = PEOPLE[: chance.choice([1, 2, 3, 4, 6])]
    ids, farewells = [], []
    for author in chance.sample(at_home, chance.randint(1, len(at_home))):
        base = chance.choices(bases, [4, 1][: len(bases)])[0]
        record = Contribution(
            run_id=RUN,
            module_id="dense",
            round_index=base.height,
            author=author,
            base=base.commit_id,
            vote=chance.random() < 0.85,
            blob_id="0c" * 32,
            blob_bytes=1,
            codec="int4",
            codec_version=1,
            tokens=chance.randint(1, 10**6),
            harmful=verdict_on(base, chance),
        )
        record_id = record_id_of(encode_body(record))
        pair.contributions[record_id] = record
        ids.append(record_id)
    if chance.random() < 0.1 and parent.listed:
        ids.append(chance.choice(sorted(parent.listed)))
    if chance.random() < 0.25:
        base = chance.choice(bases)
        gone = Leaving(
            run_id=RUN,
            module_id="dense",
            round_index=base.height,
            author=chance.choice(PEOPLE),
            base=base.commit_id,
        )
        leaving_id = record_id_of(encode_body(gone))
        pair.leavings[leaving_id] = gone
        farewells.append(leaving_id)
    order = chain.rank_order(pair.rules, parent)
    proposer = order[0] if order and chance.random() < 0.7 else chance.choice(PEOPLE)
    commit = Commit(
        run_id=RUN,
        module_id="dense",
        round_index=parent.height + 1,
        parent=parent_id,
        rank=chain.rank_of(pair.rules, parent, proposer),
        proposer=proposer,
        contributions=tuple(sorted(set(ids))),
        leaving=tuple(farewells),
        state_hash="0d" * 32,
    )
    if chance.random() < 0.4:
        commit = msgspec.structs.replace(commit, marked=marks_on(pair, commit, chance))
    if chance.random() < 0.1:
        wrong = chance.choice([{"rank": commit.rank + 1}, {"round_index": commit.round_index + 1}])
        commit = msgspec.structs.replace(commit, **wrong)
    return record_id_of(encode_body(commit)), commit


def marks_on(
    pair: Pair, commit: Commit, chance: random.Random
) -> tuple[str, ...] | msgspec.UnsetType:
    """Mark one contribution at most: PEOPLE[1]'s mostly, another's now and then."""
    bad = [i for i in commit.contributions if pair.contributions[i].author == PEOPLE[1]]
    some = chance.choices([bad, [chance.choice(commit.contributions)]], [4, 1])[0]
    return tuple(some[:1]) or msgspec.UNSET


def verdict_on(
    base: chain.ChainFacts, chance: random.Random
) -> tuple[str, ...] | msgspec.UnsetType:
    """Condemn one contribution mostly, the same for all; nobody's now and then."""
    if chance.random() < 0.3 or not base.listed:
        return msgspec.UNSET
    return tuple(sorted(base.listed)[:1]) if chance.random() < 0.8 else ()


@pytest.mark.slow
def test_both_find_the_same_on_random_chains() -> None:
    happened = {"valid": 0, "refused": 0, "final": 0, "resets": 0, "rosters": 0, "demoted": 0}
    happened |= {"struck": 0, "excluded": 0}
    for seed in range(NUM_SEEDS):
        chance = random.Random(seed)
        pair = new_pair(chance)
        tip = GENESIS
        for _ in range(NUM_COMMITS):
            commit_id, commit = grow(pair, tip, chance)
            if not pair.judge(commit_id, commit):
                happened["refused"] += 1
                continue
            happened["valid"] += 1
            # Now and then from the commit below: a fork.
            tip = commit_id if chance.random() < 0.9 else tip
        last = pair.facts[tip]
        happened["struck"] += bool(last.strikes.marks)
        happened["excluded"] += bool(last.strikes.excluded_until)
        happened["final"] += last.final_height
        happened["resets"] += last.resets
        happened["rosters"] += last.rosters[0] != last.rosters[1]
        happened["demoted"] += bool(last.demoted_until)
    assert all(happened.values()), happened
    assert happened["valid"] > happened["refused"]
