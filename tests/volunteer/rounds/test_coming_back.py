"""Who was away looks first where the others have gone, and acts then (beyond rules 20 to 23)."""

from __future__ import annotations

import pytest

from tests.volunteer.rounds.desk import (
    FAILOVER_S,
    GRACE_S,
    ROUND_S,
    Desk,
    desk_at,
    hear,
    hear_commit,
    only,
    others,
)
from tests.volunteer.rounds.test_chain import grown
from volunteer.rounds import events as ev
from volunteer.rounds.chain import rank_order
from volunteer.rounds.presence import Presence
from volunteer.rounds.turn import WAITED_ROUNDS

LONG_S = 6 * ROUND_S


def test_only_a_long_silence_is_an_absence() -> None:
    presence = Presence()
    presence.hear(1000.0, round_s=100.0)
    assert presence.waited_s(900.0, 1000.0) == 0.0, "it has just begun"
    for now_s in (1050.0, 1100.0):
        presence.hear(now_s, round_s=100.0)
    assert presence.waited_s(1020.0, 1100.0) == 80.0
    presence.hear(1151.0, round_s=100.0)
    assert presence.waited_s(1020.0, 1160.0) == 9.0
    presence.hear(1160.9, round_s=2.0)
    assert presence.waited_s(1020.0, 1161.0) == 10.0, "late by seconds, as a busy machine"


def test_a_farewell_is_said_once_and_only_after_contributing() -> None:
    presence = Presence()
    presence.changed(0.0, is_contributing=False)
    assert not presence.takes_leave()
    presence.has_left = False
    assert presence.takes_leave()
    assert not presence.takes_leave()
    presence.has_left = False
    presence.changed(1.0, is_contributing=True)
    assert not presence.takes_leave()


def two_go_on(desk: Desk, tip: str, num_heights: int) -> list[str]:
    """The others commit on `tip` and above; the member hears all but the blobs."""
    above = [tip]
    for _ in range(num_heights):
        made = [desk.chain.contribution(author, above[-1]) for author in others(desk)]
        for contribution_id in made:
            record = desk.chain.known.contributions[contribution_id]
            desk.feed(ev.RecordArrived(contribution_id, record))
        above.append(desk.chain.commit(above[-1], made, proposer=others(desk)[0]))
        hear_commit(desk, above[-1])
    return above[1:]


def test_work_on_the_parent_of_where_others_are_can_still_be_listed() -> None:
    _, tip, desk = desk_at()
    two_go_on(desk, tip, 1)
    assert [encode.base for encode in only(desk.sleep(LONG_S), ev.Encode)] == [tip]


def test_who_is_left_behind_moves_on_before_it_contributes() -> None:
    _, tip, desk = desk_at()
    above = two_go_on(desk, tip, 2)
    assert not only(desk.sleep(LONG_S), ev.Encode)
    desk.learn(verified=(above[-1],))
    assert desk.machine.tip == above[-1]
    assert [encode.base for encode in only(desk.wait(ROUND_S), ev.Encode)] == [above[-1]]


def test_on_a_fork_that_the_others_have_left_nobody_contributes() -> None:
    chain, base = grown()
    order = rank_order(chain.rules, chain.facts(base))
    desk = Desk(chain, order[0])
    alone = chain.commit(base, [chain.contribution(desk.me, base)], proposer=order[1])
    desk.stand_on(alone)
    assert desk.machine.tip == alone
    for author in others(desk):
        hear(desk, chain.contribution(author, base))
    two_go_on(desk, base, 2)
    assert not only(desk.sleep(LONG_S), ev.Encode)


@pytest.mark.parametrize("num_liars", [1, 2])
def test_commits_that_only_a_few_stand_on_keep_nobody(num_liars: int) -> None:
    chain, tip, desk = desk_at()
    liars = others(desk)[:num_liars]
    above = tip
    for _ in range(2):  # nobody gets the blobs
        made = [chain.contribution(liar, above) for liar in liars]
        for contribution_id in made:
            record = chain.known.contributions[contribution_id]
            desk.feed(ev.RecordArrived(contribution_id, record))
        above = chain.commit(above, made, proposer=liars[0])
        hear_commit(desk, above)
    is_half = 2 * (num_liars - 1) >= len(others(desk))
    asked = only(desk.wait(ROUND_S), ev.Encode)
    assert [encode.base for encode in asked] == ([] if is_half else [tip])


def test_what_cannot_be_had_keeps_nobody_longer_than_two_rounds() -> None:
    _, tip, desk = desk_at()
    two_go_on(desk, tip, 2)
    assert not only(desk.sleep(LONG_S), ev.Encode)
    assert not only(desk.wait(WAITED_ROUNDS * ROUND_S - 1), ev.Encode)
    assert [encode.base for encode in only(desk.wait(1), ev.Encode)] == [tip]


@pytest.mark.parametrize("is_pause", [False, True])
def test_turns_are_counted_from_the_return(is_pause: bool) -> None:
    rank = 2
    _, tip, desk = desk_at(rank)
    desk.wait(ROUND_S)
    desk.contribute(tip)
    if is_pause:
        desk.feed(ev.ContributingChanged(False))
        desk.wait(LONG_S)
        done = desk.feed(ev.ContributingChanged(True))
    else:
        done = desk.sleep(LONG_S)
    delay_s = GRACE_S + rank * FAILOVER_S
    done += desk.wait(delay_s - 1)
    assert not only(done, ev.ComputeProposal), "the lower ranks have had no turn that it saw"
    assert only(desk.wait(1 + FAILOVER_S), ev.ComputeProposal)


def test_time_asleep_is_no_waiting_for_a_child_on_which_others_stand() -> None:
    chain, tip, desk = desk_at()
    two_go_on(desk, tip, 1)
    (child,) = chain.known.children[tip]
    vote = chain.contribution(others(desk)[1], child, vote=False)
    desk.feed(ev.RecordArrived(vote, chain.known.contributions[vote]))
    desk.sleep(LONG_S)
    desk.contribute(tip)
    assert not only(desk.wait(WAITED_ROUNDS * ROUND_S - 1), ev.ComputeProposal)
    assert only(desk.wait(1), ev.ComputeProposal)


def test_work_that_turns_out_to_be_in_flight_above_is_not_carried_along() -> None:
    chain, tip, desk = desk_at()
    child = chain.draft(tip, [chain.contribution(a, tip) for a in others(desk)])
    child_id = chain.add(child)
    own = chain.contribution(desk.me, child_id)
    desk.feed(ev.RecordArrived(own, chain.known.contributions[own]), ev.BlobHeld(own))
    assert desk.machine.work.pending() == [own], "the commit that it was made on is not known"
    told = only(desk.feed(ev.TrainerReady()), ev.MoveTo)
    assert told[-1].pending == (own,)
    for contribution_id in child.contributions:
        record = chain.known.contributions[contribution_id]
        desk.feed(ev.RecordArrived(contribution_id, record))
    hear_commit(desk, child_id)
    done = desk.wait(ROUND_S)
    orders = [action for action in done if isinstance(action, (ev.MoveTo, ev.Encode))]
    assert [type(order) for order in orders] == [ev.MoveTo, ev.Encode]
    assert isinstance(orders[0], ev.MoveTo)
    assert orders[0].pending == ()
