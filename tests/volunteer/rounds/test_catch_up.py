"""Replay the commits, or fetch a state: whichever has fewer bytes still to come."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import pytest

from tests.volunteer.rounds.chain_builder import ChainBuilder, make_rules
from tests.volunteer.rounds.desk import Desk, only
from volunteer.rounds import events as ev
from volunteer.rounds.catch_up import Needs, Stock, needs_of_headers, needs_of_state

BLOB = 100
"""Bytes of each contribution of the chain builder."""


class Row(NamedTuple):
    """A member that stands on the genesis, and a chain of commits above it."""

    heights: int
    authors: str
    """Each has one contribution in each commit."""
    state_bytes: int
    fetched: int
    """Height of the commit whose state is to be fetched; 0: replay."""
    held: Mapping[int, int] = {}
    """Height -> how many blobs of that commit are here."""
    parts: Mapping[int, int] = {}
    """Height -> bytes of its state's file that are here."""
    failed_states: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    """Heights of commits of which one blob cannot be had."""


ROWS = {
    "two behind, however dear": Row(2, "abc", 10, 0),
    "three behind, blobs cheaper": Row(3, "abc", 901, 0),
    "three behind, equal: what one computes oneself": Row(3, "a", 3 * BLOB - 1 * BLOB, 0),
    "three behind, a state cheaper": Row(3, "abc", 500, 2),
    "the newest certified of many": Row(6, "abc", 500, 5),
    "blobs that are here cost nothing": Row(4, "abc", 500, 0, held={1: 3, 2: 3}),
    "blobs that are here, but too few": Row(4, "abc", 500, 3, held={1: 1}),
    "a state that is here in part": Row(4, "abc", 2000, 3, parts={3: 1200}),
    "an older state that is here in part": Row(5, "a", 1000, 2, parts={2: 900}),
    "an older state, but its blobs above are dearer": Row(6, "abc", 800, 5, parts={2: 500}),
    "a lost blob": Row(4, "a", 2000, 3, lost=(2,)),
    "a lost blob above the state": Row(4, "a", 2000, 3, lost=(4,)),
    "beyond the journal, however cheap the blobs": Row(10, "a", 10**9, 9),
    "beyond the journal, with a part of a state that nobody keeps": Row(
        12, "a", 10**6, 11, parts={3: 10**6 - 1}
    ),
    "size of a state not known": Row(3, "a", 0, 2),
}


def build(row: Row) -> tuple[ChainBuilder, list[str], Stock]:
    chain = ChainBuilder(dataclasses.replace(make_rules(), state_bytes=row.state_bytes))
    commits = [chain.genesis]
    lost = set()
    for height in range(1, row.heights + 1):
        held = row.held.get(height, 0)
        ids = [
            chain.contribution(author, commits[-1], is_held=number < held)
            for number, author in enumerate(row.authors)
        ]
        lost.update(ids[:1] if height in row.lost else [])
        commits.append(chain.commit(commits[-1], ids))
    failed = {commits[height] for height in row.failed_states}
    stock = Stock(
        {commits[height]: num_bytes for height, num_bytes in row.parts.items()},
        lambda subject: 9 if subject in lost | failed else 0,
    )
    return chain, commits, stock


@pytest.mark.parametrize("name", ROWS)
def test_the_way_with_fewer_bytes_is_taken(name: str) -> None:
    row = ROWS[name]
    chain, commits, stock = build(row)
    needs = needs_of_headers(chain.known, commits[-1], stock)
    fetched = commits.index(needs.state_of) if needs.state_of else 0
    assert fetched == row.fetched
    first = next(c for c in commits[1:] if c not in chain.known.usable)
    assert needs.lowest == first
    # Only the blobs that the way needs are asked for, the lowest first.
    begin = fetched + 1 if row.fetched and row.state_bytes else commits.index(first)
    wanted = [i for c in commits[begin : begin + 3] for i in chain.known.commits[c].contributions]
    assert list(needs.contributions) == wanted


def test_both_ways_are_gone_once_a_state_could_not_be_had() -> None:
    chain, commits, stock = build(
        ROWS["three behind, a state cheaper"]._replace(failed_states=(2,))
    )
    needs = needs_of_headers(chain.known, commits[-1], stock)
    assert needs.state_of == commits[2]
    assert set(chain.known.commits[commits[1]].contributions) <= set(needs.contributions)


def test_nothing_is_fetched_that_only_its_proposer_vouches_for() -> None:
    chain, commits, stock = build(Row(4, "abc", 10, 3))
    assert commits[4] != chain.facts(commits[4]).certified_id
    assert needs_of_headers(chain.known, commits[4], stock).state_of == commits[3]


@pytest.mark.parametrize(("state_bytes", "way"), [(0, "state"), (10, "compute")])
def test_far_blobs_that_are_all_here_are_cheaper_than_any_state(state_bytes: int, way: str) -> None:
    chain = ChainBuilder(dataclasses.replace(make_rules(), state_bytes=state_bytes))
    commits = chain.rounds(chain.genesis, "a", 12)
    chain.known.hold_state(chain.genesis)
    needs = needs_of_state(chain.known, commits[-1], chain.genesis, lambda _: 0)
    expected = Needs(compute=commits[0]) if way == "compute" else Needs(state_of=commits[-1])
    assert needs == expected


# ---------------------------------------------------------------------- through the machine


def waiting_desk(chain: ChainBuilder, *events: ev.Event) -> Desk:
    """A member that has slept, and knows all records by now."""
    desk = Desk(chain, "a")
    desk.feed(ev.StateHeld(chain.genesis), *events)
    desk.feed(*(ev.RecordArrived(i, record) for i, record in chain.records.items()))
    return desk


def asked_for(actions: list[ev.Action]) -> set[str]:
    return {action.contribution_id for action in only(actions, ev.FetchBlob)}


def test_what_an_earlier_start_has_left_is_gone_on_with_and_the_rest_is_replayed() -> None:
    chain = ChainBuilder(dataclasses.replace(make_rules(), state_bytes=1000))
    commits = [chain.genesis, *chain.rounds(chain.genesis, "abc", 6)]
    desk = waiting_desk(chain, ev.StatePartHeld(commits[3], 900))
    done = desk.feed(ev.ContributingChanged(True))
    assert [fetch.commit_id for fetch in only(done, ev.FetchState)] == [commits[3]]
    listed = [chain.facts(commit_id).listed for commit_id in commits]
    # Those on the genesis were wanted for a proposal, before it was known how far behind it is.
    assert asked_for(done) == listed[1] | listed[4] | listed[5] | listed[6]
    assert not only(desk.feed(*map(ev.RequestFailed, listed[1])) + desk.wait(60.0), ev.FetchBlob)
    blobs = sorted(listed[4] | listed[5] | listed[6])
    done = desk.feed(*(ev.BlobHeld(i) for i in blobs), ev.StateHeld(commits[3]))
    assert [compute.commit_id for compute in only(done, ev.ComputeState)] == [commits[4]]
    assert not only(done, ev.FetchState)


def test_a_fetch_under_way_is_not_left_for_a_newer_state() -> None:
    chain = ChainBuilder(dataclasses.replace(make_rules(), state_bytes=500))
    commits = [chain.genesis, *chain.rounds(chain.genesis, "abc", 5)]
    desk = waiting_desk(chain)
    done = desk.feed(ev.ContributingChanged(True))
    assert [fetch.commit_id for fetch in only(done, ev.FetchState)] == [commits[4]]
    (newer,) = chain.rounds(commits[-1], "abc", 1)
    done = desk.feed(*(ev.RecordArrived(i, record) for i, record in chain.records.items()))
    assert not only(done, ev.FetchState)
    assert asked_for(done) == chain.facts(newer).listed, "the blobs above what is under way"


def test_a_state_that_could_not_be_had_leaves_both_ways_open() -> None:
    chain = ChainBuilder(dataclasses.replace(make_rules(), state_bytes=500))
    commits = [chain.genesis, *chain.rounds(chain.genesis, "abc", 5)]
    desk = waiting_desk(chain)
    desk.feed(ev.ContributingChanged(True))
    done = desk.feed(ev.StatePartHeld(commits[4], 400), ev.RequestFailed(commits[4]))
    assert asked_for(done) >= chain.facts(commits[2]).listed
    done = desk.wait(2.0)
    assert [fetch.commit_id for fetch in only(done, ev.FetchState)] == [commits[4]]


# ---------------------------------------------------------------- a genesis that is not computed


def given_chain(state_bytes: int = 500) -> ChainBuilder:
    rules = dataclasses.replace(make_rules(), state_bytes=state_bytes, is_genesis_given=True)
    return ChainBuilder(rules)


def newcomer(chain: ChainBuilder) -> Desk:
    """A member that has no state, and knows all records."""
    desk = Desk(chain, "z")
    desk.feed(*(ev.RecordArrived(i, record) for i, record in chain.records.items()))
    return desk


def states_asked_for(actions: list[ev.Action]) -> list[str]:
    return [fetch.commit_id for fetch in only(actions, ev.FetchState)]


def test_a_given_genesis_is_fetched_and_again_when_nobody_had_it() -> None:
    chain = given_chain()
    desk = newcomer(chain)
    assert not states_asked_for(desk.wait(0.0)), "a paused member leaves its machine alone"
    assert states_asked_for(desk.feed(ev.ContributingChanged(True))) == [chain.genesis]
    assert not states_asked_for(desk.wait(100.0))
    desk.feed(ev.RequestFailed(chain.genesis))
    assert states_asked_for(desk.wait(1.0)) == [chain.genesis]
    assert desk.machine.tip is None
    moved = only(desk.feed(ev.StateHeld(chain.genesis)), ev.MoveTo)
    assert [(move.commit_id, move.round_index) for move in moved] == [(chain.genesis, 0)]


def test_a_genesis_of_a_seed_is_never_fetched() -> None:
    chain = ChainBuilder(dataclasses.replace(make_rules(), state_bytes=500))
    chain.rounds(chain.genesis, "abc", 6)
    desk = newcomer(chain)
    assert not states_asked_for(desk.feed(ev.ContributingChanged(True)) + desk.wait(100.0))


@pytest.mark.parametrize(("blobs_held", "is_far"), [(True, False), (False, True)])
def test_who_comes_late_takes_a_later_state_and_needs_no_genesis(
    blobs_held: bool, is_far: bool
) -> None:
    chain = given_chain(state_bytes=10**6)  # dearer than all blobs, which begin with the genesis
    commits = chain.rounds(chain.genesis, "abc", 12 if is_far else 2)
    desk = newcomer(chain)
    if blobs_held:
        desk.learn()
    done = desk.feed(ev.ContributingChanged(True))
    (wanted,) = states_asked_for(done)
    assert wanted == (commits[-2] if is_far else commits[-1])
    desk.feed(ev.StateHeld(wanted))
    assert desk.machine.tip == wanted
    assert chain.genesis not in desk.machine.known.states


def test_a_young_chain_is_replayed_from_a_given_genesis_where_nobody_gives_its_state() -> None:
    chain = given_chain()
    commits = chain.rounds(chain.genesis, "abc", 2)
    desk = newcomer(chain)
    desk.learn()
    assert states_asked_for(desk.feed(ev.ContributingChanged(True))) == [commits[-1]]
    done = desk.feed(ev.RequestFailed(commits[-1]))
    assert states_asked_for(done) == [chain.genesis]
    done = desk.feed(ev.StateHeld(chain.genesis))
    assert [compute.commit_id for compute in only(done, ev.ComputeState)] == [commits[0]]
    desk.feed(ev.StateHeld(commits[0]))
    done = desk.feed(ev.StateHeld(commits[1]))
    assert desk.machine.tip == commits[1]
