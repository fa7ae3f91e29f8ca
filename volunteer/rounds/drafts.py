"""The records that a member signs, filled in from what it knows.

Runs in: agent, simulation. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from volunteer.rounds import events as ev
from volunteer.rounds.chain import ChainFacts, ChainRules, rank_of
from volunteer.rounds.records import Close, Commit, Contribution, Leaving


@dataclass(frozen=True, slots=True)
class Drafts:
    """One member's own records, not signed yet."""

    rules: ChainRules
    me: str

    def contribution(
        self,
        base: ChainFacts,
        event: ev.ContributionEncoded,
        *,
        vote: bool,
        harmful: tuple[str, ...] | None = None,
    ) -> Contribution:
        """Announce what the trainer has encoded, perhaps with a verdict on what `base` lists."""
        return Contribution(
            run_id=self.rules.run_id,
            module_id=self.rules.module_id,
            round_index=base.height,
            author=self.me,
            base=event.base,
            vote=vote,
            blob_id=event.blob_id,
            blob_bytes=event.blob_bytes,
            codec=event.codec,
            codec_version=event.codec_version,
            tokens=event.tokens,
            carries=event.carries,
            content_hash=event.content_hash or msgspec.UNSET,
            harmful=msgspec.UNSET if harmful is None else harmful,
        )

    def commit(
        self, parent: ChainFacts, event: ev.ProposalComputed, leaving: tuple[str, ...]
    ) -> Commit:
        """Propose what the aggregator has computed."""
        return Commit(
            run_id=self.rules.run_id,
            module_id=self.rules.module_id,
            round_index=parent.height + 1,
            parent=event.parent,
            rank=rank_of(self.rules, parent, self.me),
            proposer=self.me,
            contributions=event.contributions,
            leaving=leaving,
            state_hash=event.state_hash,
            marked=event.marked or msgspec.UNSET,
        )

    def close(self, tip: ChainFacts) -> Close:
        """Say that the round on `tip` is over here."""
        return Close(
            run_id=self.rules.run_id,
            module_id=self.rules.module_id,
            round_index=tip.height,
            author=self.me,
            base=tip.commit_id,
        )

    def leaving(self, tip: ChainFacts) -> Leaving:
        """Say that nobody need wait for us."""
        return Leaving(
            run_id=self.rules.run_id,
            module_id=self.rules.module_id,
            round_index=tip.height,
            author=self.me,
            base=tip.commit_id,
        )
