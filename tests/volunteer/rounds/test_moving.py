"""One member moves: where it stands, what it fetches, its books (rules 15 to 19, 24, 27 to 29)."""

from __future__ import annotations

import msgspec

from tests.volunteer.rounds.chain_builder import ChainBuilder, make_rules
from tests.volunteer.rounds.desk import (
    ROUND_S,
    Desk,
    desk_at,
    hear,
    hear_commit,
    newest_own,
    only,
    others,
)
from volunteer.rounds import events as ev
from volunteer.rounds.credit import WorkState
from volunteer.rounds.fork_choice import is_ancestor

# -------------------------------------------------------- rules 15 to 19: where to stand


def test_a_commit_is_computed_when_its_blobs_are_here_and_then_stood_on() -> None:
    chain, tip, desk = desk_at()
    child = chain.round(tip, "bc")
    assert only(desk.learn(held=False), ev.FetchBlob)
    assert not only(desk.actions[-1:], ev.ComputeState)
    (compute,) = only(desk.learn(), ev.ComputeState)
    assert compute.commit_id == child
    assert not only(desk.wait(1), ev.ComputeState)
    (move,) = only(desk.feed(ev.StateHeld(child)), ev.MoveTo)
    assert (move.commit_id, move.state_hash) == (child, chain.known.commits[child].state_hash)


def test_a_commit_with_a_wrong_hash_or_a_bad_blob_is_never_stood_on() -> None:
    chain, tip, desk = desk_at()
    wrong_hash = chain.round(tip, "b")
    bad_blob = chain.round(tip, "c")
    below = chain.round(bad_blob, "c")
    blob_id = next(iter(chain.facts(bad_blob).listed))
    desk.feed(ev.BlobRefused(blob_id, "not finite"))
    desk.learn()
    desk.feed(ev.StateRefused(wrong_hash, "another hash"))
    known = desk.machine.known
    assert known.refused.keys() == {wrong_hash, bad_blob, below}
    desk.feed(ev.StateHeld(wrong_hash), ev.StateHeld(below))
    assert desk.machine.tip == tip


def test_a_record_that_names_anothers_blob_is_judged_by_itself() -> None:
    """A stranger's record that is wrong about an honest blob must not cost anyone a commit."""
    chain, tip, desk = desk_at()
    honest = chain.contribution(others(desk)[0], tip)
    child = chain.commit(tip, [honest])
    stolen = chain.known.contributions[honest].blob_id
    copy = msgspec.structs.replace(chain.known.contributions[honest], author="thief")
    copied = chain.add(copy)
    assert copy.blob_id == stolen
    desk.feed(*(ev.RecordArrived(i, record) for i, record in chain.records.items()))
    desk.feed(ev.BlobRefused(copied, "its author is another"), ev.BlobHeld(honest))
    known = desk.machine.known
    assert child in known.usable
    assert copied not in known.held
    assert not known.refused


def test_a_commit_that_lists_the_copy_is_refused() -> None:
    chain, tip, desk = desk_at()
    honest = chain.contribution(others(desk)[0], tip)
    copy = msgspec.structs.replace(chain.known.contributions[honest], author="thief")
    copied = chain.add(copy)
    child = chain.commit(tip, [honest, copied])
    desk.feed(*(ev.RecordArrived(i, record) for i, record in chain.records.items()))
    desk.feed(ev.BlobHeld(honest), ev.BlobRefused(copied, "its author is another"))
    assert child in desk.machine.known.refused


def test_commits_wait_for_their_parent_and_for_what_they_list() -> None:
    chain, tip, desk = desk_at()
    listed = chain.contribution("b", tip)
    child = chain.commit(tip, [listed])
    grandchild = chain.commit(child, [chain.contribution("c", child)])
    done = hear_commit(desk, grandchild)
    asked = {action.record_id for action in only(done, ev.FetchRecord)}
    assert asked == {child, *chain.facts(grandchild).listed}
    asked = {action.record_id for action in only(hear_commit(desk, child), ev.FetchRecord)}
    assert asked == {listed}
    assert desk.machine.known.waiting.keys() == {child, grandchild}
    desk.learn()
    assert not desk.machine.known.waiting
    assert {child, grandchild} <= desk.machine.known.facts.keys()


def test_a_record_that_did_not_come_is_asked_for_again() -> None:
    chain, tip, desk = desk_at()
    child = chain.round(tip, "b")
    assert only(hear_commit(desk, child), ev.FetchRecord)
    assert not only(desk.wait(14.0), ev.FetchRecord)
    assert only(desk.wait(1.0), ev.FetchRecord)


def test_far_behind_the_state_is_fetched_of_a_commit_that_voters_stood_on() -> None:
    chain, tip, desk = desk_at()
    commits = chain.rounds(tip, "bc", 6)
    desk.feed(*(ev.RecordArrived(i, record) for i, record in chain.records.items()))
    (fetch,) = only(desk.actions, ev.FetchState)
    assert fetch.commit_id in commits
    asked = {action.contribution_id for action in only(desk.actions, ev.FetchBlob)}
    assert chain.facts(commits[0]).listed <= asked, "the lowest blobs are needed first"
    assert only(desk.feed(ev.StateHeld(fetch.commit_id)), ev.MoveTo)
    assert desk.machine.tip == fetch.commit_id
    (again,) = only(desk.actions, ev.FetchState)[1:]
    assert again.commit_id == chain.facts(commits[-1]).certified_id
    desk.feed(ev.StateHeld(again.commit_id))
    asked = {action.contribution_id for action in only(desk.actions, ev.FetchBlob)}
    assert chain.facts(commits[-1]).listed <= asked
    assert len(only(desk.actions, ev.FetchState)) == 2, "one step behind, blobs are enough"


def test_a_paused_member_computes_nothing_and_fetches_no_state() -> None:
    chain, tip, desk = desk_at()
    desk.feed(ev.ContributingChanged(False))
    commits = chain.rounds(tip, "bc", 6)
    done = desk.learn() + desk.wait(1)
    assert not only(done, ev.ComputeState)
    assert not only(done, ev.FetchState)
    assert commits[-1] in desk.machine.known.usable
    (compute,) = only(desk.feed(ev.ContributingChanged(True)), ev.ComputeState)
    assert compute.commit_id == commits[0]


def test_a_paused_member_keeps_the_blobs_of_eight_heights_and_no_more() -> None:
    chain, tip, desk = desk_at()
    desk.feed(ev.ContributingChanged(False))
    commits = chain.rounds(tip, "bc", 12)
    desk.feed(*(ev.RecordArrived(i, record) for i, record in chain.records.items()))
    while asked := only(desk.actions, ev.FetchBlob):
        desk.actions.clear()
        desk.feed(*(ev.BlobHeld(action.contribution_id) for action in asked))
    usable = [c for c in commits if c in desk.machine.known.usable]
    assert 8 <= len(usable) < 12


def test_the_blobs_of_the_banned_are_fetched_only_when_a_commit_lists_them() -> None:
    chain, tip, desk = desk_at()
    cheat = others(desk)[0]
    for tokens in (1, 2):
        hear(desk, chain.contribution(cheat, tip, tokens=tokens))
    assert desk.machine.banned == {cheat}
    listed = chain.contribution(cheat, tip, vote=False, tokens=3)
    record = chain.known.contributions[listed]
    assert not only(desk.feed(ev.RecordArrived(listed, record)), ev.FetchBlob)
    honest = chain.contribution(others(desk)[1], tip)
    done = desk.feed(ev.RecordArrived(honest, chain.known.contributions[honest]))
    assert [action.contribution_id for action in only(done, ev.FetchBlob)] == [honest]
    done = hear_commit(desk, chain.commit(tip, [listed]))
    assert [action.contribution_id for action in only(done, ev.FetchBlob)] == [listed]


def test_while_nobody_has_the_best_branch_another_is_pursued_and_later_the_best_again() -> None:
    chain, tip, desk = desk_at()
    first, second = others(desk)
    kept_back = chain.contribution(first, tip)
    best = chain.commit(tip, [kept_back, chain.contribution(second, tip)])
    chain.contribution(second, best, vote=False)
    other = chain.commit(tip, [chain.contribution("z", tip)])
    child = chain.commit(other, [chain.contribution("z", other)], proposer=first)
    asked: list[str] = []
    for action in desk.feed(*(ev.RecordArrived(i, r) for i, r in chain.records.items())):
        asked += [action.contribution_id] if isinstance(action, ev.FetchBlob) else []
    assert chain.known.header_choice.best(chain.genesis) == best
    assert not chain.facts(child).listed & set(asked)
    for _ in range(3):
        desk.feed(ev.RequestFailed(kept_back))
        asked += [a.contribution_id for a in only(desk.wait(4.0), ev.FetchBlob)]
    desk.feed(ev.RequestFailed(kept_back))
    assert chain.facts(other).listed <= set(asked) | {
        a.contribution_id for a in only(desk.actions, ev.FetchBlob)
    }
    assert desk.machine.known.withheld.keys() == {best}
    for commit_id in (other, child):
        for contribution_id in chain.facts(commit_id).listed:
            desk.feed(ev.BlobHeld(contribution_id))
    assert child in desk.machine.known.usable
    assert kept_back in {a.contribution_id for a in only(desk.wait(ROUND_S), ev.FetchBlob)}
    desk.learn()
    desk.feed(ev.BlobHeld(kept_back))
    assert not desk.machine.known.withheld
    desk.feed(ev.StateHeld(best))
    assert desk.machine.tip == best


def test_after_two_failed_computations_the_state_is_fetched_instead() -> None:
    chain, tip, desk = desk_at()
    child = chain.round(tip, "bc")
    desk.learn()
    for _ in range(2):
        desk.feed(ev.RequestFailed(child))
        done = desk.wait(30.0)
    assert only(done, ev.FetchState) == [
        ev.FetchState(child, chain.known.commits[child].state_hash)
    ]


def test_the_state_under_the_tip_is_got_again_when_its_file_is_gone() -> None:
    _, tip, desk = desk_at()
    done = desk.feed(ev.StateDropped(tip))
    assert [action for action in done if isinstance(action, ev.ComputeState | ev.FetchState)]
    assert not only(desk.wait(ROUND_S), ev.Encode)
    assert only(desk.feed(ev.StateHeld(tip)), ev.Encode)


def test_leaving_a_final_commit_without_a_reset_raises_the_alarm_and_stops() -> None:
    # An open run has a reset, so its choice begins at the genesis, and can see such a rival.
    chain = ChainBuilder(make_rules(publisher=""))
    fork = chain.rounds(chain.genesis, "abc", 4)[-1]
    tip = chain.rounds(fork, "ab", 4)[-1]
    desk = Desk(chain, "a")
    desk.stand_on(tip)
    final = chain.facts(tip).final_id
    assert desk.machine.final_id == final != fork
    rival = chain.rounds(fork, "bc", 8)[-1]  # b and c signed twice: not honest
    (alarm,) = only(desk.learn(verified=(rival,)), ev.RaiseAlarm)
    assert alarm.final_commit == final
    assert is_ancestor(chain.known.facts, alarm.other_tip, rival)
    assert desk.machine.tip == tip
    assert not only(desk.wait(ROUND_S), ev.Encode)
    assert not only(desk.wait(1), ev.RaiseAlarm)


# ------------------------------------------------------------------- rules 24 and 27 to 29


def test_loading_asks_for_nothing_and_the_first_tick_moves_once() -> None:
    chain, tip, desk = desk_at()
    for author in others(desk):
        chain.contribution(author, tip)
    desk.learn()
    commits = [c for c in chain.known.facts if c != chain.genesis]
    assert desk.restart(tuple(commits)) == []
    assert desk.machine.tip is None
    (move,) = only(desk.feed(ev.Ticked()), ev.MoveTo)
    assert move.commit_id == tip


def test_a_started_trainer_is_told_where_to_stand() -> None:
    _, tip, desk = desk_at()
    (move,) = only(desk.feed(ev.TrainerReady()), ev.MoveTo)
    assert (move.commit_id, move.pending) == (tip, ())


def test_unlisted_work_is_carried_once_it_cannot_be_listed_and_in_flight_with_its_carrier() -> None:
    chain, tip, desk = desk_at()
    desk.wait(ROUND_S)
    mine = desk.contribute(tip)
    mine_id = newest_own(desk)
    first = chain.round(tip, "".join(others(desk)))
    (move,) = only(desk.learn(verified=(first,)), ev.MoveTo)
    assert move.pending == ()
    second = chain.round(first, "".join(others(desk)))
    (move,) = only(desk.learn(verified=(second,)), ev.MoveTo)
    assert move.pending == (mine_id,)
    desk.feed(ev.WorkReported(5))
    assert only(desk.wait(ROUND_S), ev.Encode)
    desk.contribute(second, carries=(mine_id,))
    states = desk.machine.work_states()
    assert states[mine_id] is states[newest_own(desk)] is WorkState.IN_FLIGHT
    assert mine.vote


def test_the_trainer_is_told_again_when_it_was_placed_after_encoding_and_before_signing() -> None:
    chain, tip, desk = desk_at()
    desk.contribute(tip)
    mine_id = newest_own(desk)
    second = chain.rounds(tip, "".join(others(desk)), 2)[-1]
    desk.learn(verified=(second,))
    desk.feed(ev.WorkReported(5))
    assert only(desk.wait(ROUND_S), ev.Encode)[0].base == second
    third = chain.round(second, "".join(others(desk)))
    (move,) = only(desk.learn(verified=(third,)), ev.MoveTo)
    assert move.pending == (mine_id,)  # it is not known yet that the encoding took it along
    desk.contribute(second, carries=(mine_id,))
    move = only(desk.actions, ev.MoveTo)[-1]
    assert (move.commit_id, move.pending) == (third, ())


def test_own_work_given_up_stays_given_up_after_a_restart() -> None:
    chain, tip, desk = desk_at()
    desk.contribute(tip)
    mine_id = newest_own(desk)
    commits = chain.rounds(tip, "".join(others(desk)), 2)
    desk.learn()
    desk.restart((tip, *commits))
    desk.feed(ev.WorkDropped((mine_id,)))
    (move,) = only(desk.feed(ev.Ticked()), ev.MoveTo)
    assert move.pending == ()
    assert desk.machine.work_states()[mine_id] is WorkState.DROPPED


def test_after_a_switch_at_most_three_are_carried_and_the_older_dropped() -> None:
    chain, tip, desk = desk_at()
    me, node = desk.me, tip
    branch = []
    for _ in range(6):
        mine = chain.contribution(me, node, vote=False)
        node = chain.commit(node, [mine])
        branch.append((mine, node))
    desk.learn(verified=tuple(commit for _, commit in branch))
    assert desk.machine.tip == node
    assert not only(desk.actions, ev.DropWork)
    rival = chain.rounds(tip, "".join(others(desk)), 3)[-1]
    done = desk.learn(verified=(rival,))
    assert desk.machine.tip == rival
    (drop,) = only(done, ev.DropWork)
    assert drop.contribution_ids == tuple(mine for mine, _ in branch[:3])
    assert only(done, ev.MoveTo)[-1].pending == tuple(mine for mine, _ in branch[3:])


def test_finality_names_own_contributions_once() -> None:
    chain, tip, desk = desk_at()
    mine = chain.contribution(desk.me, tip)
    listed = chain.commit(tip, [mine, *(chain.contribution(o, tip) for o in others(desk))])
    commits = chain.rounds(listed, "abc", 3)
    done = desk.learn(verified=(listed, *commits))
    assert [a.own_listed for a in only(done, ev.Finalise) if a.own_listed.count(mine)] != []
    assert sum(a.own_listed.count(mine) for a in only(done, ev.Finalise)) == 1


def test_work_made_above_the_tip_is_still_in_flight() -> None:
    """Standing lower after a restart must not carry what a later commit may list."""
    chain, tip, desk = desk_at()
    child = chain.round(tip, "bc")
    made_above = chain.contribution(desk.me, child)
    hear(desk, made_above)
    desk.feed(*(ev.RecordArrived(i, record) for i, record in chain.records.items()))
    assert desk.machine.tip == tip, "the child's blobs are not here"
    assert desk.machine.work_states()[made_above] is WorkState.IN_FLIGHT
    sibling = chain.commit(tip, [chain.contribution("z", tip)])
    made_aside = chain.contribution(desk.me, sibling)
    hear(desk, made_aside)
    desk.feed(*(ev.RecordArrived(i, record) for i, record in chain.records.items()))
    assert desk.machine.work_states()[made_aside] is WorkState.IN_FLIGHT
