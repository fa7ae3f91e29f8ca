"""The invariants of ROUNDS.md that one member's state, or a set of commits, shows by itself.

`referee` watches whole runs in virtual time; this looks at states that the search and the
hand-written schedules reach.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

from tests.simulation.actor import Actor
from volunteer.lab.simulation.errors import BrokenRule
from volunteer.rounds.chain import ChainFacts
from volunteer.rounds.fork_choice import choose_tip, common_ancestor, is_ancestor
from volunteer.rounds.records import Commit, Contribution


def verify_member(actor: Actor) -> None:
    """I1, I5, the lock, and that there is no alarm."""
    verify_signed_once(actor)
    verify_lock(actor)
    verify_tip(actor)
    if actor.alarm:
        raise BrokenRule(f"rule 18: {actor.me} has to leave a final commit")


def verify_signed_once(actor: Actor) -> None:
    """I1: one vote a height, one contribution and one proposal a commit."""
    signed: set[tuple[str, str]] = set()
    for record in actor.disk.values():
        keys = []
        if isinstance(record, Contribution) and record.author == actor.me:
            keys = [("contribution", record.base)]
            keys += [("vote", str(record.round_index))] * record.vote
        elif isinstance(record, Commit) and record.proposer == actor.me:
            keys = [("commit", record.parent)]
        if not signed.isdisjoint(keys):
            raise BrokenRule(f"I1: {actor.me} signed twice: {keys}")
        signed.update(keys)


def verify_lock(actor: Actor) -> None:
    """Rule 21, looked at from outside: no vote leaves the highest certified commit voted above.

    But for a chain that is certified higher, or where a reset lies between.
    """
    facts = actor.machine.known.facts
    votes = [
        facts[record.base]
        for record in actor.disk.values()
        if isinstance(record, Contribution) and record.author == actor.me and record.vote
    ]
    votes.sort(key=lambda base: base.height)
    for before, after in itertools.combinations(votes, 2):
        lock = before.certified_id
        if is_ancestor(facts, lock, after.commit_id):
            continue
        ancestor = facts[common_ancestor(facts, lock, after.commit_id)]
        is_reset_between = facts[lock].resets > ancestor.resets
        if after.certified_height <= before.certified_height and not is_reset_between:
            raise BrokenRule(f"lock: {actor.me} has voted on two branches at {after.height}")


def verify_tip(actor: Actor) -> None:
    """I5: the tip is usable, and the path that is kept is the choice of rule 17."""
    known, tip = actor.machine.known, actor.machine.tip
    if tip is None or tip not in known.usable or tip not in known.states:
        raise BrokenRule(f"I5: {actor.me} stands on {tip}")
    start = known.facts[tip].final_id if not known.facts[tip].resets else known.rules.genesis_id
    if known.usable_choice.best(start) != choose_tip(known.usable_choice.tree, start):
        raise BrokenRule(f"I5: {actor.me} kept a path that is not the choice")


def verify_finals(facts: Mapping[str, ChainFacts], commits: Collection[ChainFacts]) -> None:
    """I2 over every chain in `commits`, and its lemma: one certified commit a height."""
    finals = sorted({each.final_id for each in commits})
    for one, other in itertools.combinations(finals, 2):
        if is_conflict(facts, one, other):
            raise BrokenRule(f"I2: {one[:8]} and {other[:8]} are both final")
    certified = sorted({each.certified_id for each in commits})
    for one, other in itertools.combinations(certified, 2):
        if facts[one].height == facts[other].height and is_conflict(facts, one, other):
            raise BrokenRule(f"I2's lemma: {one[:8]} and {other[:8]} at one height are certified")


def is_conflict(facts: Mapping[str, ChainFacts], one: str, other: str) -> bool:
    """Return whether two commits lie on no one chain, with no reset above their fork."""
    ancestor = common_ancestor(facts, one, other)
    resets = facts[ancestor].resets
    is_reset_between = facts[one].resets != resets or facts[other].resets != resets
    return ancestor not in (one, other) and not is_reset_between
