"""A few real machines moved by hand: for schedules that no random network would ever draw.

Nobody hears anything unless told to, and nobody's time passes unless told to.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from tests.simulation.actor import Actor
from tests.simulation.invariants import is_conflict
from volunteer.rounds.chain import ChainFacts, ChainRules
from volunteer.rounds.records import Commit, Contribution, Record, genesis_id

RUN_ID = "57" * 32
MOST_TICKS = 60
"""Of a round, before it is given up."""


class Stage:
    """Members by name; the first one publishes the run."""

    def __init__(self, names: str, *, expiry_rounds: int = 8) -> None:
        """Start everybody on the genesis; each letter is a member."""
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
        self.actors = {name: Actor.begin(self.rules, name) for name in names}

    def tip(self, name: str) -> ChainFacts:
        """Return where a member stands."""
        return self.actors[name].tip

    def tick(self, name: str) -> list[str]:
        """Let a member's time pass; return the ids of what it signs."""
        return self.actors[name].tick()

    def contribute(self, names: str) -> dict[str, str]:
        """Have members contribute to where they stand; return each one's contribution."""
        made = {}
        for name in names:
            contribution_id, *more = self.tick(name)
            assert isinstance(self.record(contribution_id), Contribution)
            assert not more, f"{name} has proposed at once"
            made[name] = contribution_id
        return made

    def propose(self, name: str) -> str:
        """Have a member propose that may already have contributed; return the commit."""
        signed = self.tick(name) or self.tick(name)
        commits = [i for i in signed if isinstance(self.record(i), Commit)]
        return commits[0] if commits else self.propose(name)

    def tell(self, record_ids: Iterable[str], names: str) -> None:
        """Have members hear these records, wherever they are."""
        for record_id, name in itertools.product(list(record_ids), names):
            self.actors[name].hear(record_id, self.record(record_id))

    def record(self, record_id: str) -> Record:
        """Return a record that somebody has."""
        return next(a.disk[record_id] for a in self.actors.values() if record_id in a.disk)

    def share(self, names: str) -> None:
        """Have members hear all that any of them has, until there is nothing new."""
        num_known = -1
        while num_known != sum(len(self.actors[name].disk) for name in names):
            num_known = sum(len(self.actors[name].disk) for name in names)
            for one in names:
                self.tell(list(self.actors[one].disk), names)

    def round(self, names: str) -> None:
        """A whole round in which these members hear each other and nobody else."""
        height = max(self.tip(name).height for name in names)
        for name in itertools.islice(itertools.cycle(names), MOST_TICKS):
            self.actors[name].tick()
            self.share(names)
            if all(self.tip(each).height > height for each in names):
                return
        raise AssertionError(f"{names} stay at {height}")

    def rounds(self, names: str, number: int) -> None:
        """Several whole rounds."""
        for _ in range(number):
            self.round(names)

    def go_on(self, names: str) -> str:
        """Get higher together, telling nothing but what is signed meanwhile; return the tip."""
        height = max(self.tip(name).height for name in names)
        for name in itertools.islice(itertools.cycle(names), MOST_TICKS):
            self.tell(self.tick(name), names)
            tips = {self.tip(each).commit_id for each in names}
            if len(tips) == 1 and self.tip(name).height > height:
                return tips.pop()
        raise AssertionError(f"{names} stay at {height}")

    def facts(self) -> dict[str, ChainFacts]:
        """Return the facts of every commit that anybody knows."""
        facts: dict[str, ChainFacts] = {}
        for actor in self.actors.values():
            facts |= actor.machine.known.facts
        return facts

    def conflicting_finals(self) -> list[tuple[str, str]]:
        """Return pairs of finals that no chain has both of, with no reset between (I2)."""
        facts = self.facts()
        finals = sorted({each.final_id for each in facts.values()})
        pairs = itertools.combinations(finals, 2)
        return [(one, other) for one, other in pairs if is_conflict(facts, one, other)]
