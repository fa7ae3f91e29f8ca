"""Rules of the round protocol taken out of the real machine, one at a time, and what that breaks.

Each mutation patches the real functions; `schedule` then finds something broken that is whole on
the very same seed, or in the very same hand-written schedule, with the rule in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from unittest import mock

from tests.simulation import adversary
from volunteer.lab.simulation.errors import BrokenRule
from volunteer.lab.simulation.scenario import ROUND_S, Scenario
from volunteer.lab.simulation.simulation import Simulation
from volunteer.lab.simulation.world import HOSTILE
from volunteer.rounds import chain, fork_choice, knowledge, machine, proposing, turn
from volunteer.rounds import events as ev
from volunteer.rounds.ballot import Ballot
from volunteer.rounds.chain import ChainFacts, ChainRules, Rosters
from volunteer.rounds.credit import WorkState
from volunteer.rounds.fork_choice import Tree
from volunteer.rounds.knowledge import Knowledge
from volunteer.rounds.own_work import OwnWork
from volunteer.rounds.records import Commit, Contribution, Leaving, Record

NUM_SEEDS = 4
"""Of each scenario; what a mutation breaks, it breaks on one of them."""
Patch = Callable[[ExitStack], None]


@dataclass(frozen=True, slots=True)
class Mutation:
    """One rule less."""

    patch: Patch
    schedule: Callable[[], str]
    """Returns what was broken; empty if nothing was."""
    breaks: str
    """Matches what is said of what it breaks."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Have the rule taken out meanwhile."""
        with ExitStack() as stack:
            self.patch(stack)
            yield


def simulate(scenario: Scenario, prepare: Callable[[Simulation], None] | None = None) -> str:
    """Run some seeds of the simulation; return the first rule that one of them broke."""
    for seed in range(NUM_SEEDS):
        simulation = Simulation(scenario, seed)
        if prepare is not None:
            prepare(simulation)
        try:
            report = simulation.run()
        except BrokenRule as broken:
            return f"{broken} (seed {seed})"
        if len(report.heads) > 1:
            return f"I6: {len(report.heads)} heads at the end (seed {seed})"
    return ""


# --------------------------------------------------------------------------------- rules 7, 21


def no_lock(stack: ExitStack) -> None:
    """Vote once a height, for whatever the choice of the tip gives."""

    def may_vote(self: Ballot, base: ChainFacts) -> bool:
        return base.height > self.voted_height

    stack.enter_context(mock.patch.object(Ballot, "may_vote", may_vote))


def one_roster(number: int, stack: ExitStack) -> None:
    """Count a quorum in the previous (0) or the current (1) roster alone."""

    def is_quorum(rules: ChainRules, rosters: Rosters, peers: frozenset[str]) -> bool:
        roster = rosters[number]
        return len(peers & roster) * rules.quorum_denominator > len(roster) * rules.quorum_numerator

    for module in (chain, turn):
        stack.enter_context(mock.patch.object(module, "is_quorum", is_quorum))


# ------------------------------------------------------------------------------------- rule 17


def tokens_before_votes(stack: ExitStack) -> None:
    """Choose the branch whose commits list the most tokens, certified or not."""
    tokens: dict[str, int] = {}
    add = Knowledge.add

    def noting_add(self: Knowledge, record_id: str, record: Record) -> bool:
        if isinstance(record, Contribution):
            tokens[record_id] = record.tokens
        return add(self, record_id, record)

    def heaviest(tree: Tree, node: str) -> int:
        children = [c for c in tree.children.get(node, ()) if tree.may_stand_on(c)]
        own = sum(tokens[i] for i in tree.facts[node].listed)
        return own + max((heaviest(tree, child) for child in children), default=0)

    def key(tree: Tree, node: str, child: str) -> tuple[int, int, int, str]:
        assert tree.facts[child].parent_id == node
        return (-heaviest(tree, child), 0, tree.facts[child].rank, child)

    stack.enter_context(mock.patch.object(Knowledge, "add", noting_add))
    stack.enter_context(mock.patch.object(fork_choice, "_branch_key", key))


def _one_trains_fast_alone(simulation: Simulation) -> None:
    """Of four members, cut off one that trains faster than the others together; 5 rounds."""
    name = list(simulation.members)[-1]
    simulation.members[name].tokens_per_s = 100.0
    world = simulation.world
    world.after(6 * ROUND_S, partial(world.partition.update, {name: 1}))
    world.after(11 * ROUND_S, world.partition.clear)


# -------------------------------------------------------------------------------- rules 5, 15


def skip_hash_check(stack: ExitStack) -> None:
    """Stand on a commit whatever its list leads to."""
    take_in = machine.Machine._take_in

    def credulous(self: machine.Machine, event: ev.Event, now_s: float) -> None:
        if isinstance(event, ev.StateRefused):
            event = ev.StateHeld(event.commit_id)
        take_in(self, event, now_s)

    stack.enter_context(mock.patch.object(machine.Machine, "_take_in", credulous))


def accept_stale(stack: ExitStack) -> None:
    """Accept commits that list what was made on the parent's parent's parent, and make them."""
    problem, eligible = chain.commit_problem, turn.eligible_contributions

    def lenient_problem(
        rules: ChainRules,
        parent: ChainFacts,
        commit: Commit,
        contributions: Mapping[str, Contribution],
        leavings: Mapping[str, Leaving],
    ) -> str:
        sentence = problem(rules, parent, commit, contributions, leavings)
        return "" if "was not made on its parent or" in sentence else sentence

    def lenient_eligible(
        known: Knowledge, tip: ChainFacts, banned: Collection[str]
    ) -> tuple[str, ...]:
        ids = set(eligible(known, tip, banned))
        below = known.facts[tip.parent_id or tip.commit_id]
        stale = known.based_on.get(below.parent_id, set()) & known.held
        ids |= {i for i in stale if i not in below.listed | tip.listed}
        return tuple(sorted(ids))

    stack.enter_context(mock.patch.object(knowledge, "commit_problem", lenient_problem))
    stack.enter_context(mock.patch.object(proposing, "eligible_contributions", lenient_eligible))


# ------------------------------------------------------------------------------- rules 27 - 29


def carry_in_flight(stack: ExitStack) -> None:
    """Carry what no commit of the chain lists yet, although one still may."""

    def may_be_listed(self: OwnWork, base: str) -> bool:
        return False

    stack.enter_context(mock.patch.object(OwnWork, "_may_be_listed", may_be_listed))


def carry_by_events(stack: ExitStack) -> None:
    """Carry what was once refused for ever: a chain that lists it after all changes nothing."""
    pending = OwnWork.pending
    once_pending: dict[int, set[str]] = {}

    def sticky(self: OwnWork) -> list[str]:
        now = pending(self)
        kept = once_pending.setdefault(id(self.own), set())
        kept.update(now)
        states = self.states()
        sent_again = {k for c in self.own.values() for k in c.carries}
        kept_in = [i for i in kept if states[i] is WorkState.LISTED and i not in sent_again]
        return sorted({*now, *kept_in}, key=lambda i: (self.own[i].round_index, i))

    stack.enter_context(mock.patch.object(OwnWork, "pending", sticky))


_HOSTILE_3 = Scenario(num_members=3, net=HOSTILE, is_open=False)

MUTATIONS = {
    "no lock": Mutation(no_lock, adversary.memory_errs_after_a_vote, "I2"),
    "the current roster alone": Mutation(
        partial(one_roster, 1), adversary.rosters_change_at_a_partition, "I2"
    ),
    "the previous roster alone": Mutation(
        partial(one_roster, 0),
        partial(adversary.rosters_change_at_a_partition, is_second_change=True),
        "I2",
    ),
    "tokens before votes": Mutation(
        tokens_before_votes,
        partial(
            simulate, Scenario(num_members=4, is_open=False, num_rounds=14), _one_trains_fast_alone
        ),
        "I6",
    ),
    "no check of the hash": Mutation(
        skip_hash_check,
        partial(simulate, Scenario(num_members=4, num_liars=1, lies=("wrong-hash",))),
        "stands on another state",
    ),
    "stale contributions": Mutation(accept_stale, partial(simulate, _HOSTILE_3), "I3|I4"),
    "carry what is in flight": Mutation(carry_in_flight, partial(simulate, _HOSTILE_3), "I4"),
    "carry by events": Mutation(carry_by_events, partial(simulate, _HOSTILE_3), "I4"),
}
