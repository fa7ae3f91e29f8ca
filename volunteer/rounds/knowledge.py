"""What a member knows of a run's module: records, which commits are valid, which are usable.

Runs in: agent, simulation. Pure: a container with invariants and no decisions.

A commit is *valid* once its chain and all records that it lists are known and fit (chain.py). It is
*usable* if its parent is and every blob that it lists is held and valid, or if its own state has
been verified (ROUNDS.md rule 15). It is *refused* once its hash or a blob proved wrong; nothing
below it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from volunteer.rounds.chain import (
    ChainFacts,
    ChainRules,
    commit_problem,
    genesis_facts,
    next_facts,
)
from volunteer.rounds.fork_choice import Tree
from volunteer.rounds.records import Close, Commit, Contribution, Leaving, Record

MAX_WAITING_COMMITS = 4096
"""Commits kept while their parent or a listed record is missing; more are asked for again."""


@dataclass(slots=True)
class Knowledge:
    """Everything that has arrived, indexed."""

    rules: ChainRules
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
    listed_by: dict[str, set[str]] = field(default_factory=dict)
    """Contribution -> valid commits that list it."""
    waiting: dict[str, Commit] = field(default_factory=dict)
    """Commits whose parent or listed records are missing."""
    invalid: dict[str, str] = field(default_factory=dict)
    """Commits that break a rule of the chain, with the sentence."""
    refused: dict[str, str] = field(default_factory=dict)
    """Commits with a wrong hash or blob, with the sentence."""
    blobs: set[str] = field(default_factory=set)
    bad_blobs: dict[str, str] = field(default_factory=dict)
    usable: set[str] = field(default_factory=set)
    verified: set[str] = field(default_factory=set)
    """Commits whose state has been computed, or fetched and hashed, here."""
    states: set[str] = field(default_factory=set)
    """Commits whose state file is on disk."""
    _unusable: set[str] = field(default_factory=set)
    """Valid, and neither usable nor refused yet."""

    def __post_init__(self) -> None:
        """Begin with the genesis, on which everyone stands."""
        genesis = self.rules.genesis_id
        self.facts[genesis] = genesis_facts(self.rules)
        self.usable.add(genesis)

    # ------------------------------------------------------------------------------ arriving

    def add(self, record_id: str, record: Record) -> bool:
        """Keep `record`; return whether it was new and belongs to this module."""
        if (record.run_id, record.module_id) != (self.rules.run_id, self.rules.module_id):
            return False
        if isinstance(record, Close):
            is_new = record.base not in self.closed
            self.closed.add(record.base)
            return is_new
        if self.has_record(record_id):
            return False
        if isinstance(record, Contribution):
            self.contributions[record_id] = record
            self.supporters.setdefault(record.base, set()).add(record.author)
            self.based_on.setdefault(record.base, set()).add(record_id)
        elif isinstance(record, Leaving):
            self.leavings[record_id] = record
        elif len(self.waiting) < MAX_WAITING_COMMITS:
            self.waiting[record_id] = record
        else:
            return False
        self._connect()
        return True

    def has_record(self, record_id: str) -> bool:
        """Return whether this record is here, valid or not."""
        return (
            record_id in self.contributions
            or record_id in self.commits
            or record_id in self.waiting
            or record_id in self.leavings
            or record_id in self.invalid
        )

    def _connect(self) -> None:
        """Make every waiting commit valid or invalid whose records are all here."""
        is_progress = True
        while is_progress:
            is_progress = False
            for commit_id, commit in list(self.waiting.items()):
                if commit.parent in self.invalid:
                    self.invalid[commit_id] = "its parent is invalid"
                elif commit.parent not in self.facts or self._missing(commit):
                    continue
                else:
                    self._judge(commit_id, commit)
                del self.waiting[commit_id]
                is_progress = True

    def _judge(self, commit_id: str, commit: Commit) -> None:
        parent = self.facts[commit.parent]
        problem = commit_problem(self.rules, parent, commit, self.contributions, self.leavings)
        if problem:
            self.invalid[commit_id] = problem
            return
        self.commits[commit_id] = commit
        self.facts[commit_id] = next_facts(
            self.rules, self.facts, commit_id, commit, self.contributions, self.leavings
        )
        self.children.setdefault(commit.parent, []).append(commit_id)
        for contribution_id in commit.contributions:
            self.listed_by.setdefault(contribution_id, set()).add(commit_id)
        self._unusable.add(commit_id)

    def _missing(self, commit: Commit) -> list[str]:
        missing = [i for i in commit.contributions if i not in self.contributions]
        return missing + [i for i in commit.leaving if i not in self.leavings]

    def missing_records(self) -> list[str]:
        """Return the ids that waiting commits need and that are not here."""
        missing = set()
        for commit in self.waiting.values():
            missing.update(self._missing(commit))
            if commit.parent not in self.facts and commit.parent not in self.waiting:
                missing.add(commit.parent)
        return sorted(missing)

    # --------------------------------------------------------------------- blobs and states

    def refuse(self, commit_id: str, reason: str) -> None:
        """Nobody may stand on `commit_id` or below it."""
        self.refused[commit_id] = reason
        self.usable.discard(commit_id)
        self._unusable.discard(commit_id)

    def hold_state(self, commit_id: str) -> None:
        """The state after a valid commit is here and has the right hash."""
        if commit_id not in self.facts:
            return
        self.verified.add(commit_id)
        self.states.add(commit_id)
        node = commit_id
        # What a verified state descends from was valid: stand on it without its old blobs.
        while node not in self.usable:
            self.usable.add(node)
            self._unusable.discard(node)
            node = self.facts[node].parent_id

    def refresh_usable(self) -> None:
        """Find the commits that have become usable, or refused for a bad blob."""
        is_progress = True
        while is_progress:
            is_progress = False
            for commit_id in sorted(self._unusable, key=lambda c: self.facts[c].height):
                commit = self.commits[commit_id]
                blobs = [self.contributions[i].blob_id for i in commit.contributions]
                bad = next((b for b in blobs if b in self.bad_blobs), None)
                if bad is not None:
                    self.refuse(commit_id, f"it lists a bad blob: {self.bad_blobs[bad]}")
                    is_progress = True
                elif commit.parent in self.usable and all(b in self.blobs for b in blobs):
                    self.usable.add(commit_id)
                    self._unusable.discard(commit_id)
                    is_progress = True

    # ----------------------------------------------------------------------------- looking

    def usable_tree(self) -> Tree:
        """Return the commits that may be stood on now."""
        return self._tree(self.usable)

    def header_tree(self) -> Tree:
        """Return all valid commits that are not refused, whether or not their blobs are here."""
        return self._tree(None)

    def _tree(self, among: set[str] | None) -> Tree:
        def may_stand_on(commit_id: str) -> bool:
            return commit_id not in self.refused and (among is None or commit_id in among)

        return Tree(
            facts=self.facts,
            children=self.children,
            supporters=self.supporters,
            may_stand_on=may_stand_on,
        )

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
