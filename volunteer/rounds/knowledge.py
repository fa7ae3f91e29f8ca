"""What a member knows of a run's module: records, which commits are valid, which are usable.

Runs in: agent, simulation. A container with invariants; where to stand is asked of `fork_choice`.

A commit is *valid* once its chain and all records that it lists are known and fit (chain.py). It is
*usable* if its parent is and every blob that it lists is held and valid, or if its own state has
been verified (ROUNDS.md rule 15). It is *refused* once its hash or a blob proved wrong; nothing
below it is used.

Everything is looked at when what it waits for arrives, so that one more record costs the same on
a chain of ten thousand heights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field

from volunteer.rounds.bounds import Bounds
from volunteer.rounds.chain import (
    ChainFacts,
    ChainRules,
    active_at,
    commit_problem,
    genesis_facts,
    next_facts,
)
from volunteer.rounds.fork_choice import Tree
from volunteer.rounds.records import Close, Commit, Contribution, Leaving, Record
from volunteer.rounds.tip_choice import TipChoice
from volunteer.rounds.waiting import Waiting


@dataclass(slots=True)
class Knowledge:
    """Everything that has arrived and that there is room for (bounds.py), indexed."""

    rules: ChainRules
    me: str = ""
    """Whose knowledge this is: own records are never turned away; empty: nobody's."""
    salt: str = ""
    """What nobody else knows: it draws the seats of newcomers (loose_records.py)."""
    pins: Callable[[], Iterable[str]] = tuple
    """Says which commits the member's own state refers to: they are kept."""
    holds_back: Callable[[Commit], bool] | None = None
    """Says of a commit that has just become valid whether it is too early to stand on."""
    judged: MutableMapping[str, ChainFacts] | None = None
    """Facts that others found: they say the same of a chain (I7), so simulated members share."""
    commits: dict[str, Commit] = field(default_factory=dict)
    contributions: dict[str, Contribution] = field(default_factory=dict)
    leavings: dict[str, Leaving] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    """Bases whose round somebody has closed."""
    facts: dict[str, ChainFacts] = field(default_factory=dict)
    """Of every valid commit, the genesis included."""
    children: dict[str, list[str]] = field(default_factory=dict)
    supporters: dict[str, set[str]] = field(default_factory=dict)
    based_on: dict[str, set[str]] = field(default_factory=dict)
    """Base -> ids of contributions made on it."""
    changes_on: dict[str, int] = field(default_factory=dict)
    """Base -> a number that is another one whenever `based_on` has changed there."""
    listed_by: dict[str, set[str]] = field(default_factory=dict)
    """Contribution or farewell -> valid commits that list it."""
    waiting_for: Waiting = field(default_factory=Waiting)
    """Commits whose parent or listed records are missing."""
    invalid: dict[str, str] = field(default_factory=dict)
    """Commits that break a rule of the chain, with the sentence."""
    refused: dict[str, str] = field(default_factory=dict)
    """Commits with a wrong hash or blob, with the sentence."""
    held: set[str] = field(default_factory=set)
    """Contributions whose blob is here and is what the record says."""
    bad: dict[str, str] = field(default_factory=dict)
    """Contributions whose blob is not what the record says, with the sentence."""
    highest_height: int = 0
    """Of all valid commits, on whatever branch."""
    usable: set[str] = field(default_factory=set)
    verified: set[str] = field(default_factory=set)
    """Commits whose state has been computed, or fetched and hashed, here."""
    states: set[str] = field(default_factory=set)
    """Commits whose state file is on disk."""
    withheld: dict[str, float] = field(default_factory=dict)
    """Commits that nobody seems to have the files of -> when to pursue them again, own clock."""
    early: set[str] = field(default_factory=set)
    """Valid commits that are not to be stood on yet (outsiders.py)."""
    _num_changes: int = 0
    _unusable: set[str] = field(default_factory=set)
    """Valid, and neither usable nor refused yet."""
    usable_choice: TipChoice = field(init=False)
    header_choice: TipChoice = field(init=False)
    bounds: Bounds = field(init=False)

    def __post_init__(self) -> None:
        """Begin with the genesis, on which everyone stands."""
        genesis = self.rules.genesis_id
        self.facts[genesis] = genesis_facts(self.rules)
        self.usable.add(genesis)
        self.usable_choice = TipChoice(self._tree(self.usable.__contains__), genesis)
        self.header_choice = TipChoice(self._tree(self._may_be_had), genesis)
        self.bounds = Bounds(self)

    # ------------------------------------------------------------------------------ arriving

    def add(self, record_id: str, record: Record) -> bool:
        """Keep `record`; return whether it was new and belongs to this module."""
        rules = self.rules
        if record.run_id != rules.run_id or record.module_id != rules.module_id:
            return False
        if isinstance(record, Close):
            return self._add_close(record)
        if self.has_record(record_id):
            return False
        problem = self.bounds.problem(record_id, record)
        if problem:
            self.bounds.turn_away(record_id, problem)
            return False
        if isinstance(record, Commit):
            self._add_commit(record_id, record)
        else:
            self._add_other(record_id, record)
            if self.waiting_for.commits:
                self._judge_all(self.waiting_for.arrived(record_id))
        self.bounds.shed()
        return self.has_record(record_id)

    def _add_other(self, record_id: str, record: Contribution | Leaving) -> None:
        if isinstance(record, Contribution):
            self.contributions[record_id] = record
            self.based_on.setdefault(record.base, set()).add(record_id)
            self.note_change_on(record.base)
            self._note_supporter(record.base, record.author)
        else:
            self.leavings[record_id] = record
        self.bounds.take_in(record_id, record)

    def note_change_on(self, base: str) -> None:
        """A contribution on `base` has come, or was forgotten."""
        self._num_changes += 1
        self.changes_on[base] = self._num_changes

    def _add_close(self, close: Close) -> bool:
        """Keep the hint if a member gives it; one for a base not here yet may be forgotten."""
        facts = self.facts.get(close.base)
        if facts is None or close.base in self.closed:
            return False
        members = active_at(self.rules, facts)
        if members and close.author not in members:
            return False
        self.closed.add(close.base)
        return True

    def has_record(self, record_id: str) -> bool:
        """Return whether this record is here, valid or not."""
        return (
            record_id in self.contributions
            or record_id in self.commits
            or record_id in self.waiting_for.commits
            or record_id in self.leavings
            or record_id in self.invalid
        )

    def _note_supporter(self, base: str, author: str) -> None:
        supporters = self.supporters.setdefault(base, set())
        if author not in supporters:
            supporters.add(author)
            self.usable_choice.note_support(base, author)
            self.header_choice.note_support(base, author)

    def _add_commit(self, commit_id: str, commit: Commit) -> None:
        if commit.proposer == self.me:
            self.bounds.pin(commit_id)
        lacks = self.lacks_of(commit)
        if lacks and commit.parent not in self.invalid:
            self._put_aside(commit_id, commit, lacks)
            return
        for record_id in (*commit.contributions, *commit.leaving):
            self.bounds.loose.leave(record_id)  # it is kept for this commit from now on
        self._judge_all(self._judge(commit_id, commit))

    def _put_aside(self, commit_id: str, commit: Commit, lacks: list[str]) -> None:
        has_turn = self.bounds.has_turn(commit)
        for record_id in (*commit.contributions, *commit.leaving):
            self.bounds.loose.leave(record_id)  # it is kept for this commit from now on
        self.waiting_for.put(commit_id, commit, lacks, has_turn=has_turn)

    def _judge_all(self, commit_ids: list[str]) -> None:
        """Make those commits, and what waits for them, valid or invalid whose records are here."""
        stack = commit_ids
        while stack:
            commit_id = stack.pop()
            commit = self.waiting_for.remove(commit_id)
            lacks = self.lacks_of(commit)
            if lacks and commit.parent not in self.invalid:
                self._put_aside(commit_id, commit, lacks)  # it lists as contribution what is none
                continue
            stack += self._judge(commit_id, commit)

    def lacks_of(self, commit: Commit) -> list[str]:
        """Return what has to be here before a commit can be judged."""
        missing = [i for i in commit.contributions if i not in self.contributions]
        missing += [i for i in commit.leaving if i not in self.leavings]
        return missing + [commit.parent] * (commit.parent not in self.facts)

    def _judge(self, commit_id: str, commit: Commit) -> list[str]:
        """Make a commit valid or invalid; return those that waited for nothing but that."""
        children = self.waiting_for.children_of(commit_id)
        facts = None if self.judged is None else self.judged.get(commit_id)
        if facts is None:
            problem = "its parent is invalid"
            records = (self.contributions, self.leavings)
            if commit.parent not in self.invalid:
                problem = commit_problem(self.rules, self.facts[commit.parent], commit, *records)
            if problem:
                self.invalid[commit_id] = problem
                self.bounds.note_invalid(commit_id, commit)
                return children
            facts = next_facts(self.rules, self.facts, commit_id, commit, *records)
            if self.judged is not None:
                self.judged[commit_id] = facts
        self._take_in_valid(commit_id, commit, facts)
        return self.waiting_for.arrived(commit_id)

    def _take_in_valid(self, commit_id: str, commit: Commit, facts: ChainFacts) -> None:
        self.commits[commit_id] = commit
        self.highest_height = max(self.highest_height, commit.round_index)
        self.facts[commit_id] = facts
        self.children.setdefault(commit.parent, []).append(commit_id)
        for record_id in (*commit.contributions, *commit.leaving):
            self.listed_by.setdefault(record_id, set()).add(commit_id)
            self.bounds.loose.leave(record_id)
        self.bounds.settle_again(self.bounds.loose.on(commit_id))
        if commit.parent in self.refused:
            self.refused[commit_id] = "its parent is refused"
            return
        self._unusable.add(commit_id)
        if self.holds_back is not None and self.holds_back(commit):
            self.early.add(commit_id)
            return
        self.header_choice.note_added(commit_id)
        self._use_what_is_complete([commit_id])

    def let_in(self, commit_id: str) -> None:
        """A commit that was held back counts from now on."""
        self.early.discard(commit_id)
        self.header_choice.note_removed()
        self._use_what_is_complete([commit_id])

    def missing_records(self) -> list[str]:
        """Return the ids that the first waiting commits need and that are not here."""
        return self.waiting_for.missing_ids()

    @property
    def waiting(self) -> dict[str, Commit]:
        """Commits whose parent or listed records are missing."""
        return self.waiting_for.commits

    # --------------------------------------------------------------------- blobs and states

    def hold(self, contribution_id: str) -> bool:
        """A contribution's blob is here, and right; return whether a valid commit lists it."""
        if contribution_id not in self.contributions or contribution_id in self.held:
            return False
        self.held.add(contribution_id)
        listing = self.listed_by.get(contribution_id)
        if listing:
            self._use_what_is_complete(sorted(listing))
        return bool(listing)

    def refuse_contribution(self, contribution_id: str, reason: str) -> None:
        """A blob is not what its record says: no commit that lists that record is valid."""
        self.bad[contribution_id] = reason
        for commit_id in sorted(self.listed_by.get(contribution_id, ())):
            if commit_id in self._unusable:
                self.refuse(commit_id, f"it lists a bad contribution: {reason}")

    def refuse(self, commit_id: str, reason: str) -> None:
        """Nobody may stand on `commit_id` or below it."""
        stack = [(commit_id, reason)]
        while stack:
            refused_id, why = stack.pop()
            self.refused.setdefault(refused_id, why)
            self.usable.discard(refused_id)
            self._unusable.discard(refused_id)
            self.early.discard(refused_id)
            children = self.children.get(refused_id, ())
            stack.extend((child, "its parent is refused") for child in children)
        self.usable_choice.note_removed()
        self.header_choice.note_removed()

    def hold_state(self, commit_id: str) -> None:
        """The state after a valid commit is here and has the right hash."""
        if commit_id not in self.facts or commit_id in self.refused:
            return
        self.verified.add(commit_id)
        self.states.add(commit_id)
        # What a verified state descends from was valid: stand on it without its old blobs.
        newly_usable = []
        for node in self.chain_down(commit_id):
            if node in self.usable:
                break
            newly_usable.append(node)
        for node in reversed(newly_usable):
            self._use(node)
        for node in newly_usable:
            self._use_what_is_complete(list(self.children.get(node, ())))

    def drop_unusable(self, commit_id: str) -> None:
        """A commit that could not be used yet is being forgotten."""
        self._unusable.discard(commit_id)
        self.early.discard(commit_id)

    def _use(self, commit_id: str) -> None:
        self.usable.add(commit_id)
        self._unusable.discard(commit_id)
        if commit_id in self.early:  # its state has been verified: nothing holds it back
            self.early.discard(commit_id)
            self.header_choice.note_removed()
        self.usable_choice.note_added(commit_id)

    def _use_what_is_complete(self, commit_ids: list[str]) -> None:
        """Find which of these commits, and of those below them, have become usable or refused."""
        stack = commit_ids
        while stack:
            commit_id = stack.pop()
            if commit_id not in self._unusable or commit_id in self.early:
                continue
            commit = self.commits[commit_id]
            bad = next((i for i in commit.contributions if i in self.bad), None)
            if bad is not None:
                self.refuse(commit_id, f"it lists a bad contribution: {self.bad[bad]}")
            elif commit.parent in self.usable and self.held.issuperset(commit.contributions):
                self._use(commit_id)
                stack.extend(self.children.get(commit_id, ()))

    def next_to_use(self) -> list[str]:
        """Return the commits that only blobs are lacking for, the lowest first, none withheld."""
        waiting = self._unusable - self.early
        ready = [c for c in waiting if self.commits[c].parent in self.usable]
        lacking = [c for c in ready if c not in self.withheld]
        return sorted(lacking, key=lambda c: (self.facts[c].height, c))

    def withhold(self, commit_id: str, until_s: float) -> None:
        """Look for a branch that can be had until then; nothing is refused by that."""
        self.withheld[commit_id] = until_s
        self.header_choice.note_removed()

    def pursue_again(self, now_s: float) -> None:
        """End what `withhold` began where its time is over, or where the commit has come."""
        over = [c for c, until_s in self.withheld.items() if now_s >= until_s or c in self.usable]
        for commit_id in over:
            del self.withheld[commit_id]
            self.header_choice.note_removed()

    # ----------------------------------------------------------------------------- looking

    @property
    def headers(self) -> Tree:
        """All valid commits that are not refused, whether or not their blobs are here."""
        return self._tree(lambda commit_id: commit_id not in self.refused)

    def _may_be_had(self, commit_id: str) -> bool:
        return (
            commit_id not in self.early
            and commit_id not in self.refused
            and commit_id not in self.withheld
        )

    def leads_to(self, commit_id: str | None) -> bool:
        """Return whether both choices were this commit, and nothing has been noted since."""
        return self.usable_choice.leads_to(commit_id) and self.header_choice.leads_to(commit_id)

    def _tree(self, may_stand_on: Callable[[str], bool]) -> Tree:
        return Tree(
            facts=self.facts,
            children=self.children,
            supporters=self.supporters,
            may_stand_on=may_stand_on,
        )

    def state_hash_of(self, commit_id: str) -> str:
        """Return the state hash that `commit_id` states; empty for the genesis."""
        commit = self.commits.get(commit_id)
        return commit.state_hash if commit is not None else ""

    def chain_down(self, commit_id: str) -> Iterator[str]:
        """Yield `commit_id` and its ancestors, the genesis last."""
        node = commit_id
        while True:
            yield node
            if node == self.rules.genesis_id:
                return
            node = self.facts[node].parent_id

    def record(self, record_id: str) -> Record | None:
        """Return a kept record by id."""
        return (
            self.contributions.get(record_id)
            or self.commits.get(record_id)
            or self.waiting.get(record_id)
            or self.leavings.get(record_id)
        )
