"""Every order of events among a few real machines, as far as the bounds say.

The state is what each member's machine holds (`Actor.fingerprint`); a step is one record heard, one
tick (all that is waited for becomes due), one answer of the trainer or aggregator, or a crash. What
is published may be heard by each other member at any later step or never: so messages are delayed,
reordered and lost without limit, and nobody need ever propose or contribute.

Reductions, all of them exact:

- *Local states are hashed.* A machine's step depends on nothing but its own state, so each is taken
  once for each local state, whatever the others do.
- *Steps that publish nothing are invisible to the others* and never disable anything elsewhere:
  what was published stays published. So each member's invisible steps are put off to just before
  its next visible one (Mazurkiewicz traces), and only states right after visible steps are kept.
- *What a record refers to is heard with it*, for a machine keeps a commit waiting until it is all
  there. `Bounds.is_hearing_whole` turns that off.

There is no symmetry to use: ranks are drawn by a hash over the name, so members are not alike.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.simulation.actor import Actor
from tests.simulation.bounds import Bounds, Outcome
from tests.simulation.invariants import verify_finals, verify_member
from volunteer.lab.simulation.errors import BrokenRule
from volunteer.rounds.chain import ChainFacts, ChainRules
from volunteer.rounds.records import Commit, Contribution, Record, genesis_id

RUN_ID = "e0" * 32
HEARINGS_A_TICK = 12
CRASHES_A_STEP = 0.02
"""How steps are drawn where one way is gone at random."""
Label = tuple[str, str]
"""(hear, record id), (tick, ""), (answer, number), (crash, "" or "kept")."""


@dataclass(slots=True, frozen=True)
class VisibleStep:
    """What a member may do next that others can hear of, with all it does silently before."""

    local: int
    num_crashes: int
    text: str


@dataclass(slots=True)
class Explorer:
    """A depth-first search with everything that it has met."""

    bounds: Bounds
    expiry_rounds: int = 8
    rules: ChainRules = field(init=False)
    outcome: Outcome = field(default_factory=Outcome)
    records: list[tuple[str, Record]] = field(default_factory=list)
    """Each has the bit of its place here."""
    facts: dict[str, ChainFacts] = field(default_factory=dict)
    actors: list[Actor] = field(default_factory=list)
    """Local states; never stepped, only their clones are."""
    _disks: list[int] = field(default_factory=list)
    _bit_of: dict[str, int] = field(default_factory=dict)
    _needs: list[int] = field(default_factory=list)
    """For each record, the bits of all that it refers to, itself included."""
    _numbers: dict[tuple[object, ...], int] = field(default_factory=dict)
    _stepped: dict[tuple[int, Label], int] = field(default_factory=dict)
    _next: dict[tuple[int, int, int], tuple[VisibleStep, ...]] = field(default_factory=dict)
    _work_on: dict[str, frozenset[str]] = field(default_factory=dict)
    _checked_sets: set[int] = field(default_factory=set)
    _came_from: dict[tuple[int, ...], tuple[tuple[int, ...], str]] = field(default_factory=dict)
    _limit: int = 0
    _start_mask: int = 0

    def __post_init__(self) -> None:
        """Make the rules; everybody starts on the genesis."""
        names = self._names()
        self.rules = ChainRules(
            run_id=RUN_ID,
            module_id="dense",
            genesis_id=genesis_id(RUN_ID, "dense"),
            publisher=names[0],
            expiry_rounds=self.expiry_rounds,
            demote_rounds=8,
            max_contributions=32,
            quorum_numerator=1,
            quorum_denominator=2,
        )

    def _names(self) -> list[str]:
        return [f"m{i}" for i in range(self.bounds.num_members)]

    # ------------------------------------------------------------------------------ search

    def run(self) -> Outcome:
        """Search until all is seen, a rule is broken, or a bound on effort is met."""
        began = time.process_time()
        state: tuple[int, ...] = ()
        try:
            state = (*self._settle(), self.bounds.num_crashes)
            stack, seen = [state], {state}
            while stack:
                state = stack.pop()
                self.outcome.num_states = len(seen)
                self._look_at(state)
                for following, text in self._following(state):
                    if following not in seen:
                        seen.add(following)
                        self._came_from[following] = (state, text)
                        stack.append(following)
                is_too_long = time.process_time() - began > self.bounds.most_seconds
                if len(seen) > self.bounds.most_states or is_too_long:
                    break
            self.outcome.is_complete = not stack
        except BrokenRule as broken:
            self.outcome.broken = str(broken)
            self.outcome.trace = tuple(self._trace(state)) or ("while all hear all",)
        self.outcome.num_local_states = len(self.actors)
        self.outcome.num_local_steps = len(self._stepped)
        self.outcome.num_published_sets = len(self._checked_sets)
        self.outcome.seconds = time.process_time() - began
        return self.outcome

    def wander(self, seed: int, num_steps: int) -> Outcome:
        """Go one long way at random: as deep as no search of all ways can."""
        rng = random.Random(seed)
        *locals_, crashes_left = *self._settle(), self.bounds.num_crashes
        try:
            for _ in range(num_steps):
                place = rng.randrange(len(locals_))
                published = self._published(tuple(locals_))
                labels = list(self._labels(locals_[place], published, crashes_left))
                kind = rng.choice(("hear",) * HEARINGS_A_TICK + ("tick", "answer"))
                if crashes_left and rng.random() < CRASHES_A_STEP:
                    kind = "crash"
                of_kind = [label for label in labels if label[0] == kind]
                if not of_kind:
                    continue
                label = rng.choice(of_kind)
                locals_[place] = self._step(locals_[place], label)
                crashes_left -= kind == "crash"
                self._look_at((*locals_, crashes_left))
        except BrokenRule as broken:
            self.outcome.broken = str(broken)
        self.outcome.num_local_states = len(self.actors)
        return self.outcome

    def _settle(self) -> tuple[int, ...]:
        """Bring everybody into both rosters, onto one tip to which nobody has contributed yet."""
        actors = [Actor.begin(self.rules, name) for name in self._names()]
        pool: dict[str, Record] = {}
        for actor in itertools.cycle(actors):
            todo = actor.tick()
            while todo:
                pool |= {i: next(a.disk[i] for a in actors if i in a.disk) for i in todo}
                todo = [
                    published
                    for other, (record_id, record) in itertools.product(actors, list(pool.items()))
                    for published in other.hear(record_id, record)
                ]
            if _is_settled(actors, pool):
                break
        self._limit = actors[0].tip.height + self.bounds.num_rounds
        for actor in actors:
            actor.are_answers_slow = self.bounds.are_answers_slow
        locals_ = tuple(self._number(actor) for actor in actors)
        self._start_mask = self._published(locals_)
        return locals_

    def _published(self, locals_: tuple[int, ...]) -> int:
        mask = 0
        for local in locals_:
            mask |= self._disks[local]
        return mask

    def _following(self, state: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
        *locals_, crashes_left = state
        published = self._published(tuple(locals_))
        new = published & ~self._start_mask
        if new.bit_count() >= self.bounds.most_visible_steps:
            return
        for place, local in enumerate(locals_):
            for step in self._visible_steps(local, published & ~self._disks[local], crashes_left):
                following = list(state)
                following[place] = step.local
                following[-1] -= step.num_crashes
                if self._num_commits(self._disks[step.local] | new) <= self.bounds.most_commits:
                    yield tuple(following), step.text

    def _num_commits(self, mask: int) -> int:
        mask &= ~self._start_mask
        return sum(isinstance(self.records[bit][1], Commit) for bit in _bits(mask))

    def _visible_steps(
        self, local: int, audible: int, crashes_left: int
    ) -> tuple[VisibleStep, ...]:
        """Return every state right after the member's next visible step."""
        key = (local, audible, crashes_left)
        if key not in self._next:
            self._next[key] = tuple(self._walk(local, audible, crashes_left))
        return self._next[key]

    def _walk(self, local: int, audible: int, crashes_left: int) -> Iterator[VisibleStep]:
        begin = (local, 0)
        stack, seen = [begin], {begin}
        audible |= self._disks[local]
        while stack:
            here, crashes = stack.pop()
            for label in self._labels(here, audible, crashes_left - crashes):
                there = self._step(here, label)
                num_crashes = crashes + (label[0] == "crash")
                following = (there, num_crashes)
                if following in seen:
                    continue
                seen.add(following)
                new = self._disks[there] & ~audible
                if new:
                    text = " ".join(self._name(bit) for bit in _bits(new))
                    yield VisibleStep(there, num_crashes, text)
                else:
                    stack.append(following)

    # -------------------------------------------------------------------------- local steps

    def _labels(self, local: int, audible: int, crashes_left: int) -> Iterator[Label]:
        actor = self.actors[local]
        if actor.tip.height < self._limit:
            yield ("tick", "")
        for bit in _bits(audible & ~self._disks[local]):
            yield ("hear", self.records[bit][0])
        for number in range(len(actor.open_requests)):
            yield ("answer", str(number))
        if crashes_left:
            yield ("crash", "")
            if self.bounds.are_answers_slow:
                yield ("crash", "kept")

    def _step(self, local: int, label: Label) -> int:
        key = (local, label)
        if key not in self._stepped:
            actor = self.actors[local].clone()
            self._take(actor, label, local)
            self._stepped[key] = self._number(actor)
        return self._stepped[key]

    def _take(self, actor: Actor, label: Label, local: int) -> None:
        match label:
            case ("tick", _):
                actor.tick()
            case ("hear", record_id):
                for bit in _bits(self._heard_with(local, self._bit_of[record_id])):
                    actor.hear(*self.records[bit])
            case ("answer", number):
                actor.answer(int(number))
            case (_, kept):
                actor.crash(is_encoding_kept=bool(kept))

    def _heard_with(self, local: int, bit: int) -> int:
        """Return what is heard together with a record; lower bits refer to nothing higher."""
        if self.bounds.is_hearing_whole:
            return self._needs[bit] & ~self._disks[local]
        return 1 << bit

    def _number(self, actor: Actor) -> int:
        """Return the number of a local state, looking at it if it is new."""
        for record_id, record in actor.disk.items():
            if record_id not in self._bit_of:
                self._register(record_id, record)
        fingerprint = (actor.me, *actor.fingerprint())
        if fingerprint not in self._numbers:
            self._numbers[fingerprint] = len(self.actors)
            self.actors.append(actor)
            self._disks.append(sum(1 << self._bit_of[i] for i in actor.disk))
            self._check_local(actor)
        elif self.bounds.is_checking_merges:
            self._check_merge(self._numbers[fingerprint], actor)
        return self._numbers[fingerprint]

    def _check_merge(self, local: int, actor: Actor) -> None:
        """Two states that are held to be one take every step in the same way."""
        steps: list[Label] = [("tick", ""), ("crash", "")]
        steps += [("hear", self.records[b][0]) for b in self._missing_bits(local)]
        for label in steps:
            one, other = self.actors[local].clone(), actor.clone()
            for each in (one, other):
                self._take(each, label, local)
            if one.fingerprint() != other.fingerprint() or one.published != other.published:
                raise BrokenRule(f"the search: states that differ are held to be one, {label}")

    def _missing_bits(self, local: int) -> Iterator[int]:
        return _bits(((1 << len(self.records)) - 1) & ~self._disks[local])

    def _register(self, record_id: str, record: Record) -> None:
        bit = len(self.records)
        self._bit_of[record_id] = bit
        self.records.append((record_id, record))
        refers = [record.parent, *record.contributions] if isinstance(record, Commit) else []
        if isinstance(record, Contribution):
            refers = [record.base]
        needs = 1 << bit
        for other in refers:
            if other in self._bit_of:
                needs |= self._needs[self._bit_of[other]]
        self._needs.append(needs)

    def _name(self, bit: int) -> str:
        record_id, record = self.records[bit]
        if isinstance(record, Commit):
            listed = " ".join(f"#{self._bit_of[i]}" for i in record.contributions)
            parent = self._bit_of.get(record.parent, -1)
            return f"#{bit} {record.proposer} commits [{listed}] on #{parent};"
        if isinstance(record, Contribution):
            vote = "votes for" if record.vote else "contributes to"
            return f"#{bit} {record.author} {vote} #{self._bit_of.get(record.base, -1)};"
        return f"#{bit} {record_id[:8]};"

    # --------------------------------------------------------------------------- invariants

    def _check_local(self, actor: Actor) -> None:
        """I1, I3, I5, I7 and the lock hold for one member's state."""
        verify_member(actor)
        for commit_id, facts in actor.machine.known.facts.items():
            if self.facts.setdefault(commit_id, facts) != facts:
                raise BrokenRule(f"I7: two members differ in the facts at {commit_id[:8]}")
            if commit_id not in self._work_on:
                self._work_on[commit_id] = self._work(actor, facts)

    def _work(self, actor: Actor, facts: ChainFacts) -> frozenset[str]:
        """I3: return all contributions on the chain, and what they carry; none of it twice."""
        work = self._work_on.get(facts.parent_id, frozenset())
        for contribution_id in sorted(facts.listed):
            contribution = actor.machine.known.contributions[contribution_id]
            listed = frozenset((contribution_id, *contribution.carries))
            if work & listed:
                raise BrokenRule(f"I3: work twice on the chain of {facts.commit_id[:8]}")
            work |= listed
        return work

    def _look_at(self, state: tuple[int, ...]) -> None:
        published = self._published(state[:-1])
        num_new = (published & ~self._start_mask).bit_count()
        self.outcome.most_visible_steps = max(self.outcome.most_visible_steps, num_new)
        if published in self._checked_sets:
            return
        self._checked_sets.add(published)
        self._check_finals(published)

    def _check_finals(self, published: int) -> None:
        """I2, over every chain that anybody knows, and that one commit a height is certified."""
        records = [self.records[bit] for bit in _bits(published)]
        commits = [self.facts[i] for i, r in records if isinstance(r, Commit)]
        parents = [facts.parent_id for facts in commits]
        self.outcome.num_forked += len(set(parents)) < len(parents)
        highest = max(facts.final_height for facts in commits)
        above = highest - (self._limit - self.bounds.num_rounds)
        self.outcome.highest_final = max(self.outcome.highest_final, above)
        verify_finals(self.facts, commits)

    def _trace(self, state: tuple[int, ...]) -> list[str]:
        texts = []
        while state in self._came_from:
            state, text = self._came_from[state]
            texts.append(text)
        return texts[::-1]


def _is_settled(actors: list[Actor], pool: dict[str, Record]) -> bool:
    tip = actors[0].tip
    is_untouched = all(
        record.base != tip.commit_id for record in pool.values() if isinstance(record, Contribution)
    )
    is_everyone_in = all(len(roster) == len(actors) for roster in tip.rosters)
    are_together = all(actor.tip == tip for actor in actors)
    return is_untouched and is_everyone_in and are_together


def _bits(mask: int) -> Iterator[int]:
    """Yield the places of the ones, the lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
