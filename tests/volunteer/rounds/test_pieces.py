"""Sampling, requests, waiting commits, and that a long chain stays cheap."""

from __future__ import annotations

import time

import msgspec
import pytest

from tests.volunteer.rounds.chain_builder import ChainBuilder, hash_of, make_rules
from tests.volunteer.rounds.desk import Desk
from volunteer.rounds import events as ev
from volunteer.rounds import waiting
from volunteer.rounds.catch_up import Needs, needs_of_headers, needs_of_state
from volunteer.rounds.knowledge import Knowledge
from volunteer.rounds.requests import LONGEST_PAUSE_S, Kind, Requests
from volunteer.rounds.sampling import sample_contributions

# ----------------------------------------------------------------------------- sampling


def test_sampling_is_seeded_sorted_and_ignores_the_order_it_is_given() -> None:
    ids = [hash_of(str(i)) for i in range(40)]
    one = sample_contributions(ids, 8, seed="x")
    assert one == sample_contributions(ids[::-1], 8, seed="x")
    assert list(one) == sorted(one)
    assert len(set(one)) == 8
    assert one != sample_contributions(ids, 8, seed="y")


def test_sampling_leaves_out_different_ones_in_different_rounds() -> None:
    ids = [hash_of(str(i)) for i in range(12)]
    counts = dict.fromkeys(ids, 0)
    for round_index in range(400):
        for chosen in sample_contributions(ids, 3, seed=hash_of(f"round {round_index}")):
            counts[chosen] += 1
    assert min(counts.values()) > 60
    assert max(counts.values()) < 140


def test_nothing_is_left_out_when_all_fit() -> None:
    assert sample_contributions(["b", "a"], 2, seed="x") == ("a", "b")


# ----------------------------------------------------------------------------- requests


def test_one_request_of_a_kind_at_a_time() -> None:
    requests = Requests()
    assert requests.begin(Kind.COMPUTE, "x", 0.0)
    assert not requests.begin(Kind.COMPUTE, "y", 0.0)
    assert requests.begin(Kind.ENCODE, "y", 0.0)
    requests.end(Kind.COMPUTE, "not x")
    assert requests.is_busy(Kind.COMPUTE)
    requests.end(Kind.COMPUTE, "x")
    assert requests.begin(Kind.COMPUTE, "y", 0.0)


def test_pauses_grow_with_failures_up_to_a_bound_and_end_with_success() -> None:
    requests, now_s, pauses = Requests(), 0.0, []
    for _ in range(8):
        assert requests.begin(Kind.FETCH_STATE, "x", now_s)
        requests.failed("x", now_s)
        pause_s = 0.0
        while not requests.begin(Kind.FETCH_STATE, "x", now_s + pause_s):
            pause_s += 0.5
        requests._busy.clear()
        pauses.append(pause_s)
        now_s += pause_s
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    assert max(pauses) == LONGEST_PAUSE_S
    assert requests.begin(Kind.FETCH_STATE, "x", now_s)
    requests.end(Kind.FETCH_STATE, "x")
    assert requests.failures_of("x") == 0


def test_a_look_is_due_once_after_each_time_at_which_something_may_be_asked_again() -> None:
    requests = Requests()
    assert requests.ask("blob", 10.0)
    assert not requests.is_any_due(1000.0), "what is under way ends with an event"
    requests.failed("blob", 10.0)
    assert not requests.is_any_due(10.5)
    assert requests.is_any_due(11.0), "its pause of 1 s is over"
    requests.looked_at_s = 11.0
    assert not requests.is_any_due(1000.0)
    assert requests.ask("record", 20.0, 15.0)
    requests.looked_at_s = 20.0
    assert not requests.is_any_due(34.0)
    assert requests.is_any_due(35.0), "it is asked for again though nothing came"


def test_a_failure_of_what_was_not_asked_changes_nothing() -> None:
    requests = Requests()
    requests.failed("x", 0.0)
    assert requests.ask("x", 0.0)
    assert not requests.ask("x", 1000.0)


# -------------------------------------------------------------------- knowledge, hostile


def test_when_too_many_commits_wait_the_lowest_are_kept() -> None:
    chain = ChainBuilder()
    commits = chain.rounds(chain.genesis, "a", 12)
    known = Knowledge(chain.rules)
    before, waiting.MAX_WAITING_COMMITS = waiting.MAX_WAITING_COMMITS, 4
    try:
        for commit_id in reversed(commits):
            known.add(commit_id, chain.known.commits[commit_id])
    finally:
        waiting.MAX_WAITING_COMMITS = before
    assert known.waiting.keys() == set(commits[:4])
    for record_id, record in chain.records.items():
        known.add(record_id, record)
    assert known.facts == chain.known.facts
    assert known.missing_records() == []


def test_facts_do_not_depend_on_the_order_of_arrival() -> None:
    chain = ChainBuilder()
    tip = chain.rounds(chain.genesis, "abc", 6)[-1]
    chain.rounds(tip, "ab", 3)
    chain.rounds(tip, "c", 3)
    for order in (1, -1):
        known = Knowledge(chain.rules)
        for record_id, record in sorted(chain.records.items())[::order]:
            known.add(record_id, record)
        assert known.facts == chain.known.facts
        assert not known.waiting


def test_what_is_built_on_an_invalid_commit_is_invalid() -> None:
    chain = ChainBuilder()
    tip = chain.rounds(chain.genesis, "a", 2)[-1]
    bad = chain.draft(tip, [], proposer="a")
    bad_id = chain.add(bad)
    assert bad_id in chain.known.invalid
    child = chain.draft(tip, [chain.contribution("a", tip)])
    child_of_bad = msgspec.structs.replace(child, parent=bad_id)
    assert chain.known.invalid[chain.add(child_of_bad)] == "its parent is invalid"


def test_a_bad_blob_refuses_what_waits_for_it_and_not_what_was_verified_before() -> None:
    chain = ChainBuilder()
    tip = chain.rounds(chain.genesis, "a", 2)[-1]
    listed = chain.contribution("a", tip, is_held=False)
    waiting = chain.commit(tip, [listed])
    verified = chain.commit(tip, [listed], state="seen before")
    chain.known.hold_state(verified)
    chain.known.refuse_contribution(listed, "not finite")
    assert chain.known.refused.keys() == {waiting}
    assert verified in chain.known.usable


# --------------------------------------------------------------------------- catching up


def test_the_lowest_blobs_are_asked_for_first() -> None:
    chain = ChainBuilder()
    node, ids = chain.genesis, []
    for _ in range(6):
        ids.append(chain.contribution("a", node, is_held=False))
        node = chain.commit(node, [ids[-1]])
    needs = needs_of_headers(chain.known, node)
    assert needs.contributions == tuple(ids[:3])
    assert chain.known.commits[needs.lowest].contributions == (ids[0],)
    assert needs.state_of == chain.facts(node).certified_id
    assert needs_of_headers(chain.known, chain.genesis) == Needs()


@pytest.mark.parametrize("has_failed", [False, True])
@pytest.mark.parametrize("heights", [1, 8, 9])
def test_near_states_are_computed_and_far_ones_fetched_and_the_other_way_after_failures(
    heights: int, has_failed: bool
) -> None:
    chain = ChainBuilder()
    commits = chain.rounds(chain.genesis, "a", heights)
    chain.known.hold_state(chain.genesis)
    needs = needs_of_state(chain.known, commits[-1], chain.genesis, lambda _: 2 * has_failed)
    if (heights > 8) == has_failed:
        assert needs == Needs(compute=commits[0])
    else:
        assert needs == Needs(state_of=commits[-1])


def test_states_below_the_journal_are_fetched() -> None:
    chain = ChainBuilder()
    tip = chain.rounds(chain.genesis, "a", 12)
    chain.known.hold_state(chain.genesis)
    branch = chain.rounds(tip[0], "b", 1)[-1]  # at height 2, and the tip at 12
    chain.known.hold_state(tip[0])
    needs = needs_of_state(chain.known, branch, tip[-1], lambda _: 0)
    assert needs == Needs(state_of=branch)
    assert needs_of_state(chain.known, branch, tip[8], lambda _: 0) == Needs(compute=branch)


# ------------------------------------------------------------------------------- speed


def test_an_event_costs_the_same_on_a_long_chain_with_a_reset_and_many_old_forks() -> None:
    chain = ChainBuilder(make_rules(publisher=""))
    tip = chain.genesis
    for height in range(1500):
        if height % 5 == 0:
            chain.round(tip, "c")
        tip = chain.round(tip, "ab")
    desk = Desk(chain, "a")
    desk.stand_on(tip)
    assert desk.machine.tip == tip
    begin_s = time.perf_counter()
    for _ in range(300):
        desk.wait(0.1)
    a_tick_s = (time.perf_counter() - begin_s) / 300
    begin_s = time.perf_counter()
    for number in range(100):
        contribution_id = chain.contribution(f"x{number}", tip)
        record = chain.known.contributions[contribution_id]
        desk.feed(ev.RecordArrived(contribution_id, record))
    a_record_s = (time.perf_counter() - begin_s) / 100
    # Walking 1500 heights with their forks takes some 10 ms; an event here about 0.1 ms.
    assert a_tick_s < 0.003
    assert a_record_s < 0.005


def test_every_record_is_found_again_and_kept_once() -> None:
    chain = ChainBuilder()
    tip = chain.rounds(chain.genesis, "ab", 3)[-1]
    chain.leaving("b", tip)
    draft = chain.draft(tip, [chain.contribution("a", tip)])
    chain.add(msgspec.structs.replace(draft, parent=hash_of("never heard of")))
    assert len(chain.known.waiting) == 1
    for record_id, record in chain.records.items():
        assert chain.known.has_record(record_id)
        assert chain.known.record(record_id) == record
        assert not chain.known.add(record_id, record)
    assert not chain.known.has_record(hash_of("unheard"))
    assert chain.known.record(hash_of("unheard")) is None
    assert len(chain.known.children[chain.genesis]) == 1
