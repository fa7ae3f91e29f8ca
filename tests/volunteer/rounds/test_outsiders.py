"""Who is in no roster commits only when it is their turn, however early they sign."""

from __future__ import annotations

from tests.volunteer.rounds.chain_builder import ChainBuilder, make_rules
from tests.volunteer.rounds.desk import FAILOVER_S, GRACE_S, ROUND_S, Desk, desk_at, only
from volunteer.rounds import events as ev
from volunteer.rounds.chain import rank_of, rank_order


def hear(desk: Desk, *record_ids: str) -> list[ev.Action]:
    """Let records arrive with their blobs."""
    events: list[ev.Event] = []
    for record_id in record_ids:
        record = desk.chain.records[record_id]
        desk.disk[record_id] = record
        events += [ev.RecordArrived(record_id, record), ev.BlobHeld(record_id)]
    return desk.feed(*events)


def outsider_commit(chain: ChainBuilder, tip: str) -> tuple[str, str]:
    """A stranger lists its own work on the tip; return contribution and commit."""
    contribution = chain.contribution("stranger", tip)
    return contribution, chain.commit(tip, [contribution], proposer="stranger")


def test_a_stranger_cannot_end_a_round_before_its_turn() -> None:
    chain, tip, desk = desk_at()
    contribution, early = outsider_commit(chain, tip)
    hear(desk, contribution, early)
    known = desk.machine.known
    assert early in known.facts
    assert early not in known.refused, "it is not wrong, only early"
    assert early not in known.usable
    assert not only(desk.wait(1.0), ev.ComputeState)
    rank = rank_of(chain.rules, chain.facts(tip), "stranger")
    desk.wait(ROUND_S - 1.0)  # here its own round closes
    desk.wait(GRACE_S + rank * FAILOVER_S - 1.0)
    assert early not in known.usable
    desk.wait(1.0)
    assert early in known.usable, "nobody else has come"


def test_an_early_commit_counts_once_a_member_stands_on_it() -> None:
    chain, tip, desk = desk_at()
    contribution, early = outsider_commit(chain, tip)
    hear(desk, contribution, early)
    known = desk.machine.known
    stranger_again = chain.contribution("stranger", early)
    hear(desk, stranger_again)
    assert early not in known.usable, "its own word is nobody's"
    member = next(p for p in rank_order(chain.rules, chain.facts(tip)) if p != desk.me)
    hear(desk, chain.contribution(member, early))
    assert early in known.usable


def test_a_chain_of_early_commits_is_no_better() -> None:
    chain, tip, desk = desk_at()
    contribution, early = outsider_commit(chain, tip)
    again, higher = outsider_commit(chain, early)
    hear(desk, contribution, again, early, higher)
    desk.wait(10.0)
    assert not {early, higher} & desk.machine.known.usable
    assert desk.machine.tip == tip


def test_who_is_no_member_waits_for_nothing() -> None:
    chain, tip, _ = desk_at()
    desk = Desk(chain, "newcomer")
    desk.stand_on(tip)
    contribution, early = outsider_commit(chain, tip)
    hear(desk, contribution, early)
    assert early in desk.machine.known.usable


def test_what_was_stood_on_is_stood_on_after_a_restart() -> None:
    chain, tip, desk = desk_at()
    contribution, early = outsider_commit(chain, tip)
    hear(desk, contribution, early)
    rank = rank_of(chain.rules, chain.facts(tip), "stranger")
    desk.wait(ROUND_S + GRACE_S + rank * FAILOVER_S)
    desk.feed(ev.StateHeld(early))
    assert desk.machine.tip == early
    desk.restart((tip, early))
    desk.feed(ev.ContributingChanged(True))
    assert desk.machine.tip == early


def test_where_a_sole_member_stands_elsewhere_a_branch_goes_on_without_it() -> None:
    """Who founds a run alone is the only member there, also once it has gone over to others.

    Two that change places would else each hold back the other's branch for ever (seed 1018 of
    `hostile-4`: four members on two chains for 31 rounds, 8 of them with nothing wrong any more).
    """
    chain = ChainBuilder(make_rules(publisher="", max_contributions=8))
    genesis = chain.genesis
    alone = chain.commit(genesis, [chain.contribution("me", genesis)], proposer="me")
    theirs = chain.commit(
        genesis, [chain.contribution(name, genesis) for name in ("x", "y")], proposer="x"
    )
    desk = Desk(chain, "me")
    desk.stand_on(theirs)
    on_mine = [chain.contribution(name, alone) for name in ("v", "w")]
    above = chain.commit(alone, on_mine, proposer="v")
    hear(desk, *on_mine, above)
    known = desk.machine.known
    assert above in known.early, "the member of that branch is here, and its turn has not come"
    rank = rank_of(chain.rules, chain.facts(alone), "v")
    desk.wait(ROUND_S + GRACE_S + rank * FAILOVER_S - 1.0)
    assert above in known.early
    desk.wait(1.0)
    assert above not in known.early
