"""Brings what the round protocol decides into the ledger, in order, off the event loop.

Runs in: agent. The ledger never decides anything: it can be lost without hurting a run.
"""

from __future__ import annotations

import logging
import math
import sqlite3
from collections.abc import Callable, Iterable

import msgspec
import trio

from volunteer.agent.clock import now_utc
from volunteer.answers import ContributionPoint
from volunteer.errors import VolunteerError
from volunteer.messages import StateEvaluated
from volunteer.rounds.credit import WorkState, new_tokens
from volunteer.rounds.machine import Machine
from volunteer.stats.ledger import Ledger

log = logging.getLogger(__name__)
_LEDGER_STATES = {
    WorkState.LISTED: "in_flight",  # until its commit is final
    WorkState.IN_FLIGHT: "in_flight",
    WorkState.PENDING: "pending",
    WorkState.DROPPED: "dropped",
}


class Bookkeeper:
    """One module's entries."""

    def __init__(self, ledger: Ledger, machine: Machine) -> None:
        """Keep the books of `machine`'s member."""
        self._ledger = ledger
        self._machine = machine
        self._send, self._receive = trio.open_memory_channel[Callable[[], object]](math.inf)
        self._marked: dict[str, str] = {}
        self._settled: dict[str, str] = {}
        """Own contribution -> the final commit that lists it, or what carries it."""
        self._confirmed: set[str] = set()
        self.refused: dict[str, str] = {}
        """Own contributions that a commit gave weight 0, with the reason."""
        self.last_confirmed_at_s: float | None = None
        self.tokens_elsewhere = 0
        """Trained in other runs."""
        self.steps_elsewhere = 0

    async def run(self) -> None:
        """Write what is queued, for ever; the ledger itself outlives errors."""
        async for write in self._receive:
            try:
                await trio.to_thread.run_sync(write)
            except (sqlite3.Error, VolunteerError) as error:
                log.error("stats not written: %s", error)

    def queue(self, write: Callable[[], object]) -> None:
        """Write this to the ledger, after all that was queued before."""
        self._send.send_nowait(write)

    def note_own(self, contribution_id: str) -> None:
        """One of our own contributions is on disk."""
        machine, ledger = self._machine, self._ledger
        contribution = machine.own[contribution_id]
        new = new_tokens(machine.own)[contribution_id]
        self.queue(
            lambda: ledger.record_contribution(
                run_id=contribution.run_id,
                module_id=contribution.module_id,
                contribution_id=contribution_id,
                round_index=contribution.round_index,
                tokens=contribution.tokens,
                new_tokens=new,
                carries=contribution.carries,
                at_utc=now_utc(),
            )
        )

    def note_move(self, drop_reason: str = "") -> None:
        """The tip has moved: what became of our own work may have changed."""
        for contribution_id, state in self._machine.work_states().items():
            entry = _LEDGER_STATES[state]
            commit_id = self._settled.get(contribution_id)
            if commit_id is not None and not self._is_final(commit_id):
                self._unsettle(contribution_id)
            if contribution_id in self._settled or self._marked.get(contribution_id) == entry:
                continue
            self._marked[contribution_id] = entry
            reason = drop_reason if state is WorkState.DROPPED else ""
            self._mark(contribution_id, entry, reason)

    def _is_final(self, commit_id: str) -> bool:
        """Return whether a commit that was final still is: a reset may leave it (rule 18)."""
        machine = self._machine
        if machine.tip is None or not machine.work.is_on_chain(commit_id):
            return False
        facts = machine.known.facts
        return facts[commit_id].height <= facts[machine.tip].final_height

    def _unsettle(self, contribution_id: str) -> None:
        del self._settled[contribution_id]
        self._confirmed.discard(contribution_id)
        self._marked.pop(contribution_id, None)

    @property
    def tokens_confirmed(self) -> int:
        """Tokens in final contributions that were not refused, and in what those carry."""
        new = new_tokens(self._machine.own)
        return sum(new[i] for i in self._confirmed if i in new)

    async def flush(self) -> None:
        """Wait until all that was queued so far is written."""
        done = trio.Event()
        token = trio.lowlevel.current_trio_token()
        self.queue(lambda: token.run_sync_soon(done.set))
        await done.wait()

    def note_contributed(self, seconds: float) -> None:
        """Inner steps were taken for so long."""
        ledger = self._ledger
        self.queue(lambda: ledger.add_contributed_s(seconds))

    def note_discarded(self, tokens: int, reason: str) -> None:
        """The trainer had to throw trained work away."""
        rules, ledger = self._machine.rules, self._ledger
        self.queue(lambda: ledger.record_discarded(rules.run_id, rules.module_id, tokens, reason))

    def note_final(self, own_listed: Iterable[str], at_s: float | None) -> None:
        """These own contributions are final: credit is due, unless they were refused.

        Args:
            own_listed: their ids.
            at_s: when; None for what was final before this agent started.
        """
        for contribution_id in own_listed:
            self.last_confirmed_at_s = at_s or self.last_confirmed_at_s
            commit_id = self._machine.work.listed_at(contribution_id)
            if commit_id is None:
                continue  # the chain has been left since
            works = (contribution_id, *self._machine.own[contribution_id].carries)
            self._settled.update(dict.fromkeys(works, commit_id))
            reason = self.refused.get(contribution_id, "")
            if not reason:
                self._confirmed.update(works)
            self._mark(contribution_id, "refused" if reason else "confirmed", reason)

    def note_round(self, commit_id: str, state_hash: str) -> None:
        """The tip has moved to `commit_id`."""
        machine, ledger = self._machine, self._ledger
        facts = machine.known.facts[commit_id]
        self.queue(
            lambda: ledger.record_round(
                run_id=machine.rules.run_id,
                module_id=machine.rules.module_id,
                commit_id=commit_id,
                round_index=facts.height,
                state_hash=state_hash,
                num_contributions=len(facts.listed),
                own_listed=any(i in machine.own for i in facts.listed),
                applied_utc=now_utc(),
            )
        )

    def note_loss(self, commit_id: str, found: StateEvaluated) -> None:
        """The state of `commit_id` has been evaluated."""
        ledger = self._ledger
        loss, stderr, num = found.held_out_loss, found.loss_stderr, found.num_windows
        self.queue(
            lambda: ledger.record_evaluation(commit_id, loss, stderr=stderr, num_windows=num)
        )

    def note_totals(self, tokens_total: int, inner_steps: int) -> None:
        """The trainer's counters, as its snapshot on disk has them."""
        machine, ledger = self._machine, self._ledger
        rules = machine.rules
        self.queue(
            lambda: ledger.set_totals(rules.run_id, rules.module_id, tokens_total, inner_steps)
        )

    def with_listing(self, points: Iterable[ContributionPoint]) -> list[ContributionPoint]:
        """Return `points` with the commits of the tip's chain that list them."""
        return [self._with_listing(point) for point in points]

    def _with_listing(self, point: ContributionPoint) -> ContributionPoint:
        machine = self._machine
        commit_id = machine.work.listed_at(point.contribution_id) if machine.tip else None
        if commit_id is None:
            return point
        height = machine.known.facts[commit_id].height
        return msgspec.structs.replace(point, listed_in_round=height, commit_id=commit_id)

    def _mark(self, contribution_id: str, state: str, reason: str) -> None:
        ledger = self._ledger
        self.queue(lambda: ledger.mark_contribution(contribution_id, state, reason))
