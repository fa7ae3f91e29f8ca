"""As one of a commit's scorers: finds out which of its contributions do harm.

Runs in: agent. Who scores what, and when a verdict counts, says volunteer/rounds/scoring.py. Two
things are found: what raises the loss, measured by the aggregator in its idle time, and which of
two that are the same was heard of later. No verdict is better than one on a part of them: where
the aggregator has no time for all, this member has none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import trio

from volunteer.agent.aggregator_service import (
    AggregatorLostError,
    AggregatorRefusedError,
    AggregatorService,
)
from volunteer.agent.listing import listed_works
from volunteer.messages import ContributionsScored, Outcome, Score, ScoreContributions
from volunteer.rounds import events as ev
from volunteer.rounds.chain import active_at, listed_in_order
from volunteer.rounds.exclusion import max_struck
from volunteer.rounds.machine import Machine
from volunteer.rounds.records import MAX_HARMFUL
from volunteer.rounds.scoring import draw_scored, draw_scorers, is_harmful

log = logging.getLogger(__name__)
MAX_HEARD = 1024
MIN_COPY_DELAY_S = 0.5
"""Who copies has to fetch, encode and announce: what comes sooner after another was made beside it.
"""
NUM_TRIES = 3
AGAIN_AFTER_S = 5.0


class Scorer:
    """One member's verdicts in one module."""

    def __init__(self, me: str, aggregator: AggregatorService) -> None:
        """Measure with `aggregator`."""
        self._me = me
        self._aggregator = aggregator
        self._heard_at_s: dict[str, float] = {}

    def note_heard(self, contribution_id: str) -> None:
        """Another's contribution is known, and is being fetched."""
        if contribution_id not in self._heard_at_s:
            self._heard_at_s[contribution_id] = trio.current_time()
            if len(self._heard_at_s) > MAX_HEARD:
                del self._heard_at_s[next(iter(self._heard_at_s))]

    def is_due(self, machine: Machine, commit_id: str) -> bool:
        """Return whether this member is to score a commit that has just been computed.

        Not where nobody can be blamed for it anyway.
        """
        known = machine.known
        facts = known.facts[commit_id]
        authors = {known.contributions[i].author for i in facts.listed}
        is_newest = facts.height >= known.highest_height
        if not (machine.is_contributing and is_newest and max_struck(len(authors))):
            return False
        return self._me in draw_scorers(commit_id, active_at(machine.rules, facts))

    async def score(
        self,
        machine: Machine,
        commit_id: str,
        outcomes: tuple[Outcome, ...],
        state_hash_of: Callable[[Machine, str], str],
        post: Callable[[ev.Event], None],
    ) -> None:
        """Reach a verdict on what a commit lists, and tell `post`."""
        scores = await self._measure(machine, commit_id, outcomes, state_hash_of)
        if scores is None:
            return
        harmful = {s.contribution_id for s in scores if is_harmful(s.change, s.stderr, s.loss)}
        harmful |= self._late_copies(machine, outcomes)
        for score in scores:
            log.info(
                "commit=%s contribution=%s change=%.5f stderr=%.5f harmful=%s",
                commit_id[:12],
                score.contribution_id[:12],
                score.change,
                score.stderr,
                score.contribution_id in harmful,
            )
        post(ev.VerdictReached(commit_id, tuple(sorted(harmful)[:MAX_HARMFUL])))

    async def _measure(
        self,
        machine: Machine,
        commit_id: str,
        outcomes: tuple[Outcome, ...],
        state_hash_of: Callable[[Machine, str], str],
    ) -> list[Score] | None:
        """Return the scores of all that were drawn and have weight; None without the time."""
        known = machine.known
        parent_id, ids = known.commits[commit_id].parent, known.commits[commit_id].contributions
        listed = listed_in_order(ids, known.facts[parent_id], known.contributions)
        scales = {o.contribution_id: o.clip_scale for o in outcomes if o.weight > 0.0}
        drawn = draw_scored(commit_id, ids)
        todo = [
            work
            for work in listed_works(listed)
            if work.contribution_id in drawn
            and work.contribution_id in scales
            and work.author != self._me
        ]
        scores: list[Score] = []
        for _ in range(NUM_TRIES):
            if not todo:
                return scores
            command = ScoreContributions(
                request_id=0,
                commit_id=commit_id,
                parent_state=state_hash_of(machine, parent_id),
                works=tuple(todo),
                clip_scales=tuple(scales[work.contribution_id] for work in todo),
            )
            found = await self._ask(command)
            if found is None:
                return None
            scores += found
            todo = todo[len(found) :]
            if todo:
                await trio.sleep(AGAIN_AFTER_S)  # noqa: TID251 - others needed the aggregator
        return None if todo else scores

    async def _ask(self, command: ScoreContributions) -> tuple[Score, ...] | None:
        try:
            reply = await self._aggregator.ask(
                lambda i: msgspec.structs.replace(command, request_id=i)
            )
        except (AggregatorLostError, AggregatorRefusedError) as error:
            log.info("commit=%s not scored: %s", command.commit_id[:12], error)
            return None
        assert isinstance(reply, ContributionsScored)
        return reply.scores

    def _late_copies(self, machine: Machine, outcomes: tuple[Outcome, ...]) -> set[str]:
        """Return which contributions were heard of after another one that they are the same as."""
        late = set()
        for outcome in outcomes:
            heard_at_s = self._heard_at_s.get(outcome.contribution_id)
            if heard_at_s is None or outcome.contribution_id in machine.own:
                continue
            for other in outcome.copies:
                is_older = other in machine.own or (
                    other in self._heard_at_s
                    and self._heard_at_s[other] + MIN_COPY_DELAY_S <= heard_at_s
                )
                if is_older:
                    late.add(outcome.contribution_id)
        return late
