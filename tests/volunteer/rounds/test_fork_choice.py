"""Which branch to stand on: rules 16 to 18, and the path that is kept between changes."""

from __future__ import annotations

import random

import pytest

from tests.volunteer.rounds.chain_builder import ChainBuilder, make_rules
from tests.volunteer.rounds.test_chain import grown
from volunteer.rounds import loose_records
from volunteer.rounds.chain import rank_order
from volunteer.rounds.fork_choice import choose_tip, common_ancestor, is_ancestor, leaves_final


def chosen(chain: ChainBuilder, start: str | None = None) -> str:
    start = start or chain.genesis
    tip = choose_tip(chain.known.usable_choice.tree, start)
    assert chain.known.usable_choice.best(start) == tip
    return tip


def test_a_certified_branch_beats_a_longer_one_with_more_supporters() -> None:
    chain, tip = grown()
    certified = chain.round(tip, "c", voters="")
    votes = [chain.contribution(author, certified) for author in "ab"]
    certified = chain.commit(certified, votes)
    longer = chain.rounds(tip, "ab", 1)[-1]
    for author in "abc":
        chain.contribution(author, longer, vote=False)
    longer = chain.round(longer, "a", voters="")
    longer = chain.round(longer, "b", voters="")
    assert chosen(chain) == certified


def test_then_more_members_whose_contributions_are_known() -> None:
    chain, tip = grown()
    one = chain.round(tip, "a")
    two = chain.round(tip, "b")
    assert chosen(chain) == min(one, two)
    loser = max(one, two)
    chain.contribution("c", loser, vote=False)
    assert chosen(chain) == loser


def test_strangers_and_tokens_do_not_count() -> None:
    chain, tip = grown()
    one, two = chain.round(tip, "a"), chain.round(tip, "b")
    loser = max(one, two)
    for stranger in ("x", "y", "z"):
        chain.contribution(stranger, loser, tokens=10**9)
    assert chosen(chain) == min(one, two)


def test_then_the_lower_rank_then_the_lower_hash() -> None:
    chain, tip = grown()
    second = chain.commit(tip, [chain.contribution("a", tip)], proposer=order_at(chain, tip)[1])
    first = chain.commit(tip, [chain.contribution("b", tip)], proposer=order_at(chain, tip)[0])
    assert chosen(chain) == first
    again = chain.commit(
        tip, [chain.contribution("c", tip)], proposer=order_at(chain, tip)[0], state="other"
    )
    assert chosen(chain) == min(first, again)
    assert second != chosen(chain)


def order_at(chain: ChainBuilder, commit_id: str) -> tuple[str, ...]:
    return rank_order(chain.rules, chain.facts(commit_id))


def test_where_nobody_of_the_rosters_stands_a_reset_s_certified_roster_counts_before_rank() -> None:
    chain = ChainBuilder(make_rules(expiry_rounds=2))
    tip = chain.round(chain.genesis, "bc")  # the publisher a, who is the roster, is away
    lone, many = [peer for peer in order_at(chain, tip) if peer != "a"]
    alone = chain.commit(tip, [chain.contribution(lone, tip)], proposer=lone)
    together = chain.commit(tip, [chain.contribution(p, tip) for p in "bc"], proposer=many)
    assert chosen(chain) == alone, "by rank"
    alone = chain.rounds(alone, lone, 3)[-1]
    assert chain.facts(alone).resets > 0
    assert len(chain.facts(chain.facts(alone).certified_id).rosters[1]) == 1
    assert chosen(chain) == alone
    together = chain.rounds(together, "bc", 3)[-1]
    assert len(chain.facts(chain.facts(together).certified_id).rosters[1]) == 2
    assert chosen(chain) == together
    chain.contribution("a", alone)
    assert chosen(chain) == alone, "whoever the fork's rosters name counts before"


def test_certificates_beyond_a_reset_do_not_count() -> None:
    chain, tip = grown(expiry_rounds=4)
    alone = chain.rounds(tip, "a", 12)[-1]
    assert chain.facts(alone).resets == 1
    assert chain.facts(alone).certified_height > chain.facts(tip).height + 4
    majority = chain.rounds(tip, "bc", 2)[-1]
    assert chain.facts(majority).certified_height == chain.facts(tip).height + 1
    assert chosen(chain) == majority


def test_an_open_run_is_not_turned_over_by_a_stranger_s_first_commit() -> None:
    chain = ChainBuilder(make_rules(publisher=""))
    tip = chain.rounds(chain.genesis, "ab", 5)[-1]
    for number in range(32):  # some of these have a lower rank, some a lower hash
        stranger = f"stranger {number}"
        chain.commit(
            chain.genesis, [chain.contribution(stranger, chain.genesis)], proposer=stranger
        )
    assert chosen(chain) == tip


@pytest.mark.parametrize("number", range(8))
def test_two_foundings_meet_where_more_members_agreed_then_on_the_higher_certified(
    number: int,
) -> None:
    chain = ChainBuilder(make_rules(publisher=""))

    def found(authors: list[str], heights: int) -> str:
        tip = chain.genesis
        for _ in range(heights):
            ids = [chain.contribution(author, tip) for author in authors]
            tip = chain.commit(tip, ids, proposer=authors[0])
        return tip

    long_alone = found([f"long {number}"], 6)
    found([f"short {number}"], 3)
    assert chosen(chain) == long_alone
    together = found([f"one {number}", f"two {number}"], 3)
    assert chosen(chain) == together


def test_who_only_listed_what_all_made_on_the_genesis_turns_nobody_over() -> None:
    chain = ChainBuilder(make_rules(publisher=""))
    on_genesis = {author: chain.contribution(author, chain.genesis) for author in "abcd"}
    alone = chain.commit(chain.genesis, list(on_genesis.values()), proposer="d")
    chain.rounds(alone, "d", 4)
    together = chain.commit(chain.genesis, [on_genesis[author] for author in "abc"], proposer="a")
    went_on = chain.rounds(together, "abc", 4)[-1]
    assert chosen(chain) == went_on


def test_a_final_commit_is_left_only_across_a_reset() -> None:
    chain, tip = grown(expiry_rounds=4)
    final = chain.facts(tip).final_id
    parent = chain.facts(final).parent_id
    rival = chain.round(parent, "a")
    assert leaves_final(chain.known.facts, final, rival)
    assert not leaves_final(chain.known.facts, final, tip)
    after_reset = chain.rounds(tip, "a", 10)[-1]
    assert chain.facts(after_reset).resets == 1
    final_there = chain.facts(after_reset).final_id
    assert not leaves_final(chain.known.facts, final_there, tip)


def test_ancestors() -> None:
    chain, tip = grown()
    one, two = chain.rounds(tip, "a", 3)[-1], chain.rounds(tip, "b", 2)[-1]
    assert common_ancestor(chain.known.facts, one, two) == tip
    assert is_ancestor(chain.known.facts, tip, one)
    assert is_ancestor(chain.known.facts, one, one)
    assert not is_ancestor(chain.known.facts, two, one)


@pytest.mark.parametrize("seed", range(30))
def test_the_path_kept_is_the_path_walked(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loose_records, "MAX_PER_OUTSIDER_AND_BASE", 100)  # four people sign it all
    rng = random.Random(seed)
    publisher = rng.choice(["", "a"])
    chain = ChainBuilder(make_rules(publisher=publisher, expiry_rounds=3))
    commits = [chain.genesis]
    for _ in range(60):
        base = commits[-1 - min(len(commits) - 1, int(rng.expovariate(0.4)))]
        action = rng.random()
        if action < 0.6:
            authors = "".join(rng.sample("abcd", rng.randint(1, 3)))
            commits.append(chain.round(base, authors, voters=authors[: rng.randint(0, 3)]))
        elif action < 0.9:
            chain.contribution(rng.choice("abcdx"), base, vote=rng.random() < 0.5)
        elif base != chain.genesis and rng.random() < 0.3:
            chain.known.refuse(base, "wrong hash")
        start = chain.genesis
        if rng.random() < 0.2:
            start = choose_tip(chain.known.headers, chain.genesis)
        for choice in (chain.known.usable_choice, chain.known.header_choice):
            if choice.tree.may_stand_on(start):
                assert choice.best(start) == choose_tip(choice.tree, start)
