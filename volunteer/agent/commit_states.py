"""Has commits and proposals computed, and says what came of it.

Runs in: agent. A commit is what it states where its list gives its state hash and its marks; any
other is refused. What concerns our own work is kept for the books.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import trio

from volunteer.agent.aggregator_service import AggregatorLostError, AggregatorRefusedError
from volunteer.agent.applying import CommitApplier
from volunteer.agent.record_log import RecordLog
from volunteer.errors import StorageFullError
from volunteer.messages import Outcome, StateBuilt
from volunteer.rounds import events as ev
from volunteer.rounds.machine import Machine
from volunteer.rounds.records import Commit

log = logging.getLogger(__name__)


class Told(Protocol):
    """Who is told: the module's files."""

    post: Callable[[ev.Event], None]
    on_refused: Callable[[str, str], None]
    """Takes an own contribution that has weight 0, and why."""

    def on_outcomes(self, machine: Machine, commit_id: str, outcomes: tuple[Outcome, ...]) -> None:
        """Take a commit that holds, and what became of all that it lists."""

    async def fail_later(self, subject: str, error: Exception) -> None:
        """Have the machine ask again after a while."""


class CommitStates:
    """One module's commits, computed by its aggregator."""

    def __init__(self, applier: CommitApplier, record_log: RecordLog, told: Told) -> None:
        """Compute with `applier`; tell `told`."""
        self._applier = applier
        self._log = record_log
        self._told = told

    async def compute_state(self, action: ev.ComputeState, machine: Machine) -> None:
        """Apply a commit, and compare (answer: StateHeld or StateRefused)."""
        told = self._told
        try:
            built = await self._applier.apply(machine, action.commit.parent, action.listed)
        except (AggregatorLostError, AggregatorRefusedError) as error:
            await told.fail_later(action.commit_id, error)
            return
        reason = commit_difference(action.commit, built)
        if reason:
            log.error("commit=%s refused: %s", action.commit_id[:12], reason)
            told.post(ev.StateRefused(action.commit_id, reason))
            return
        await self._note_refusals(built.outcomes, machine)
        told.post(ev.StateHeld(action.commit_id))
        told.on_outcomes(machine, action.commit_id, built.outcomes)

    async def compute_proposal(self, action: ev.ComputeProposal, machine: Machine) -> None:
        """Apply a list that may become a commit (answer: ProposalComputed)."""
        try:
            built = await self._applier.apply(machine, action.parent, action.listed)
        except (AggregatorLostError, AggregatorRefusedError) as error:
            await self._told.fail_later(action.parent, error)
            return
        ids = tuple(one.contribution_id for one in action.listed)
        marked = marked_ids(built.outcomes)
        self._told.post(ev.ProposalComputed(action.parent, ids, built.state_hash, marked))

    async def _note_refusals(self, outcomes: tuple[Outcome, ...], machine: Machine) -> None:
        for outcome in outcomes:
            if outcome.refused_reason and outcome.contribution_id in machine.own:
                self._told.on_refused(outcome.contribution_id, outcome.refused_reason)
                text = f"{outcome.contribution_id} {outcome.refused_reason}"
                try:
                    await trio.to_thread.run_sync(self._log.note, "refused", text)
                except StorageFullError as error:  # only the stats after a restart miss it
                    log.warning("refused=%s not noted: %s", outcome.contribution_id[:12], error)


def marked_ids(outcomes: tuple[Outcome, ...]) -> tuple[str, ...]:
    """Return which contributions a commit has to mark, sorted."""
    return tuple(sorted(o.contribution_id for o in outcomes if o.is_marked))


def commit_difference(commit: Commit, built: StateBuilt) -> str:
    """Return in what a commit differs from what its list gives, as a sentence; empty if in nothing.

    Args:
        commit: as signed.
        built: what the aggregator made of its list.
    """
    if built.state_hash != commit.state_hash:
        return f"its list gives state {built.state_hash[:12]}"
    due = marked_ids(built.outcomes)
    if commit.marks != due:
        return f"it marks {len(commit.marks)} contributions as bad work, its list gives {len(due)}"
    return ""
