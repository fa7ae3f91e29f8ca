"""What the simulation of many members found, and what it needs to be fast."""

from __future__ import annotations

from dataclasses import replace

from tests.volunteer.rounds.desk import FAILOVER_S, GRACE_S, ROUND_S, Desk, desk_at, only, others
from tests.volunteer.rounds.test_chain import grown
from volunteer.rounds import events as ev
from volunteer.rounds.chain import rank_order
from volunteer.rounds.turn import Timing, least_turn_delay_s, turn_delay_s


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
