"""One member acts: it contributes, votes, proposes and says farewell (rules 20 to 23, 26)."""

from __future__ import annotations

import pytest

from tests.volunteer.rounds.chain_builder import RUN_ID, ChainBuilder, hash_of, make_rules
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
    published,
)
from tests.volunteer.rounds.test_chain import grown
from volunteer.rounds import events as ev
from volunteer.rounds.chain import rank_order
from volunteer.rounds.records import Close, Commit, Contribution, Leaving, Record

# ------------------------------------------------------------------- rule 20: contributing


def test_the_round_closes_by_ones_own_clock_and_then_one_contributes_once() -> None:
    _, tip, desk = desk_at()
    assert not only(desk.wait(ROUND_S - 1), ev.Encode)
    done = desk.wait(1)
    assert [record.base for record in published(done, Close)] == [tip]
    assert only(done, ev.Encode) == [ev.Encode(tip, desk.machine.known.facts[tip].height)]
    assert not only(desk.wait(1), ev.Encode)
    assert desk.contribute(tip).base == tip
    desk.feed(ev.WorkReported(50))
    assert not only(desk.wait(1), ev.Encode)


def test_a_members_close_is_followed_and_a_strangers_is_not() -> None:
    _, tip, desk = desk_at()
    height = desk.machine.known.facts[tip].height
    for author, is_followed in (("stranger", False), (others(desk)[0], True)):
        close = Close(run_id=RUN_ID, module_id="dense", round_index=height, author=author, base=tip)
        done = desk.feed(ev.RecordArrived(hash_of(author), close))
        assert bool(only(done, ev.Encode)) is is_followed


def test_the_round_closes_early_at_the_token_target() -> None:
    _, _, desk = desk_at()
    desk.machine.timing.target_tokens = 500
    assert not only(desk.feed(ev.WorkReported(499)), ev.Encode)
    assert only(desk.feed(ev.WorkReported(500)), ev.Encode)


def test_nobody_contributes_without_work_or_while_paused() -> None:
    _, _, desk = desk_at()
    desk.feed(ev.WorkReported(0))
    assert not only(desk.wait(ROUND_S), ev.Encode)
    desk.feed(ev.ContributingChanged(False), ev.WorkReported(9))
    assert not only(desk.wait(1), ev.Encode)
    assert only(desk.feed(ev.ContributingChanged(True)), ev.Encode)


def test_a_failed_encoding_is_asked_for_again_after_a_pause() -> None:
    _, tip, desk = desk_at()
    desk.wait(ROUND_S)
    done = desk.feed(ev.WorkReported(0), ev.RequestFailed(tip), ev.WorkReported(7))
    assert not only(done, ev.Encode)
    assert only(desk.wait(1.0), ev.Encode)
    desk.feed(ev.RequestFailed(tip))
    assert not only(desk.wait(1.0), ev.Encode)
    assert only(desk.wait(1.0), ev.Encode)


def test_what_a_crash_left_unsigned_is_signed_when_the_trainer_reports_it() -> None:
    _, tip, desk = desk_at()
    record = desk.contribute(tip)  # nobody asked: it comes from the trainer's snapshot
    assert record.vote
    assert not only(desk.wait(ROUND_S), ev.Encode)


# --------------------------------------------------------------------- rule 21: votes


def test_one_vote_a_height_also_across_a_restart() -> None:
    chain, tip, desk = desk_at()
    assert desk.contribute(tip).vote
    parent = chain.facts(tip).parent_id
    rival = chain.commit(parent, [chain.contribution("b", parent, vote=False)], state="rival")
    assert not desk.restart((tip,))
    desk.learn(verified=(rival,))
    desk.feed(ev.ContributingChanged(True), ev.WorkReported(5))
    assert desk.machine.ballot.voted_height == chain.facts(tip).height
    assert not desk.contribute(rival).vote


def test_the_lock_is_the_same_after_a_restart() -> None:
    chain, tip, desk = desk_at()
    desk.contribute(tip)
    before = (desk.machine.ballot.lock_id, desk.machine.ballot.lock_height)
    assert before[1] == chain.facts(tip).certified_height > 0
    desk.restart((tip,))
    desk.feed(ev.Ticked())
    assert (desk.machine.ballot.lock_id, desk.machine.ballot.lock_height) == before


def test_the_lock_is_found_even_if_own_records_come_back_before_their_base() -> None:
    chain, tip, desk = desk_at()
    desk.contribute(tip)
    desk.disk = dict(reversed(desk.disk.items()))
    desk.restart((tip,))
    desk.feed(ev.Ticked())
    assert desk.machine.ballot.lock_height == chain.facts(tip).certified_height


def test_nothing_is_contributed_or_proposed_twice_after_a_restart() -> None:
    chain, tip, desk = desk_at()
    desk.wait(ROUND_S)
    desk.contribute(tip)
    for author in others(desk):
        done = hear(desk, chain.contribution(author, tip))
    (proposal,) = only(done, ev.ComputeProposal)
    ids = tuple(entry.contribution_id for entry in proposal.listed)
    done = desk.feed(ev.ProposalComputed(tip, ids, hash_of("state")))
    assert len(published(done, Commit)) == 1
    desk.restart((tip,))
    done = desk.feed(ev.ContributingChanged(True), ev.WorkReported(5)) + desk.wait(5 * ROUND_S)
    assert not only(done, ev.Encode)
    assert not only(done, ev.ComputeProposal)


# ------------------------------------------------------------------ rule 22: proposing


def test_rank_0_proposes_as_soon_as_everyone_expected_is_there() -> None:
    chain, tip, desk = desk_at()
    desk.wait(ROUND_S)
    desk.contribute(tip)
    first, second = others(desk)
    assert not only(hear(desk, chain.contribution(first, tip)), ev.ComputeProposal)
    (proposal,) = only(hear(desk, chain.contribution(second, tip)), ev.ComputeProposal)
    assert proposal.parent == tip
    assert len(proposal.listed) == 3


def test_rank_0_goes_on_without_the_missing_after_the_grace() -> None:
    chain, tip, desk = desk_at()
    desk.wait(ROUND_S)
    desk.contribute(tip)
    hear(desk, chain.contribution(others(desk)[0], tip))
    assert not only(desk.wait(GRACE_S - 0.1), ev.ComputeProposal)
    assert only(desk.wait(0.2), ev.ComputeProposal)


@pytest.mark.parametrize("rank", [1, 2])
def test_rank_k_stands_in_after_the_grace_and_k_failover_intervals(rank: int) -> None:
    chain, tip, desk = desk_at(rank)
    desk.wait(ROUND_S)
    desk.contribute(tip)
    for author in others(desk):
        assert not only(hear(desk, chain.contribution(author, tip)), ev.ComputeProposal)
    assert not only(desk.wait(GRACE_S + rank * FAILOVER_S - 0.1), ev.ComputeProposal)
    assert only(desk.wait(0.2), ev.ComputeProposal)


def test_a_proposer_waits_longer_while_the_votes_are_no_quorum() -> None:
    _, tip, desk = desk_at()
    desk.wait(ROUND_S)
    desk.contribute(tip)
    assert not only(desk.wait(GRACE_S + 0.8 * FAILOVER_S - 0.1), ev.ComputeProposal)
    assert only(desk.wait(0.2), ev.ComputeProposal)


@pytest.mark.parametrize("height", range(5))
def test_a_founder_that_knows_nobody_waits_the_grace_until_the_third_commit(height: int) -> None:
    chain = ChainBuilder(make_rules(publisher=""))
    tip = [chain.genesis, *chain.rounds(chain.genesis, "a", height)][-1]
    desk = Desk(chain, "a")
    desk.stand_on(tip)
    desk.wait(ROUND_S)
    desk.contribute(tip)
    assert bool(only(desk.actions, ev.ComputeProposal)) is (height >= 3)
    desk.wait(GRACE_S + 3 * FAILOVER_S)
    assert len(only(desk.actions, ev.ComputeProposal)) == 1


def test_a_second_close_does_not_put_the_turn_off() -> None:
    chain, tip, desk = desk_at()
    desk.wait(ROUND_S)
    desk.contribute(tip)
    desk.wait(GRACE_S)
    elsewhere = chain.facts(tip).parent_id
    height = chain.facts(elsewhere).height
    author = others(desk)[0]
    close = Close(
        run_id=RUN_ID, module_id="dense", round_index=height, author=author, base=elsewhere
    )
    desk.feed(ev.RecordArrived(hash_of("close"), close))
    assert desk.machine.closed_at_s == ROUND_S


def test_late_work_is_listed_too_but_not_that_of_the_banned() -> None:
    chain, tip, desk = desk_at()
    late = chain.contribution("late", chain.facts(tip).parent_id)
    hear(desk, late)
    cheat = others(desk)[0]
    good = chain.contribution(cheat, tip)
    hear(desk, good)
    other = chain.contribution(cheat, tip, tokens=11)
    (ban,) = only(hear(desk, other), ev.BanPeer)
    assert (ban.peer, ban.first, ban.second) == (cheat, good, other)
    assert desk.machine.banned == {cheat}
    desk.wait(ROUND_S)
    desk.contribute(tip)
    (proposal,) = only(desk.wait(GRACE_S + FAILOVER_S), ev.ComputeProposal)
    authors = {entry.contribution.author: entry.is_late for entry in proposal.listed}
    assert authors == {"late": True, desk.me: False}


def test_a_commit_that_lists_a_banned_peers_work_is_followed_all_the_same() -> None:
    chain, tip, desk = desk_at(1)
    cheat = others(desk)[0]
    hear(desk, chain.contribution(cheat, tip))
    hear(desk, chain.contribution(cheat, tip, tokens=11))
    listed = chain.contribution(cheat, tip, vote=False, tokens=12)
    child = chain.commit(tip, [listed])
    done = hear_commit(desk, child) + hear(desk, listed)
    assert [action.commit_id for action in only(done, ev.ComputeState)] == [child]


def test_two_commits_for_one_parent_and_rank_are_a_proof_and_both_stay_usable() -> None:
    chain, tip, desk = desk_at(1)
    proposer = rank_order(chain.rules, chain.facts(tip))[0]
    listed = chain.contribution(proposer, tip)
    hear(desk, listed)
    one, two = (chain.commit(tip, [listed], state=name) for name in ("one", "two"))
    hear_commit(desk, one)
    (ban,) = only(hear_commit(desk, two), ev.BanPeer)
    assert (ban.peer, ban.first, ban.second) == (proposer, one, two)
    assert {one, two} <= desk.machine.known.usable


# ------------------------------------------------------------------------------ rule 23


def stand(chain: ChainBuilder, author: str, commit_id: str, desk: Desk) -> None:
    hear(desk, chain.contribution(author, commit_id, vote=False))


def ready_to_propose() -> tuple[ChainBuilder, str, Desk, str]:
    """A rank 1 whose turn comes, with a child known whose blob nobody has."""
    chain, tip, desk = desk_at(1)
    desk.wait(ROUND_S)
    desk.contribute(tip)
    proposer = rank_order(chain.rules, chain.facts(tip))[0]
    withheld = chain.contribution(proposer, tip)
    child = chain.commit(tip, [withheld])
    record = chain.known.contributions[withheld]
    desk.feed(ev.RecordArrived(withheld, record))
    hear_commit(desk, child)
    return chain, tip, desk, child


def test_a_child_that_only_its_proposer_stands_on_delays_nobody() -> None:
    chain, _, desk, child = ready_to_propose()
    stand(chain, chain.facts(child).proposer, child, desk)
    assert only(desk.wait(GRACE_S + 2 * FAILOVER_S), ev.ComputeProposal)


def test_nor_does_it_when_it_certifies_the_tip_itself() -> None:
    chain, tip, desk = desk_at(1)
    proposer = rank_order(chain.rules, chain.facts(tip))[0]
    withheld = chain.contribution(proposer, tip)
    other = next(peer for peer in others(desk) if peer != proposer)
    child = chain.commit(tip, [withheld, chain.contribution(other, tip)])
    assert chain.facts(child).certified_id == tip
    desk.feed(*(ev.RecordArrived(i, record) for i, record in chain.records.items()))
    desk.wait(ROUND_S)
    desk.contribute(tip)
    assert only(desk.wait(GRACE_S + 2 * FAILOVER_S), ev.ComputeProposal)


def test_a_child_that_somebody_else_stands_on_is_waited_for_until_two_rounds() -> None:
    chain, _, desk, child = ready_to_propose()
    stand(chain, "other", child, desk)
    assert not only(desk.wait(ROUND_S - 1), ev.ComputeProposal)
    assert only(desk.wait(1), ev.ComputeProposal)


def test_no_proposal_once_a_quorum_stands_on_a_child() -> None:
    chain, _, desk, child = ready_to_propose()
    for author in "abc":
        if author != desk.me:
            stand(chain, author, child, desk)
    assert not only(desk.wait(5 * ROUND_S), ev.ComputeProposal)


def test_no_proposal_while_a_certified_commit_lies_above() -> None:
    chain, _, desk, child = ready_to_propose()
    votes = [chain.contribution(author, child) for author in "abc"]
    above = chain.commit(child, votes)
    for vote in votes:
        desk.feed(ev.RecordArrived(vote, chain.known.contributions[vote]))
    hear_commit(desk, above)
    assert chain.facts(above).certified_id == child
    assert not only(desk.wait(5 * ROUND_S), ev.ComputeProposal)


def test_a_refused_child_delays_nobody() -> None:
    chain, _, desk, child = ready_to_propose()
    for author in "abc":
        if author != desk.me:
            stand(chain, author, child, desk)
    desk.feed(ev.StateRefused(child, "another hash"))
    assert only(desk.wait(GRACE_S + 2 * FAILOVER_S), ev.ComputeProposal)


def test_a_proposal_is_not_signed_when_a_child_came_while_it_was_computed() -> None:
    chain, tip, desk = desk_at()
    desk.wait(ROUND_S)
    mine = desk.contribute(tip)
    (proposal,) = only(desk.wait(GRACE_S + FAILOVER_S), ev.ComputeProposal)
    child = chain.round(tip, "bc" if desk.me == "a" else "ac")
    for author in others(desk):
        stand(chain, author, child, desk)
    desk.learn(held=False)
    ids = tuple(entry.contribution_id for entry in proposal.listed)
    done = desk.feed(ev.ProposalComputed(tip, ids, hash_of("state")))
    assert not published(done, Commit)
    assert mine.base == tip


# ---------------------------------------------------------------------------- farewells


def test_a_pause_says_farewell_once_and_only_after_having_taken_part() -> None:
    chain, tip = grown()
    desk = Desk(chain, "newcomer")
    desk.stand_on(tip)
    assert not published(desk.feed(ev.ContributingChanged(False)), Leaving)
    desk.feed(ev.ContributingChanged(True))
    desk.contribute(tip)
    (leaving,) = published(desk.feed(ev.ContributingChanged(False)), Leaving)
    assert leaving.base == tip
    assert not published(desk.feed(ev.ContributingChanged(False)), Leaving)
    desk.restart((tip,))
    assert not published(desk.feed(ev.ContributingChanged(False)), Leaving)


def test_a_proposer_lists_others_farewells_and_not_its_own() -> None:
    chain, tip, desk = desk_at()
    desk.contribute(tip)
    desk.feed(ev.ContributingChanged(False), ev.ContributingChanged(True))
    leaver = others(desk)[0]
    farewell = chain.leaving(leaver, tip)
    desk.feed(ev.RecordArrived(farewell, chain.known.leavings[farewell]))
    desk.wait(ROUND_S)
    (proposal,) = only(desk.wait(GRACE_S + FAILOVER_S), ev.ComputeProposal)
    ids = tuple(entry.contribution_id for entry in proposal.listed)
    (commit,) = published(desk.feed(ev.ProposalComputed(tip, ids, hash_of("s"))), Commit)
    assert commit.leaving == (farewell,)


# ----------------------------------------------------------------------------- sampling


def test_a_full_commit_lists_a_seeded_choice_of_the_eligible() -> None:
    chain = ChainBuilder(make_rules(max_contributions=3))
    tip = chain.rounds(chain.genesis, "a", 4)[-1]
    desk = Desk(chain, "a")
    desk.stand_on(tip)
    for author in "bcdefgh":
        hear(desk, chain.contribution(author, tip))
    desk.wait(ROUND_S)
    desk.contribute(tip)
    (proposal,) = only(desk.actions + desk.wait(GRACE_S + FAILOVER_S), ev.ComputeProposal)
    ids = [entry.contribution_id for entry in proposal.listed]
    assert len(ids) == 3
    assert ids == sorted(ids)


def test_records_of_another_run_or_module_are_not_kept() -> None:
    _, tip, desk = desk_at()
    foreign: Record = Contribution(
        run_id="cd" * 32,
        module_id="dense",
        round_index=1,
        author="b",
        base=tip,
        vote=True,
        blob_id=hash_of("x"),
        blob_bytes=1,
        codec="int4",
        codec_version=1,
        tokens=1,
    )
    assert desk.feed(ev.RecordArrived(hash_of("foreign"), foreign)) == []
    assert not desk.machine.known.has_record(hash_of("foreign"))
