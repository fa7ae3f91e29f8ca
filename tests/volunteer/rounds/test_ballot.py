"""Votes and the lock: rule 21."""

from __future__ import annotations

from tests.volunteer.rounds.chain_builder import ChainBuilder
from tests.volunteer.rounds.test_chain import grown
from volunteer.rounds.ballot import Ballot
from volunteer.rounds.records import Contribution


def ballot_of(chain: ChainBuilder) -> Ballot:
    return Ballot(chain.known.facts, lock_id=chain.genesis)


def vote(chain: ChainBuilder, ballot: Ballot, base: str) -> None:
    record = chain.known.contributions[chain.contribution("b", base)]
    assert isinstance(record, Contribution)
    ballot.note_vote(record)


def test_one_vote_a_height() -> None:
    chain, tip = grown()
    ballot = ballot_of(chain)
    one, other = chain.round(tip, "a"), chain.round(tip, "c")
    assert ballot.may_vote(chain.facts(one))
    vote(chain, ballot, one)
    assert not ballot.may_vote(chain.facts(one))
    assert not ballot.may_vote(chain.facts(other))
    assert not ballot.may_vote(chain.facts(tip))
    assert ballot.may_vote(chain.facts(chain.round(one, "a")))


def test_the_lock_is_the_highest_certified_commit_of_the_chain_voted_on() -> None:
    chain, tip = grown()
    ballot = ballot_of(chain)
    child = chain.round(tip, "ab")
    vote(chain, ballot, child)
    assert ballot.lock_id == tip
    assert ballot.lock_height == chain.facts(tip).height


def test_the_lock_keeps_a_voter_off_a_rival_that_is_certified_no_higher() -> None:
    chain, tip = grown()
    ballot = ballot_of(chain)
    ours = chain.round(tip, "ab")
    child = chain.round(ours, "ab")  # certifies `ours`
    vote(chain, ballot, child)
    assert ballot.lock_id == ours
    rival = chain.rounds(tip, "c", 4)[-1]
    assert chain.facts(rival).height > ballot.voted_height
    assert chain.facts(rival).certified_height < ballot.lock_height
    assert not ballot.may_vote(chain.facts(rival))
    assert ballot.may_vote(chain.facts(chain.round(child, "a")))


def test_the_lock_opens_for_a_higher_certificate_only() -> None:
    chain, tip = grown()
    ballot = ballot_of(chain)
    ours = chain.round(tip, "ab")
    vote(chain, ballot, chain.round(ours, "ab"))
    rival = chain.rounds(tip, "c", 2)[-1]
    same = chain.round(rival, "c")
    assert not ballot.may_vote(chain.facts(same))
    higher = chain.round(chain.round(same, "bc"), "bc")
    assert chain.facts(higher).certified_height > ballot.lock_height
    assert ballot.may_vote(chain.facts(higher))
    vote(chain, ballot, higher)
    assert ballot.lock_height == chain.facts(higher).certified_height


def test_a_vote_on_a_chain_certified_lower_does_not_lower_the_lock() -> None:
    chain, tip = grown()
    ballot = ballot_of(chain)
    ours = chain.round(tip, "ab")
    vote(chain, ballot, chain.round(ours, "ab"))
    # Another branch above the lock itself, on which it is not certified yet.
    other = chain.rounds(ours, "c", 2)[-1]
    assert chain.facts(other).certified_height < ballot.lock_height
    assert ballot.may_vote(chain.facts(other))
    vote(chain, ballot, other)
    assert ballot.lock_id == ours


def test_a_lock_gives_way_to_a_reset_between() -> None:
    chain, tip = grown()
    ballot = ballot_of(chain)
    # Two members of three go on alone and apart, beyond the expiry; `b` has voted on the higher.
    higher = chain.rounds(tip, "b", 14)[-1]
    lower = chain.rounds(tip, "c", 12)[-1]
    assert chain.facts(higher).resets == chain.facts(lower).resets == 1 + chain.facts(tip).resets
    vote(chain, ballot, higher)
    for _ in range(2):
        lower = chain.round(lower, "c", voters="")
    assert chain.facts(lower).height == ballot.voted_height
    assert not ballot.may_vote(chain.facts(lower)), "one vote a height, for all that"
    lower = chain.round(lower, "c", voters="")
    assert chain.facts(lower).certified_height < ballot.lock_height
    assert ballot.may_vote(chain.facts(lower))


def test_what_was_certified_below_a_reset_binds_beyond_it() -> None:
    chain, tip = grown()
    ballot = ballot_of(chain)
    ours = chain.round(tip, "ab")
    chain_on = chain.round(ours, "ab")  # certifies `ours`
    alone = chain.rounds(chain_on, "b", 14)[-1]
    assert chain.facts(alone).resets == 1 + chain.facts(tip).resets
    vote(chain, ballot, alone)
    assert chain.facts(ballot.lock_id).resets > chain.facts(tip).resets
    rival = chain.rounds(tip, "c", 7)[-1]
    ballot.voted_height = chain.facts(rival).height - 1  # as if it had voted less far
    assert chain.facts(rival).resets == chain.facts(tip).resets
    assert chain.facts(rival).certified_height < chain.facts(ours).height
    assert not ballot.may_vote(chain.facts(rival))


def test_a_vote_off_the_lock_moves_the_lock() -> None:
    chain, tip = grown()
    ballot = ballot_of(chain)
    vote(chain, ballot, chain.rounds(tip, "b", 14)[-1])
    was_locked_at = ballot.lock_height
    lower = chain.rounds(tip, "c", 12)[-1]
    for _ in range(4):
        lower = chain.round(lower, "c", voters="")
    assert chain.facts(lower).certified_height < was_locked_at
    assert ballot.may_vote(chain.facts(lower))
    vote(chain, ballot, lower)
    assert ballot.lock_id == chain.facts(lower).certified_id
    # Read back in any order, as after a crash, an older vote does not take it back down.
    vote(chain, ballot, tip)
    assert ballot.lock_id == chain.facts(lower).certified_id
