"""Builds chains of commits in a few words, for tests of one rule each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec
from blake3 import blake3

from volunteer.rounds.chain import ChainFacts, ChainRules, rank_of, rank_order
from volunteer.rounds.knowledge import Knowledge
from volunteer.rounds.records import (
    Commit,
    Contribution,
    Leaving,
    Record,
    encode_body,
    genesis_id,
    record_id_of,
)

RUN_ID = "ab" * 32


def hash_of(text: str) -> str:
    """Return some hash."""
    return blake3(text.encode()).hexdigest()


def make_rules(
    *,
    publisher: str = "a",
    expiry_rounds: int = 8,
    demote_rounds: int = 8,
    max_contributions: int = 32,
    quorum: tuple[int, int] = (1, 2),
) -> ChainRules:
    return ChainRules(
        run_id=RUN_ID,
        module_id="dense",
        genesis_id=genesis_id(RUN_ID, "dense"),
        publisher=publisher,
        expiry_rounds=expiry_rounds,
        demote_rounds=demote_rounds,
        max_contributions=max_contributions,
        quorum_numerator=quorum[0],
        quorum_denominator=quorum[1],
    )


class ChainBuilder:
    """Records that are all known, and the facts they lead to."""

    def __init__(self, rules: ChainRules | None = None) -> None:
        self.rules = rules or make_rules()
        self.known = Knowledge(self.rules)
        self.genesis = self.rules.genesis_id
        self.records: dict[str, Record] = {}
        self._numbers = itertools.count()

    def facts(self, commit_id: str) -> ChainFacts:
        return self.known.facts[commit_id]

    def add(self, record: Record) -> str:
        record_id = record_id_of(encode_body(record))
        self.records[record_id] = record
        self.known.add(record_id, record)
        return record_id

    def contribution(
        self,
        author: str,
        base: str,
        *,
        vote: bool = True,
        tokens: int = 10,
        carries: Iterable[str] = (),
        is_held: bool = True,
        content: str = "",
        harmful: Iterable[str] | None = None,
    ) -> str:
        record = Contribution(
            run_id=RUN_ID,
            module_id="dense",
            round_index=self.facts(base).height,
            author=author,
            base=base,
            vote=vote,
            blob_id=hash_of(f"blob {next(self._numbers)}"),
            blob_bytes=100,
            codec="int4",
            codec_version=1,
            tokens=tokens,
            carries=tuple(sorted(carries)),
            content_hash=hash_of(content) if content else msgspec.UNSET,
            harmful=msgspec.UNSET if harmful is None else tuple(sorted(harmful)),
        )
        contribution_id = self.add(record)
        if is_held:
            self.known.hold(contribution_id)
        return contribution_id

    def leaving(self, author: str, base: str) -> str:
        return self.add(
            Leaving(
                run_id=RUN_ID,
                module_id="dense",
                round_index=self.facts(base).height,
                author=author,
                base=base,
            )
        )

    def draft(
        self,
        parent: str,
        listed: Iterable[str],
        *,
        proposer: str | None = None,
        rank: int | None = None,
        leaving: Iterable[str] = (),
        state: str = "",
        marked: Iterable[str] = (),
    ) -> Commit:
        """Return a commit that is not added; its proposer is the first in rank order."""
        facts = self.facts(parent)
        if proposer is None:
            proposer = (rank_order(self.rules, facts) or ("a",))[0]
        return Commit(
            run_id=RUN_ID,
            module_id="dense",
            round_index=facts.height + 1,
            parent=parent,
            rank=rank_of(self.rules, facts, proposer) if rank is None else rank,
            proposer=proposer,
            contributions=tuple(sorted(listed)),
            leaving=tuple(sorted(leaving)),
            state_hash=hash_of(f"state {parent} {sorted(listed)} {state}"),
            marked=tuple(sorted(marked)) or msgspec.UNSET,
        )

    def commit(
        self,
        parent: str,
        listed: Iterable[str],
        *,
        proposer: str | None = None,
        leaving: Iterable[str] = (),
        state: str = "",
        marked: Iterable[str] = (),
    ) -> str:
        """Add a commit and see that it is valid."""
        draft = self.draft(
            parent, listed, proposer=proposer, leaving=leaving, state=state, marked=marked
        )
        commit_id = self.add(draft)
        assert commit_id in self.known.facts, self.known.invalid.get(commit_id)
        return commit_id

    def round(self, parent: str, authors: str, *, voters: str | None = None, bad: str = "") -> str:
        """Add one commit on `parent` that lists a contribution of each author (one letter each).

        Those of the authors in `bad` are marked.
        """
        votes = authors if voters is None else voters
        listed = {a: self.contribution(a, parent, vote=a in votes) for a in authors}
        return self.commit(parent, listed.values(), marked=[listed[a] for a in bad])

    def rounds(self, parent: str, authors: str, count: int) -> list[str]:
        """Add `count` such commits, one on the other."""
        chain = [parent]
        for _ in range(count):
            chain.append(self.round(chain[-1], authors))
        return chain[1:]
