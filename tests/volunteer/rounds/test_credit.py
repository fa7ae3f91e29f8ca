"""The books on ids: rules 27 to 29."""

from __future__ import annotations

from tests.volunteer.rounds.chain_builder import RUN_ID, ChainBuilder, hash_of
from tests.volunteer.rounds.test_chain import grown
from volunteer.rounds.credit import WorkState, new_tokens, pending_ids, to_drop, work_states
from volunteer.rounds.own_work import OwnWork
from volunteer.rounds.records import Contribution

LISTED, IN_FLIGHT = WorkState.LISTED, WorkState.IN_FLIGHT
PENDING, DROPPED = WorkState.PENDING, WorkState.DROPPED


def work(height: int, tokens: int = 10, carries: tuple[str, ...] = ()) -> Contribution:
    return Contribution(
        run_id=RUN_ID,
        module_id="dense",
        round_index=height,
        author="me",
        base=hash_of(f"base {height}"),
        vote=True,
        blob_id=hash_of("blob"),
        blob_bytes=1,
        codec="int4",
        codec_version=1,
        tokens=tokens,
        carries=carries,
    )


def states(
    own: dict[str, Contribution], *, listed: str = "", flying: str = "", dropped: str = ""
) -> dict[str, WorkState]:
    return work_states(own, set(dropped), lambda i: i in listed, lambda i: i in flying)


def test_each_piece_is_in_exactly_one_place() -> None:
    own = {name: work(height) for height, name in enumerate("abcd")}
    assert states(own, listed="a", flying="b", dropped="c") == {
        "a": LISTED,
        "b": IN_FLIGHT,
        "c": DROPPED,
        "d": PENDING,
    }


def test_what_a_listed_contribution_carries_is_listed_with_it() -> None:
    own = {"a": work(1), "b": work(3, carries=("a",)), "c": work(5, carries=("a", "b"))}
    assert states(own, listed="b") == {"a": LISTED, "b": LISTED, "c": PENDING}
    assert states(own, listed="c") == dict.fromkeys("abc", LISTED)


def test_a_listing_outweighs_a_flight_and_a_flight_a_drop() -> None:
    own = {"a": work(1), "b": work(3, carries=("a",))}
    assert states(own, listed="a", flying="b", dropped="a")["a"] is LISTED
    assert states(own, flying="b", dropped="a") == {"a": IN_FLIGHT, "b": IN_FLIGHT}
    assert states(own, dropped="a") == {"a": DROPPED, "b": PENDING}


def test_the_oldest_beyond_three_are_dropped() -> None:
    own = {name: work(height) for name, height in zip("edcba", (4, 3, 2, 1, 0), strict=True)}
    pending = pending_ids(states(own), own)
    assert pending == list("abcde")
    assert to_drop(pending) == ["a", "b"]
    assert to_drop(pending[:3]) == []
    assert to_drop(pending, limit=1) == list("abcd")


def test_new_tokens_leave_out_what_was_carried() -> None:
    own = {
        "a": work(1, tokens=10),
        "b": work(3, tokens=25, carries=("a",)),
        "c": work(5, tokens=60, carries=("a", "b")),
    }
    assert new_tokens(own) == {"a": 10, "b": 15, "c": 35}


def test_new_tokens_when_what_is_carried_was_higher_than_its_carrier() -> None:
    # After a switch to a shorter branch the next contribution has a lower height.
    own = {"x": work(9, tokens=10), "y": work(7, tokens=25, carries=("x",))}
    assert new_tokens(own) == {"x": 10, "y": 15}
    assert new_tokens(dict(reversed(own.items()))) == {"x": 10, "y": 15}


def test_new_tokens_when_only_the_carrier_was_carried_on() -> None:
    # The chain lists `a` after a switch, so the third carries the new part of `b` alone.
    own = {
        "a": work(1, tokens=10),
        "b": work(3, tokens=25, carries=("a",)),
        "c": work(5, tokens=22, carries=("b",)),
    }
    assert new_tokens(own) == {"a": 10, "b": 15, "c": 7}


# ----------------------------------------------------------------------- on the tip's chain


def own_work(chain: ChainBuilder) -> OwnWork:
    return OwnWork(chain.known.facts, chain.known.listed_by, chain.genesis)


def own_contribution(
    chain: ChainBuilder, books: OwnWork, base: str, carries: tuple[str, ...] = ()
) -> str:
    contribution_id = chain.contribution("me", base, carries=carries)
    books.own[contribution_id] = chain.known.contributions[contribution_id]
    return contribution_id


def test_work_is_in_flight_for_two_commits_then_pending() -> None:
    chain, tip = grown()
    books = own_work(chain)
    mine = own_contribution(chain, books, tip)
    books.stand_on(chain.facts(tip))
    assert books.states()[mine] is IN_FLIGHT
    commits = chain.rounds(tip, "ab", 2)
    books.stand_on(chain.facts(commits[0]))
    assert books.states()[mine] is IN_FLIGHT
    books.stand_on(chain.facts(commits[1]))
    assert books.states()[mine] is PENDING
    assert books.pending() == [mine]


def test_a_late_listing_settles_it() -> None:
    chain, tip = grown()
    books = own_work(chain)
    mine = own_contribution(chain, books, tip)
    child = chain.round(tip, "ab")
    late = chain.commit(child, [mine, chain.contribution("a", child)])
    for commit_id in (tip, child, late, *chain.rounds(late, "ab", 3)):
        books.stand_on(chain.facts(commit_id))
    assert books.states()[mine] is LISTED
    assert books.listed_at(mine) == late


def test_after_a_switch_what_the_new_chain_lists_is_taken_out_and_the_other_put_in() -> None:
    chain, tip = grown()
    books = own_work(chain)
    first = own_contribution(chain, books, tip)
    without = chain.rounds(tip, "ab", 2)
    with_first = chain.commit(tip, [first, chain.contribution("c", tip)])
    books.stand_on(chain.facts(tip))
    for commit_id in without:
        assert not books.stand_on(chain.facts(commit_id))
    assert books.pending() == [first]
    second = own_contribution(chain, books, without[-1], carries=(first,))
    assert books.states() == {first: IN_FLIGHT, second: IN_FLIGHT}
    assert books.stand_on(chain.facts(with_first))  # a switch
    assert books.states() == {first: LISTED, second: PENDING}
    assert books.stand_on(chain.facts(without[-1]))
    assert books.states() == {first: IN_FLIGHT, second: IN_FLIGHT}


def test_final_work_is_looked_at_again_when_a_switch_goes_below_it() -> None:
    chain, tip = grown(expiry_rounds=3)
    books = own_work(chain)
    mine = own_contribution(chain, books, tip)
    listed = chain.commit(tip, [mine, chain.contribution("a", tip)])
    ours = chain.rounds(listed, "a", 12)[-1]
    assert chain.facts(ours).final_height > chain.facts(listed).height
    books.stand_on(chain.facts(ours))
    assert books.pending() == []
    other = chain.rounds(tip, "bc", 3)[-1]
    assert books.stand_on(chain.facts(other))
    assert books.pending() == [mine]
    assert books.stand_on(chain.facts(ours))
    assert books.pending() == []
