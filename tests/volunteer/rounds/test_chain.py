"""What a chain says: ROUNDS.md rules 5 to 13, each with its bounds."""

from __future__ import annotations

import msgspec
import pytest

from tests.volunteer.rounds.chain_builder import ChainBuilder, make_rules
from volunteer.rounds.chain import (
    PROBATION_ROUNDS,
    active_at,
    commit_problem,
    expected_at,
    is_quorum,
    listed_in_order,
    rank_of,
    rank_order,
)
from volunteer.rounds.records import Commit


def grown(expiry_rounds: int = 8) -> tuple[ChainBuilder, str]:
    """A chain on which a, b and c are in both rosters."""
    chain = ChainBuilder(make_rules(expiry_rounds=expiry_rounds))
    tip = chain.genesis
    for _ in range(8):
        tip = chain.round(tip, "abc")
    assert chain.facts(tip).rosters == (frozenset("abc"), frozenset("abc"))
    return chain, tip


def problem(chain: ChainBuilder, commit: Commit) -> str:
    known = chain.known
    parent = known.facts[commit.parent]
    return commit_problem(chain.rules, parent, commit, known.contributions, known.leavings)


# ------------------------------------------------------------------------------- rule 5


def test_a_commit_may_list_what_was_made_on_its_parent_and_late_on_its_parents_parent() -> None:
    chain, tip = grown()
    late = chain.contribution("d", chain.facts(tip).parent_id)
    new = chain.contribution("a", tip)
    commit_id = chain.commit(tip, [late, new])
    listed = listed_in_order(
        chain.known.commits[commit_id].contributions, chain.facts(tip), chain.known.contributions
    )
    assert {entry.contribution_id: entry.is_late for entry in listed} == {late: True, new: False}


def test_older_work_cannot_be_listed() -> None:
    chain, tip = grown()
    older = chain.facts(chain.facts(tip).parent_id).parent_id
    draft = chain.draft(tip, [chain.contribution("d", older)])
    assert "was not made on its parent" in problem(chain, draft)


def test_what_the_parent_lists_cannot_be_listed_again() -> None:
    chain, tip = grown()
    listed = chain.contribution("a", tip)
    child = chain.commit(tip, [listed])
    draft = chain.draft(child, [listed, chain.contribution("b", child)])
    assert "lists already" in problem(chain, draft)


def test_an_author_cannot_have_two_contributions_on_one_base_listed() -> None:
    chain, tip = grown()
    one, other = (chain.contribution("a", tip, vote=vote) for vote in (True, False))
    assert "two contributions" in problem(chain, chain.draft(tip, [one, other]))
    child = chain.commit(tip, [one])
    draft = chain.draft(child, [other, chain.contribution("b", child)])
    assert "two contributions" in problem(chain, draft)


def test_a_contribution_that_states_a_wrong_height_cannot_be_listed() -> None:
    chain, tip = grown()
    good = chain.contribution("a", tip)
    wrong = chain.add(msgspec.structs.replace(chain.known.contributions[good], round_index=3))
    assert "was not made on its parent" in problem(chain, chain.draft(tip, [wrong]))


@pytest.mark.parametrize("rank", [1, 2, 7])
def test_a_proposer_cannot_claim_another_rank(rank: int) -> None:
    chain, tip = grown()
    draft = chain.draft(tip, [chain.contribution("a", tip)], rank=rank)
    assert problem(chain, draft) == "its proposer does not have that rank"


def test_an_empty_list_and_one_that_is_too_long_are_no_commits() -> None:
    chain = ChainBuilder(make_rules(max_contributions=2))
    ids = [chain.contribution(author, chain.genesis) for author in "abc"]
    assert problem(chain, chain.draft(chain.genesis, [])) == "it lists 0 contributions"
    assert problem(chain, chain.draft(chain.genesis, ids)) == "it lists 3 contributions"
    assert problem(chain, chain.draft(chain.genesis, ids[:2])) == ""


# -------------------------------------------------------------------------------- rule 6


def test_an_author_is_active_until_expiry_rounds_after_it_was_last_listed() -> None:
    chain, tip = grown(expiry_rounds=4)
    commits = chain.rounds(tip, "ab", 4)
    assert "c" in active_at(chain.rules, chain.facts(commits[2]))
    assert "c" not in active_at(chain.rules, chain.facts(commits[3]))
    assert "c" in expected_at(chain.facts(commits[1]))
    assert "c" not in expected_at(chain.facts(commits[2]))


def test_who_leaves_is_not_active_until_it_is_listed_again() -> None:
    chain, tip = grown()
    mine = chain.contribution("a", tip)
    left = chain.commit(tip, [mine], leaving=[chain.leaving("c", tip)])
    assert active_at(chain.rules, chain.facts(left)) == frozenset("ab")
    assert expected_at(chain.facts(left)) == frozenset("ab")
    back = chain.round(left, "ac")
    assert active_at(chain.rules, chain.facts(back)) == frozenset("abc")


def test_a_farewell_counts_with_a_contribution_on_its_base_but_not_after_a_later_one() -> None:
    chain, tip = grown()
    farewell = chain.leaving("c", tip)
    same = chain.commit(
        tip, [chain.contribution("a", tip), chain.contribution("c", tip)], leaving=[farewell]
    )
    assert chain.facts(same).away == frozenset("c")
    child = chain.commit(tip, [chain.contribution("b", tip)])
    later = chain.commit(child, [chain.contribution("c", child)], leaving=[farewell])
    assert chain.facts(later).away == frozenset()


def test_an_old_farewell_cannot_be_listed() -> None:
    chain, tip = grown()
    old = chain.leaving("c", chain.facts(chain.facts(tip).parent_id).parent_id)
    draft = chain.draft(tip, [chain.contribution("a", tip)], leaving=[old])
    assert problem(chain, draft) == "it lists an old farewell"


# ----------------------------------------------------------------------- rules 7, 8 and 9


@pytest.mark.parametrize(
    ("quorum", "peers", "expected"),
    [
        ((1, 2), "ab", True),
        ((1, 2), "a", False),
        ((2, 3), "ab", False),
        ((2, 3), "abc", True),
        ((1, 2), "xyz", False),
    ],
)
def test_a_quorum_is_more_than_its_part(
    quorum: tuple[int, int], peers: str, expected: bool
) -> None:
    rules = make_rules(quorum=quorum)
    roster = frozenset("abc")
    assert is_quorum(rules, (roster, roster), frozenset(peers)) is expected


def test_a_quorum_needs_both_rosters() -> None:
    rules = make_rules()
    rosters = (frozenset("abc"), frozenset("cde"))
    assert not is_quorum(rules, rosters, frozenset("ab"))
    assert not is_quorum(rules, rosters, frozenset("de"))
    assert is_quorum(rules, rosters, frozenset("bcd"))


def test_half_is_no_quorum_and_nobody_is_a_quorum_of_nobody() -> None:
    rules = make_rules()
    four = frozenset("abcd")
    assert not is_quorum(rules, (four, four), frozenset("ab"))
    assert not is_quorum(rules, (frozenset(), frozenset()), frozenset())


def test_the_childs_list_certifies_promptly() -> None:
    chain, tip = grown()
    child = chain.round(tip, "abc", voters="ab")
    facts = chain.facts(child)
    assert (facts.is_parent_prompt, facts.certified_id) == (True, tip)


def test_contributions_without_a_vote_certify_nothing() -> None:
    chain, tip = grown()
    before = chain.facts(tip).certified_id
    facts = chain.facts(chain.round(tip, "abc", voters="a"))
    assert (facts.is_parent_prompt, facts.certified_id) == (False, before)


def test_late_votes_in_the_grandchild_certify_but_not_promptly() -> None:
    chain, tip = grown()
    child = chain.round(tip, "a")
    late = chain.contribution("b", tip)
    grandchild = chain.commit(child, [late, chain.contribution("a", child)])
    facts = chain.facts(grandchild)
    assert facts.certified_id == tip
    assert not chain.facts(child).is_parent_prompt
    assert not facts.is_parent_prompt


def test_votes_for_another_commit_do_not_count() -> None:
    chain, tip = grown()
    parent = chain.facts(tip).parent_id
    late = [chain.contribution(author, parent) for author in "de"]
    facts = chain.facts(chain.commit(tip, [*late, chain.contribution("a", tip)]))
    assert facts.votes_for_parent == frozenset("a")


def test_final_once_promptly_certified_by_a_certified_child() -> None:
    chain, tip = grown()
    child = chain.round(tip, "ab")
    before = chain.facts(child).final_height
    assert before == chain.facts(tip).height - 1
    grandchild = chain.round(child, "ab")
    assert chain.facts(grandchild).final_id == tip


def test_final_when_the_child_is_certified_only_by_its_grandchild() -> None:
    chain, tip = grown()
    child = chain.round(tip, "ab")  # certifies the tip promptly
    third = chain.round(child, "a")  # one of three votes for the child
    assert chain.facts(third).final_id != tip
    late = chain.contribution("b", child)
    fourth = chain.commit(third, [late, chain.contribution("c", third)])
    assert chain.facts(fourth).certified_id == child
    assert chain.facts(fourth).final_id == tip


def test_a_late_certificate_makes_nothing_final_by_itself() -> None:
    chain, tip = grown()
    child = chain.round(tip, "a")
    late = chain.contribution("b", tip)
    votes = [chain.contribution(author, child) for author in "ab"]
    grandchild = chain.commit(child, [late, *votes])
    facts = chain.facts(grandchild)
    # Both tip and child are certified, but tip was not promptly.
    assert facts.certified_id == child
    assert facts.final_height < chain.facts(tip).height


# ------------------------------------------------------------------------- rules 10 and 11


def test_the_roster_pair_moves_one_step_with_a_final_commit() -> None:
    chain = ChainBuilder()
    first = chain.round(chain.genesis, "ab")
    second = chain.round(first, "ab")
    assert chain.facts(second).rosters == (frozenset("a"), frozenset("a"))
    third = chain.round(second, "ab")  # makes the first final
    assert chain.facts(third).final_id == first
    assert chain.facts(third).rosters == (frozenset("a"), frozenset("ab"))
    assert chain.facts(third).rosters_since == 3


def test_a_final_commit_below_the_last_change_does_not_move_the_pair() -> None:
    chain = ChainBuilder()
    commits = chain.rounds(chain.genesis, "ab", 3)
    fourth = chain.round(commits[-1], "abc")
    assert chain.facts(fourth).final_height == 2  # below the change at 3
    assert chain.facts(fourth).rosters == (frozenset("a"), frozenset("ab"))
    fifth = chain.round(fourth, "abc")
    assert chain.facts(fifth).final_height == 3
    assert chain.facts(fifth).rosters == (frozenset("ab"), frozenset("abc"))


def test_a_reset_comes_after_expiry_rounds_without_a_final_commit() -> None:
    chain, tip = grown(expiry_rounds=4)
    final_height = chain.facts(tip).final_height
    commits = chain.rounds(tip, "a", 6)
    heights = [chain.facts(c).height for c in commits if chain.facts(c).resets]
    # c and b are active, so a quorum, until 4 heights after their last listing.
    assert heights[0] == max(final_height + 4, chain.facts(tip).height + 4)
    reset = next(c for c in commits if chain.facts(c).resets)
    assert chain.facts(reset).rosters == (frozenset("a"), frozenset("a"))
    assert chain.facts(reset).last_reset == heights[0]
    assert chain.facts(commits[-1]).resets == 1


def test_the_expiry_is_counted_from_the_last_final_commit() -> None:
    chain, tip = grown(expiry_rounds=4)
    farewells = [chain.leaving(author, tip) for author in "bc"]
    node = chain.commit(tip, [chain.contribution("a", tip)], leaving=farewells)
    final_height = chain.facts(node).final_height
    for height in range(final_height + 3, final_height + 6):
        assert chain.facts(node).resets == (height >= final_height + 4)
        assert chain.facts(node).height == height
        node = chain.round(node, "a", voters="")


def test_no_reset_while_the_active_are_a_quorum() -> None:
    chain, tip = grown(expiry_rounds=4)
    node = tip
    for _ in range(6):  # listed without votes: nothing becomes final, everyone stays active
        node = chain.round(node, "abc", voters="")
    assert chain.facts(node).resets == 0
    assert chain.facts(node).height - chain.facts(node).final_height > 4


def test_an_open_run_makes_its_roster_with_its_first_commit() -> None:
    chain = ChainBuilder(make_rules(publisher=""))
    first = chain.round(chain.genesis, "xy")
    assert chain.facts(first).rosters == (frozenset("xy"), frozenset("xy"))
    assert (chain.facts(first).resets, chain.facts(first).last_reset) == (1, 1)
    assert chain.facts(chain.rounds(first, "xy", 3)[-1]).resets == 1


# ------------------------------------------------------------------------- rules 12 and 13


def test_ranks_that_missed_their_turn_rank_last_for_demote_rounds() -> None:
    chain, tip = grown()
    order = rank_order(chain.rules, chain.facts(tip))
    child = chain.commit(
        tip, [chain.contribution(author, tip) for author in "abc"], proposer=order[2]
    )
    first, last = chain.facts(child).height, chain.facts(child).height + 7
    node = child
    for height in range(first, last + 1):
        assert chain.facts(node).height == height
        assert chain.facts(node).demoted_until == dict.fromkeys(order[:2], last)
        assert rank_order(chain.rules, chain.facts(node))[0] == order[2]
        node = chain.round(node, "abc")
    assert chain.facts(node).demoted_until == {}


def test_who_was_seen_lately_ranks_before_who_was_not() -> None:
    chain, tip = grown()
    node = chain.rounds(tip, "ab", 3)[-1]
    assert rank_order(chain.rules, chain.facts(node))[-1] == "c"


def test_who_lists_nobody_else_does_not_become_the_only_one_to_propose() -> None:
    chain = ChainBuilder(make_rules())
    everyone = "abcdefgh"
    node = chain.rounds(chain.genesis, everyone, 4)[-1]
    for _ in range(3):  # "h" has had three turns, and censored
        node = chain.round(node, "h")
    firsts = set()
    for _ in range(4):
        order = rank_order(chain.rules, chain.facts(node))
        assert set(order) == set(everyone)
        firsts.add(order[0])
        node = chain.round(node, "h")
    assert firsts - {"h"}


def test_the_order_changes_with_the_height_and_not_with_the_proposers_choice() -> None:
    chain, tip = grown()
    orders = {rank_order(chain.rules, chain.facts(c)) for c in chain.rounds(tip, "abc", 12)}
    assert len(orders) > 1
    one = chain.round(tip, "abc")
    other = chain.round(tip, "abc")
    assert one != other
    assert rank_order(chain.rules, chain.facts(one)) == rank_order(chain.rules, chain.facts(other))


def test_outsiders_rank_after_all_that_the_chain_knows() -> None:
    chain, tip = grown()
    ranks = {rank_of(chain.rules, chain.facts(tip), f"stranger {i}") for i in range(64)}
    assert ranks == {3, 4, 5, 6}


def test_probation_ends_after_five_commits() -> None:
    chain = ChainBuilder()
    node = chain.genesis
    for count in range(PROBATION_ROUNDS + 2):
        mine = chain.contribution("a", node)
        parent = chain.facts(node)
        entry = listed_in_order((mine,), parent, chain.known.contributions)[0]
        assert entry.is_on_probation is (count < PROBATION_ROUNDS)
        node = chain.commit(node, [mine])
