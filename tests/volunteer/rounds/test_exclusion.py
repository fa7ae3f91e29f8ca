"""Who is excluded: strikes by themselves, on a chain, and against those who would misuse them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.volunteer.rounds.chain_builder import ChainBuilder, make_rules
from tests.volunteer.rounds.desk import ROUND_S, Desk, only, published
from tests.volunteer.rounds.test_chain import problem
from volunteer.rounds import events as ev
from volunteer.rounds.chain import (
    active_at,
    excluded_at,
    expected_at,
    is_quorum,
    listed_in_order,
    rank_of,
    rank_order,
)
from volunteer.rounds.exclusion import (
    EXCLUSION_ROUNDS,
    PROBATION_ROUNDS,
    Strikes,
    max_struck,
)
from volunteer.rounds.records import Commit

EIGHT = "abcdefgh"


def grown(authors: str = EIGHT, rounds: int = 8) -> tuple[ChainBuilder, str]:
    """A chain on which all of `authors` are in both rosters, and past their probation."""
    chain = ChainBuilder(make_rules(publisher=authors[0]))
    tip = chain.rounds(chain.genesis, authors, rounds)[-1]
    assert chain.facts(tip).rosters == (frozenset(authors), frozenset(authors))
    return chain, tip


# ------------------------------------------------------------------------- strikes alone


def played(pattern: str, listed: str = EIGHT) -> Strikes:
    """Return the strikes after rounds in which `h` does well (.) or badly (x), or is away (_)."""
    strikes = Strikes()
    for height, what in enumerate(pattern, start=1):
        authors = [a for a in listed if a != "h" or what != "_"]
        strikes = strikes.after(height, listed=authors, marked=["h"] if what == "x" else [])
    return strikes


@pytest.mark.parametrize(
    ("pattern", "is_out"),
    [
        ("x", False),
        ("xx", True),
        ("x.x", True),
        ("x..x", False),
        ("x_x", True),
        ("x____x", True),  # a listing counts, not a height
        ("..x..x..x..", False),
    ],
)
def test_two_strikes_in_three_listings_exclude(pattern: str, is_out: bool) -> None:
    assert played(pattern).is_excluded("h", len(pattern) + 1) is is_out


def test_an_exclusion_ends_and_probation_follows() -> None:
    strikes = played("xx")
    last = 2 + EXCLUSION_ROUNDS
    assert strikes.is_excluded("h", last)
    assert not strikes.is_excluded("h", last + 1)
    assert strikes.is_on_probation("h", last + PROBATION_ROUNDS)
    assert not strikes.is_on_probation("h", last + PROBATION_ROUNDS + 1)
    for height in range(3, last + PROBATION_ROUNDS + 1):
        strikes = strikes.after(height, listed="abc")
    assert strikes == Strikes(), "nothing of it is kept for ever"


def test_blame_falls_on_the_listing_before() -> None:
    strikes = Strikes().after(1, listed=EIGHT)
    strikes = strikes.after(2, listed=EIGHT, blamed="h")
    assert strikes.marks == {"h": 0b10}
    strikes = strikes.after(3, listed=EIGHT, blamed="h")
    assert strikes.is_excluded("h", 4)


def test_a_mark_and_blame_for_one_contribution_are_one_strike() -> None:
    strikes = Strikes().after(1, listed=EIGHT, marked="h")
    strikes = strikes.after(2, listed=EIGHT, blamed="h")
    assert not strikes.is_excluded("h", 3)


def test_no_roster_loses_more_than_a_quarter() -> None:
    roster = frozenset(EIGHT)
    strikes = Strikes()
    for height in (1, 2):
        strikes = strikes.after(height, listed=EIGHT, marked="fgh", rosters=[roster])
    assert strikes.excluded(3) == frozenset("fg")
    assert strikes.marks == {"h": 0b11}, "its strikes stay, until there is room"
    strangers = Strikes().after(1, listed="wxyz", marked="wxyz")
    strangers = strangers.after(2, listed="wxyz", marked="wxyz", rosters=[roster])
    assert strangers.excluded(3) == frozenset("wxyz")


def test_small_commits_strike_nobody() -> None:
    assert [max_struck(num) for num in (0, 1, 4, 5, 7, 8, 12, 32)] == [0, 0, 0, 1, 1, 2, 3, 8]


@given(
    st.lists(
        st.tuples(
            st.sets(st.sampled_from(EIGHT)),
            st.sets(st.sampled_from(EIGHT)),
            st.sets(st.sampled_from(EIGHT)),
        ),
        max_size=12,
    )
)
def test_what_holds_for_any_rounds(rounds: list[tuple[set[str], set[str], set[str]]]) -> None:
    strikes, roster = Strikes(), frozenset(EIGHT)
    for height, (listed, marked, blamed) in enumerate(rounds, start=1):
        before = strikes
        strikes = strikes.after(
            height, listed=listed, marked=marked & listed, blamed=blamed, rosters=[roster]
        )
        assert len(strikes.excluded(height + 1) & roster) * 4 <= len(roster)
        newly = strikes.excluded(height + 1) - before.excluded(height + 1)
        assert newly <= marked | blamed | before.marks.keys(), "nobody without a strike"
        assert all(0 < bits < 8 for bits in strikes.marks.values())


# -------------------------------------------------------------------------- on the chain


def excluded_one() -> tuple[ChainBuilder, str]:
    """A chain whose tip has just excluded h."""
    chain, tip = grown()
    tip = chain.round(tip, EIGHT, bad="h")
    tip = chain.round(tip, EIGHT, bad="h")
    assert excluded_at(chain.facts(tip)) == {"h"}
    return chain, tip


def test_an_excluded_author_is_not_expected_has_no_turn_and_leaves_the_rosters() -> None:
    chain, tip = excluded_one()
    facts = chain.facts(tip)
    assert "h" not in expected_at(facts) | active_at(chain.rules, facts)
    assert "h" not in rank_order(chain.rules, facts)
    assert rank_of(chain.rules, facts, "h") >= 7, "a stranger's"
    assert ["h" in roster for roster in facts.rosters] == [True, False], "made with the exclusion"
    for _ in range(4):
        tip = chain.round(tip, "abcdefg")
    assert chain.facts(tip).rosters == (frozenset("abcdefg"),) * 2
    assert chain.facts(tip).final_height == chain.facts(tip).height - 2, "the rest is a quorum"


def test_its_work_has_no_weight_and_then_little() -> None:
    chain, tip = excluded_one()
    for height in range(EXCLUSION_ROUNDS + PROBATION_ROUNDS + 1):
        facts = chain.facts(tip)
        contribution_id = chain.contribution("h", tip)
        (listed,) = listed_in_order((contribution_id,), facts, chain.known.contributions)
        assert listed.is_excluded is (height < EXCLUSION_ROUNDS)
        assert listed.is_on_probation is (height < EXCLUSION_ROUNDS + PROBATION_ROUNDS)
        tip = chain.round(tip, "abcdefg")


def test_a_commit_may_not_mark_more_than_a_quarter_nor_an_excluded_one() -> None:
    chain, tip = grown()
    ids = {author: chain.contribution(author, tip) for author in EIGHT}

    def why(*bad: str) -> str:
        return problem(chain, chain.draft(tip, ids.values(), marked=[ids[a] for a in bad]))

    assert why("a", "b") == ""
    assert why("a", "b", "c") == "it marks the work of 3 of 8 authors"
    four = chain.draft(tip, [ids[a] for a in "abcd"], marked=[ids["a"]])
    assert problem(chain, four) == "it marks the work of 1 of 4 authors"
    chain, tip = excluded_one()
    ids = {author: chain.contribution(author, tip) for author in EIGHT}
    assert why("h") == "it marks the work of an excluded author"


def test_a_minority_that_proposes_in_turn_cannot_exclude_by_marks_nobody_else_finds() -> None:
    # Marks are compared like the state's hash: who computes others refuses the commit.
    chain, tip = grown()
    desk = Desk(chain, "a")
    desk.stand_on(tip)
    lie = chain.round(tip, EIGHT, bad="a")
    desk.learn()
    desk.feed(ev.StateRefused(lie, "it marks 1 contributions as bad work, its list gives 0"))
    assert desk.machine.tip == tip
    assert lie in desk.machine.known.refused
    assert excluded_at(desk.machine.known.facts[tip]) == frozenset()


# --------------------------------------------------------------------------- the machine


def test_a_proposer_lists_its_work_only_where_there_is_no_other() -> None:
    chain, tip = excluded_one()
    me = rank_order(chain.rules, chain.facts(tip))[0]
    desk = Desk(chain, me)
    desk.stand_on(tip)
    desk.wait(ROUND_S)
    desk.contribute(tip)
    for author in sorted(set(EIGHT) - {me}):
        chain.contribution(author, tip)
    fetched = {a.contribution.author for a in only(desk.learn(held=False), ev.FetchBlob)}
    assert fetched == set(EIGHT) - {me, "h"}
    (proposal,) = only(desk.learn(), ev.ComputeProposal)
    assert {one.contribution.author for one in proposal.listed} == set("abcdefg")


def test_the_round_does_not_wait_for_an_excluded_one() -> None:
    chain, tip = excluded_one()
    facts = chain.facts(tip)
    votes = frozenset("abcdefg")
    assert expected_at(facts) == votes
    assert is_quorum(chain.rules, facts.rosters, votes)


def test_alone_an_excluded_one_goes_on_until_it_may_contribute_again() -> None:
    chain, tip = excluded_one()
    for _ in range(EXCLUSION_ROUNDS + 1):
        tip = chain.commit(tip, [chain.contribution("h", tip)], proposer="h")
    assert "h" in active_at(chain.rules, chain.facts(tip))
    facts = chain.facts(tip)
    (listed,) = listed_in_order((chain.contribution("h", tip),), facts, chain.known.contributions)
    assert not listed.is_excluded


def test_alone_its_machine_proposes_its_own_work() -> None:
    chain, tip = excluded_one()
    desk = Desk(chain, "h")
    desk.stand_on(tip)
    desk.wait(ROUND_S)
    record = desk.contribute(tip)
    actions = desk.wait(100 * ROUND_S)
    (proposal,) = only(actions, ev.ComputeProposal)
    assert [one.contribution for one in proposal.listed] == [record]
    assert proposal.listed[0].is_excluded


def test_what_is_marked_goes_into_the_commit() -> None:
    chain, tip = grown()
    desk = Desk(chain, rank_order(chain.rules, chain.facts(tip))[0])
    desk.stand_on(tip)
    desk.wait(ROUND_S)
    desk.contribute(tip)
    for author in sorted(set(EIGHT) - {desk.me}):
        chain.contribution(author, tip)
    (proposal,) = only(desk.learn(), ev.ComputeProposal)
    ids = tuple(one.contribution_id for one in proposal.listed)
    actions = desk.feed(ev.ProposalComputed(tip, ids, "a" * 64, ids[:1]))
    (commit,) = published(actions, Commit)
    assert commit.marks == ids[:1]


# ---------------------------------------------------------------------------- stale blobs


def test_repeated_content_is_stale_and_a_copy_in_the_same_round_is_not() -> None:
    chain, tip = grown()
    first = chain.contribution("a", tip, content="x")
    copy = chain.contribution("b", tip, content="x")
    new_tip = chain.commit(tip, [copy, chain.contribution("c", tip, content="y")])
    facts = chain.facts(new_tip)

    def is_stale(contribution_id: str) -> bool:
        (listed,) = listed_in_order((contribution_id,), facts, chain.known.contributions)
        return listed.is_stale

    assert not is_stale(first), "late, of the same round: its copier was only faster"
    assert is_stale(chain.contribution("b", new_tip, content="x"))
    assert is_stale(chain.contribution("d", new_tip, content="y")), "another's"
    assert not is_stale(chain.contribution("d", new_tip, content="z"))
    assert not is_stale(chain.contribution("d", new_tip))


def test_a_proposer_cannot_make_old_what_it_leaves_out_and_lists_a_copy_of() -> None:
    chain, parent = grown()
    tip = chain.round(parent, EIGHT[:-1])
    honest = chain.contribution("a", tip, content="x")
    copy = chain.contribution(EIGHT[-1], parent, content="x")
    new_tip = chain.commit(tip, [copy, chain.contribution("c", tip, content="y")])
    (listed,) = listed_in_order((honest,), chain.facts(new_tip), chain.known.contributions)
    assert listed.is_late
    assert not listed.is_stale


def test_content_is_remembered_for_eight_commits() -> None:
    chain, tip = grown()
    tip = chain.commit(tip, [chain.contribution("a", tip, content="x")])
    found = []
    for _ in range(9):
        (listed,) = listed_in_order(
            (chain.contribution("d", tip, content="x"),),
            chain.facts(tip),
            chain.known.contributions,
        )
        found.append(listed.is_stale)
        tip = chain.round(tip, "abc")
    assert found == [True] * 8 + [False]
    assert chain.facts(tip).contents == {}
