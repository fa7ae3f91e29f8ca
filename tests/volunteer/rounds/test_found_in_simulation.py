"""What the simulation of many members found, and what it needs to be fast."""

from __future__ import annotations

from dataclasses import replace

from tests.volunteer.rounds.chain_builder import ChainBuilder, make_rules
from tests.volunteer.rounds.desk import FAILOVER_S, GRACE_S, ROUND_S, Desk, desk_at, only, others
from tests.volunteer.rounds.test_chain import grown
from volunteer.rounds import events as ev
from volunteer.rounds.chain import rank_of, rank_order
from volunteer.rounds.sampling import OTHERS_PART, sample_contributions
from volunteer.rounds.turn import (
    LAGGING_HEIGHTS,
    QUORUM_WAIT_FRACTION,
    Timing,
    eligible_contributions,
    least_turn_delay_s,
    roster_votes,
    turn_delay_s,
    votes_for,
)


def test_the_ranks_that_are_kept_belong_to_one_commit_and_one_set_of_rules() -> None:
    chain, tip = grown()
    facts = chain.facts(tip)
    order = rank_order(chain.rules, facts)
    assert rank_order(chain.rules, facts) == order
    demoted = replace(facts, demoted_until={order[0]: facts.height})
    assert rank_order(chain.rules, demoted) == (*order[1:], order[0])
    strict = replace(chain.rules, expiry_rounds=1)
    gone = replace(facts, seen={**facts.seen, order[0]: facts.height - 1})
    assert rank_order(strict, gone) == order[1:]
    assert set(rank_order(chain.rules, gone)) == set(order)


def test_nobody_s_turn_comes_before_the_least_delay() -> None:
    chain, tip = grown()
    timing = Timing(round_s=ROUND_S, grace_s=GRACE_S, failover_s=FAILOVER_S)
    facts = chain.facts(tip)
    for _ in range(3):
        for peer in (*rank_order(chain.rules, facts), "stranger"):
            least_s = least_turn_delay_s(chain.known, facts, timing, peer)
            assert least_s <= turn_delay_s(chain.known, facts, timing, peer)
        chain.contribution(others(Desk(chain, "c"))[0], tip)


def test_the_first_turn_of_an_open_run_hardly_waits_for_who_is_not_there() -> None:
    """Found beside hivemind: four members of ranks 1 to 3 waited for a rank 0 that nobody had."""
    chain = ChainBuilder(make_rules(publisher=""))
    timing = Timing(round_s=ROUND_S, grace_s=GRACE_S, failover_s=FAILOVER_S)
    facts = chain.facts(chain.genesis)
    by_rank: dict[int, str] = {}
    for peer in (f"peer {number}" for number in range(64)):
        by_rank.setdefault(rank_of(chain.rules, facts, peer), peer)
    assert set(by_rank) == {0, 1, 2, 3}

    def delay_s(rank: int) -> float:
        least_s = least_turn_delay_s(chain.known, facts, timing, by_rank[rank])
        turn_s = turn_delay_s(chain.known, facts, timing, by_rank[rank])
        assert least_s <= turn_s
        return turn_s

    chain.contribution(by_rank[3], chain.genesis)
    assert delay_s(3) == 4 * GRACE_S
    chain.contribution(by_rank[1], chain.genesis)
    assert delay_s(3) == 3 * GRACE_S + FAILOVER_S
    assert delay_s(1) == 2 * GRACE_S
    chain.contribution(by_rank[0], chain.genesis, is_held=False)
    assert delay_s(1) == 2 * GRACE_S
    chain.contribution(by_rank[2], chain.genesis)
    assert delay_s(3) == 2 * GRACE_S + 2 * FAILOVER_S


def test_where_finality_lags_a_turn_waits_for_votes_whose_blobs_are_on_their_way() -> None:
    chain, tip = grown()
    timing = Timing(round_s=ROUND_S, grace_s=GRACE_S, failover_s=FAILOVER_S)
    facts = chain.facts(tip)
    lagging = replace(facts, final_height=facts.height - LAGGING_HEIGHTS)
    first = rank_order(chain.rules, facts)[0]
    without_quorum_s = GRACE_S + QUORUM_WAIT_FRACTION * FAILOVER_S
    chain.contribution("a", tip, is_held=False)
    chain.contribution("b", tip, vote=False, is_held=False)
    assert turn_delay_s(chain.known, lagging, timing, first) == without_quorum_s
    vote = chain.contribution("c", tip, is_held=False)
    assert turn_delay_s(chain.known, facts, timing, first) == without_quorum_s
    assert turn_delay_s(chain.known, lagging, timing, first) == without_quorum_s + FAILOVER_S
    chain.known.hold(vote)
    chain.contribution("d", tip)
    assert turn_delay_s(chain.known, lagging, timing, first) == without_quorum_s + FAILOVER_S
    chain.contribution("b", tip)
    assert turn_delay_s(chain.known, lagging, timing, first) == GRACE_S, "two of three votes"


def test_what_comes_together_is_taken_in_before_anything_is_done() -> None:
    chain, tip, desk = desk_at(rank=0)
    desk.wait(ROUND_S)
    desk.contribute(tip)
    events: list[ev.Event] = []
    for author in others(desk):
        contribution_id = chain.contribution(author, tip)
        record = chain.known.contributions[contribution_id]
        events += [ev.RecordArrived(contribution_id, record), ev.BlobHeld(contribution_id)]
    own = next(iter(desk.machine.own))
    events.append(ev.BlobHeld(own))
    proposals = only(desk.machine.handle_all(events, desk.now_s), ev.ComputeProposal)
    assert len(proposals) == 1
    assert len(proposals[0].listed) == 3


def test_a_commit_beside_the_path_that_the_headers_count_is_fetched_or_set_aside() -> None:
    """Else headers and usable commits choose different branches for ever (a run of 8, seed 4)."""
    chain, tip = grown()
    first, second = rank_order(chain.rules, chain.facts(tip))[:2]
    ours = chain.commit(tip, [chain.contribution("a", tip)], proposer=first)
    theirs = chain.commit(tip, [chain.contribution("b", tip)], proposer=second)
    above, later = rank_order(chain.rules, chain.facts(theirs))[:2]
    went_on = chain.commit(theirs, [chain.contribution("c", theirs)], proposer=above)
    lacking = chain.contribution("stranger", theirs, is_held=False)
    beside = chain.commit(theirs, [lacking], proposer=later)
    for author, base in (("a", ours), ("b", ours), ("b", went_on), ("a", beside)):
        chain.contribution(author, base)
    desk = Desk(chain, "c")
    desk.learn(held=False)
    held = [i for i in chain.known.contributions if i != lacking]
    desk.feed(*(ev.BlobHeld(i) for i in held), ev.StateHeld(chain.genesis), ev.StateHeld(ours))
    done = desk.feed(ev.ContributingChanged(True))
    known, start = desk.machine.known, chain.facts(tip).final_id
    assert known.usable_choice.best(start) == ours
    assert known.header_choice.best(start) == went_on
    assert went_on in known.usable
    assert lacking in {action.contribution_id for action in only(done, ev.FetchBlob)}
    for _ in range(3):
        desk.feed(ev.RequestFailed(lacking))
        desk.wait(31.0)
    desk.feed(ev.RequestFailed(lacking))
    assert beside in known.withheld
    assert known.header_choice.best(start) == ours


def test_the_rosters_fill_three_quarters_of_a_list_at_most() -> None:
    members, others = [f"m{i}" for i in range(20)], [f"o{i}" for i in range(20)]
    chosen = sample_contributions([*members, *others], 8, seed="x", first=members)
    assert len(chosen) == 8
    assert sum(i in members for i in chosen) >= 6
    few = sample_contributions([*members[:3], *others], 8, seed="x", first=members)
    assert set(members[:3]) < set(few)
    lists = [
        sample_contributions([*members, *others], 8, seed=f"{i}", first=members) for i in range(50)
    ]
    assert {i for chosen in lists for i in chosen} == {*members, *others}


def test_what_is_late_does_not_keep_the_votes_of_a_round_out_of_a_list() -> None:
    """Else nothing is certified promptly while many are late (30 members, seed 72)."""
    people, most = "abcdefgh", 8
    chain = ChainBuilder(make_rules(publisher="", max_contributions=most))
    tip = chain.genesis
    for _ in range(3):
        tip = chain.round(tip, people)
    for _ in range(6):
        # Four of this round's are late: of the next one all are there in time.
        made = {author: chain.contribution(author, tip) for author in people}
        child = chain.commit(tip, [made[author] for author in people[:4]])
        facts = chain.facts(child)
        in_time = {chain.contribution(author, child) for author in people}
        eligible = eligible_contributions(chain.known, facts, ())
        assert len(eligible) == len(people) + 4
        first = roster_votes(chain.known, facts, eligible)
        votes = votes_for(chain.known, facts, eligible)
        chosen = sample_contributions(eligible, most, seed=child, first=first, votes=votes)
        assert len(votes.intersection(chosen)) >= most - most // OTHERS_PART
        assert votes == in_time
        tip = chain.commit(child, chosen)
        assert chain.facts(tip).is_parent_prompt


def test_where_more_are_active_than_a_commit_lists_a_committee_makes_them_final() -> None:
    """Else no list could hold a quorum, and nothing became final (30 members, 10 a commit)."""
    people, most = "abcdefghijkl", 6
    chain = ChainBuilder(make_rules(publisher="", max_contributions=most))
    tip = chain.genesis
    for _ in range(12):
        facts = chain.facts(tip)
        made = {author: chain.contribution(author, tip) for author in people}
        chosen = sample_contributions(
            sorted(made.values()),
            most,
            seed=tip,
            first=roster_votes(chain.known, facts, made.values()),
        )
        assert len(chosen) == most
        tip = chain.commit(tip, chosen)
    facts = chain.facts(tip)
    assert len(facts.seen) > most, "who founded the run does not fill every list"
    assert len(facts.rosters[0] | facts.rosters[1]) <= most
    assert facts.final_height == facts.height - 2
    assert facts.resets == 1
    assert len(facts.rosters[1]) == most // 3
