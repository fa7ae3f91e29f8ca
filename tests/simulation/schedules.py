"""The commit core without time: any member may do anything that the rules allow, at any moment.

Where `scenario` draws delays, this draws the order of events itself, so it finds in milliseconds
what a network would do once in a year: votes that arrive only on one side, a proposer that sees
half of them, a member that wakes up on an old branch. Each phase has its own links.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from volunteer.rounds.ballot import Ballot
from volunteer.rounds.chain import ChainFacts, ChainRules, rank_of
from volunteer.rounds.fork_choice import common_ancestor
from volunteer.rounds.knowledge import Knowledge
from volunteer.rounds.records import (
    Commit,
    Contribution,
    Record,
    encode_body,
    genesis_id,
    record_id_of,
)
from volunteer.rounds.turn import eligible_contributions

RUN_ID = "c0" * 32
HASH = "0f" * 32


@dataclass(slots=True)
class CoreMember:
    """One member: what it knows and what it has signed."""

    me: str
    known: Knowledge
    ballot: Ballot
    contributed: set[str] = field(default_factory=set)
    proposed: set[str] = field(default_factory=set)
    log: list[tuple[str, Record]] = field(default_factory=list)

    def tip(self) -> ChainFacts:
        """Return where it stands; all blobs are held by all (rule 16, 17)."""
        return self.known.facts[self.known.header_choice.best(self.known.rules.genesis_id)]

    def take(self, record_id: str, record: Record) -> None:
        """Take in a record, once."""
        if self.known.add(record_id, record):
            self.log.append((record_id, record))


class ConflictError(AssertionError):
    """Two conflicting commits are final and no reset lies between."""


class Schedule:
    """One random order of events among `num_members`."""

    def __init__(self, num_members: int, seed: int, *, expiry_rounds: int = 8) -> None:
        self.rng = random.Random(seed)
        names = [f"m{i}" for i in range(num_members)]
        self.rules = ChainRules(
            run_id=RUN_ID,
            module_id="dense",
            genesis_id=genesis_id(RUN_ID, "dense"),
            publisher=names[0],
            expiry_rounds=expiry_rounds,
            demote_rounds=8,
            max_contributions=32,
            quorum_numerator=1,
            quorum_denominator=2,
        )
        self.members = [self._member(name) for name in names]
        self.facts: dict[str, ChainFacts] = {}
        self.num_finals_conflicting_across_a_reset = 0

    def _member(self, name: str) -> CoreMember:
        known = Knowledge(self.rules)
        return CoreMember(name, known, Ballot(known.facts, lock_id=self.rules.genesis_id))

    def settle(self, num_rounds: int) -> None:
        """Let everyone hear everything for some rounds, so that all are in the rosters."""
        for _ in range(num_rounds):
            for member in self.members:
                self.contribute(member)
            self.deliver(self.members)
            self.propose(self.members[0], 1.0)
            self.deliver(self.members)

    def run(self, num_phases: int, steps_per_phase: int) -> None:
        """Draw events, with other links in each phase, and compare all finals after each phase."""
        for _ in range(num_phases):
            islands = [self.rng.randrange(2) for _ in self.members]
            hears = self.rng.choice((0.2, 0.5, 0.9))
            for _ in range(steps_per_phase):
                self._step(islands, hears)
            self.compare_finals()

    def _step(self, islands: list[int], hears: float) -> None:
        i = self.rng.randrange(len(self.members))
        member = self.members[i]
        draw = self.rng.random()
        if draw < 0.4:
            self.contribute(member)
        elif draw < 0.6:
            self.propose(member, self.rng.choice((0.5, 1.0)))
        else:
            group = [
                m
                for m, island in zip(self.members, islands, strict=True)
                if island == islands[i] and self.rng.random() < hears
            ]
            self.deliver([member, *group])

    def deliver(self, group: list[CoreMember]) -> None:
        """All in `group` hear all that any of them knows, in the order in which it came."""
        for sender in group:
            for record_id, record in list(sender.log):
                for receiver in group:
                    receiver.take(record_id, record)

    def contribute(self, member: CoreMember) -> None:
        """Contribute on the tip, with a true vote if the rules allow (rules 20, 21)."""
        tip = member.tip()
        if tip.commit_id in member.contributed:
            return
        member.contributed.add(tip.commit_id)
        record = Contribution(
            run_id=RUN_ID,
            module_id="dense",
            round_index=tip.height,
            author=member.me,
            base=tip.commit_id,
            vote=member.ballot.may_vote(tip),
            blob_id=HASH,
            blob_bytes=1,
            codec="int4",
            codec_version=1,
            tokens=1,
        )
        if record.vote:
            member.ballot.note_vote(record)
        member.take(record_id_of(encode_body(record)), record)

    def propose(self, member: CoreMember, listed_fraction: float) -> None:
        """Propose a child of the tip that lists some of what is eligible."""
        tip = member.tip()
        if tip.commit_id in member.proposed:
            return
        member.known.held.update(member.known.contributions)
        eligible = [
            i
            for i in eligible_contributions(member.known, tip, ())
            if self.rng.random() < listed_fraction
        ]
        if not eligible:
            return
        member.proposed.add(tip.commit_id)
        record = Commit(
            run_id=RUN_ID,
            module_id="dense",
            round_index=tip.height + 1,
            parent=tip.commit_id,
            rank=rank_of(self.rules, tip, member.me),
            proposer=member.me,
            contributions=tuple(eligible),
            state_hash=HASH,
        )
        member.take(record_id_of(encode_body(record)), record)

    def compare_finals(self) -> None:
        """I2, over every chain that anybody knows, whether or not anybody stands on it."""
        for member in self.members:
            self.facts.update(member.known.facts)
        finals = sorted({facts.final_id for facts in self.facts.values()})
        for i, one in enumerate(finals):
            for other in finals[:i]:
                ancestor = common_ancestor(self.facts, one, other)
                if ancestor in (one, other):
                    continue
                resets = self.facts[ancestor].resets
                if self.facts[one].resets == resets == self.facts[other].resets:
                    raise ConflictError(f"{one[:8]} and {other[:8]}")
                self.num_finals_conflicting_across_a_reset += 1
