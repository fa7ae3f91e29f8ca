"""States are computed once each, and the next one as soon as its list is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import trio
import trio.testing

from p2p.blobstore import BlobStore
from tests.volunteer.rounds.chain_builder import ChainBuilder, make_rules
from tests.volunteer.rounds.desk import ROUND_S, Desk, desk_at, hear, hear_commit, only, others
from volunteer.agent.aggregator_service import AggregatorLostError, AggregatorService
from volunteer.agent.applying import CommitApplier, next_list
from volunteer.messages import AggregatorCommand, AggregatorEvent, StateBuilt
from volunteer.rounds import events as ev


class SlowAggregator:
    """Answers when it is let; ends before that if it is told to."""

    def __init__(self, store: BlobStore) -> None:
        self.store = store
        self.num_asked = 0
        self.may_answer = trio.Event()
        self.is_lost = False

    async def ask(self, make: Callable[[int], AggregatorCommand]) -> AggregatorEvent:
        make(1)
        self.num_asked += 1
        await self.may_answer.wait()
        if self.is_lost:
            raise AggregatorLostError
        return StateBuilt(request_id=1, state_hash=self.store.add_bytes(b"state"), outcomes=())


def everyone_is_here(rank: int = 1) -> tuple[Desk, str]:
    """A member that has closed its round and holds what all have contributed."""
    chain, tip, desk = desk_at(rank)
    desk.wait(ROUND_S)
    desk.contribute(tip)
    for author in others(desk):
        assert next_list(desk.machine) is None
        hear(desk, chain.contribution(author, tip))
    return desk, tip


def test_the_next_list_is_what_the_proposer_lists() -> None:
    chain, tip, desk = desk_at(0)
    desk.wait(ROUND_S)
    desk.contribute(tip)
    proposals: list[ev.ComputeProposal] = []
    for author in others(desk):
        proposals += only(hear(desk, chain.contribution(author, tip)), ev.ComputeProposal)
    (proposal,) = proposals
    assert next_list(desk.machine) == (tip, proposal.listed)


def test_who_does_not_propose_knows_the_list_as_well() -> None:
    desk, tip = everyone_is_here()
    due = next_list(desk.machine)
    assert due is not None
    assert due[0] == tip
    assert len(due[1]) == 3


def test_before_the_close_or_when_a_commit_is_here_there_is_none() -> None:
    _, _, before = desk_at(1)
    assert next_list(before.machine) is None
    desk, tip = everyone_is_here()
    listed = [one.contribution_id for one in (next_list(desk.machine) or ("", ()))[1]]
    for contribution_id in listed:
        desk.chain.known.add(contribution_id, desk.machine.known.contributions[contribution_id])
    hear_commit(desk, desk.chain.commit(tip, listed))
    assert next_list(desk.machine) is None


def test_on_a_young_chain_nobody_knows_whom_to_expect() -> None:
    chain = ChainBuilder(make_rules())
    tip = chain.round(chain.genesis, "a")
    desk = Desk(chain)
    desk.stand_on(tip)
    desk.wait(ROUND_S)
    desk.contribute(tip)
    assert next_list(desk.machine) is None


def test_who_is_paused_computes_nothing_ahead() -> None:
    desk, _ = everyone_is_here()
    desk.feed(ev.ContributingChanged(False))
    assert next_list(desk.machine) is None


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_is_being_computed_is_not_asked_for_twice(tmp_path: Path, is_lost: bool) -> None:
    desk, tip = everyone_is_here()
    due = next_list(desk.machine)
    assert due is not None
    built: list[StateBuilt] = []

    async def main() -> None:
        aggregator = SlowAggregator(BlobStore(tmp_path))
        applier = CommitApplier(
            aggregator.store, cast("AggregatorService", aggregator), lambda _machine, parent: parent
        )

        async def apply() -> None:
            built.append(await applier.apply(desk.machine, tip, due[1]))

        async with trio.open_nursery() as nursery:
            applier.begin_ahead(desk.machine, nursery)
            applier.begin_ahead(desk.machine, nursery)
            nursery.start_soon(apply)
            await trio.testing.wait_all_tasks_blocked()
            assert aggregator.num_asked == 1
            aggregator.is_lost = is_lost
            aggregator.may_answer.set()
            await trio.testing.wait_all_tasks_blocked()
            aggregator.is_lost = False
        assert len(built) == 1
        assert aggregator.num_asked == 1
        aggregator.store.delete(built[0].state_hash)
        await apply()
        assert aggregator.num_asked == 2, "its file was gone"

    if is_lost:
        with pytest.RaisesGroup(AggregatorLostError):
            trio.run(main)
    else:
        trio.run(main)
