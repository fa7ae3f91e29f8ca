"""Has the states of commits computed, each once, and the next one before its commit is here.

Runs in: agent. Once all whom the chain expects have contributed, everybody knows what the next
commit will list. Who waited for the proposer to compute it, sign it and send it computed the same
after it, so a round took the apply twice. What is computed ahead is only kept: the commit decides,
and another list is computed as ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from p2p.blobstore import BlobStore
from volunteer.agent.aggregator_service import (
    AggregatorLostError,
    AggregatorRefusedError,
    AggregatorService,
)
from volunteer.agent.listing import listed_works
from volunteer.messages import ApplyCommit, StateBuilt
from volunteer.rounds import events as ev
from volunteer.rounds.chain import RECENT_COMMITS, expected_at, listed_in_order
from volunteer.rounds.machine import Machine
from volunteer.rounds.sampling import sample_contributions
from volunteer.rounds.turn import eligible_contributions, roster_votes, votes_for

log = logging.getLogger(__name__)
MAX_COMPUTED = 16
"""Answers kept; the next commit and those of side branches."""

_Key = tuple[str, tuple[str, ...]]


class CommitApplier:
    """What one module's aggregator has computed."""

    def __init__(
        self,
        store: BlobStore,
        aggregator: AggregatorService,
        state_hash_of: Callable[[Machine, str], str],
    ) -> None:
        """Ask `aggregator`, which writes to `store`."""
        self._store = store
        self._aggregator = aggregator
        self._state_hash_of = state_hash_of
        self._computed: dict[_Key, StateBuilt] = {}
        self._computing: dict[_Key, trio.Event] = {}
        self._ahead_of = ""

    async def apply(
        self, machine: Machine, parent: str, listed: tuple[ev.Listed, ...]
    ) -> StateBuilt:
        """Return what `listed` makes of the state of `parent`.

        Raises:
            AggregatorLostError: it ended first.
            AggregatorRefusedError: it cannot.
        """
        key = (parent, tuple(one.contribution_id for one in listed))
        while key in self._computing:
            await self._computing[key].wait()
        known = self._computed.get(key)
        if known is not None and self._store.has(known.state_hash):  # it may have been pruned
            return known
        self._computing[key] = trio.Event()
        try:
            works, state_hash = listed_works(listed), self._state_hash_of(machine, parent)
            height = machine.known.facts[parent].height
            reply = await self._aggregator.ask(
                lambda i: ApplyCommit(
                    request_id=i, round_index=height, parent_state=state_hash, listed=works
                )
            )
        finally:
            self._computing.pop(key).set()
        assert isinstance(reply, StateBuilt)
        self._computed = {**dict(list(self._computed.items())[-MAX_COMPUTED:]), key: reply}
        return reply

    def begin_ahead(self, machine: Machine, nursery: trio.Nursery) -> None:
        """Begin with the next commit if its list is known; once for each tip."""
        due = None if machine.tip in (None, self._ahead_of) else next_list(machine)
        if due is not None:
            self._ahead_of = due[0]
            nursery.start_soon(self._apply_ahead, machine, *due)

    async def _apply_ahead(
        self, machine: Machine, parent: str, listed: tuple[ev.Listed, ...]
    ) -> None:
        try:
            await self.apply(machine, parent, listed)
        except (AggregatorLostError, AggregatorRefusedError) as error:
            log.info("parent=%s not applied ahead: %s", parent[:12], error)


def next_list(machine: Machine) -> tuple[str, tuple[ev.Listed, ...]] | None:
    """Return the tip and what its child will list, or None while somebody may still be waited for.

    Also None where a child is known: its own list is computed.
    """
    known, tip = machine.known, machine.tip
    if tip is None or not machine.is_contributing or machine.closed_at_s is None:
        return None
    facts = known.facts[tip]
    if tip not in known.states or known.children.get(tip):
        return None
    if facts.height < RECENT_COMMITS and len(facts.rosters[1]) <= 1:
        return None  # nobody knows yet whom to expect: even rank 0 waits the grace (rule 22)
    held = {known.contributions[i].author for i in known.based_on.get(tip, ()) if i in known.held}
    if not held or not expected_at(facts) <= held:
        return None
    eligible = eligible_contributions(known, facts, machine.banned)
    chosen = sample_contributions(
        eligible,
        machine.rules.max_contributions,
        seed=tip,
        first=roster_votes(known, facts, eligible),
        votes=votes_for(known, facts, eligible),
    )
    return tip, listed_in_order(chosen, facts, known.contributions)
