"""What strangers sign takes a bounded room, and changes nothing for those who work."""

from __future__ import annotations

import pytest

from tests.volunteer.rounds.chain_builder import ChainBuilder, hash_of, make_rules
from tests.volunteer.rounds.spam import (
    Disk,
    Strangers,
    commit,
    contribution,
    grown,
    item,
)
from volunteer.rounds import bounds, side_branches
from volunteer.rounds.fork_choice import choose_tip
from volunteer.rounds.knowledge import Knowledge
from volunteer.rounds.loose_records import (
    MAX_LISTED_RECORDS,
    MAX_MEMBER_RECORDS,
    MAX_NEWCOMER_RECORDS,
    MAX_ORPHANS,
)
from volunteer.rounds.records import Record
from volunteer.rounds.side_branches import MAX_SIDE_COMMITS, SIDE_SLACK
from volunteer.rounds.waiting import MAX_WAITING_COMMITS, MAX_WAITING_LISTED

NUM_SPAM = 100_000
SEATS = 4 * 32
MOST_SIDE = MAX_SIDE_COMMITS + SIDE_SLACK + 1


def most_records(num_on_chain: int) -> int:
    """Return how many records are kept at most, with so many on the chain: commits and listed."""
    loose = MAX_MEMBER_RECORDS + MAX_LISTED_RECORDS + MAX_NEWCOMER_RECORDS + MAX_ORPHANS
    return num_on_chain + loose + 33 * MOST_SIDE + MAX_WAITING_COMMITS + MAX_WAITING_LISTED


def feed(disk: Disk, records: dict[str, Record]) -> None:
    """Take in what members made: it can be stood on, since their blobs are to be had."""
    for record_id, record in records.items():
        disk.take(record_id, record)
        disk.known.hold(record_id)


@pytest.mark.timeout(120)  # 5 s of CPU; a busy machine takes longer
def test_a_hundred_thousand_records_of_strangers_take_a_bounded_room_and_change_nothing() -> None:
    chain = grown(12)
    disk = Disk(Knowledge(chain.rules, salt="secret"))
    feed(disk, chain.records)
    before = set(chain.records)
    for record_id, record in Strangers(disk.known).records(NUM_SPAM):
        disk.take(record_id, record)
    tip = chain.known.header_choice.current()[-1]
    assert {i: disk.known.facts[i] for i in chain.known.facts} == chain.known.facts
    assert before <= disk.records.keys()
    assert disk.most <= most_records(len(before))
    # Far less in fact, since strangers are no members: this is what room they found.
    assert len(disk.records) - len(before) < 6_000
    assert set(disk.known.bounds.turned_away) >= {
        "too many unlisted records of newcomers",
        "too many records whose base is not here",
        "too many commits wait",
        "too many commits beside the chain",
    }
    num_on_record = len(disk.known.contributions) + len(disk.known.leavings)
    num_on_record += len(disk.known.commits) + len(disk.known.waiting)
    assert num_on_record == len(disk.records), "the disk has what the memory has"

    # The swarm goes on, and the chain is whole for whoever comes next.
    later = chain.rounds(tip, "abc", 3)
    feed(disk, {i: r for i, r in chain.records.items() if i not in before})
    assert disk.known.header_choice.current()[-1] == later[-1], "strangers move nobody for long"

    # A restart under another salt finds the same.
    again = Disk(Knowledge(chain.rules, salt="another"))
    again.known.bounds.is_loading = True
    for record_id, record in disk.records.items():
        again.take(record_id, record)
    again.known.bounds.is_loading = False
    assert again.records == disk.records
    assert again.known.facts == disk.known.facts
    assert again.known.contributions == disk.known.contributions
    assert again.known.waiting == disk.known.waiting
    assert again.known.header_choice.current() == disk.known.header_choice.current()


def test_indexes_hold_nothing_of_what_was_forgotten() -> None:
    chain = grown(4)
    disk = Disk(Knowledge(chain.rules))
    feed(disk, chain.records)
    for record_id, record in Strangers(disk.known, seed=1).records(8_000):
        disk.take(record_id, record)
    known = disk.known
    assert set(known.facts) == {*known.commits, known.rules.genesis_id}
    assert {c for ids in known.children.values() for c in ids} == set(known.commits)
    assert {i for ids in known.based_on.values() for i in ids} == set(known.contributions)
    assert set(known.supporters) <= set(known.based_on)
    assert set(known.listed_by) <= {*known.contributions, *known.leavings}
    assert {c for ids in known.listed_by.values() for c in ids} <= set(known.commits)
    assert known.held <= known.contributions.keys()
    assert known.waiting_for._num_listed_here == sum(
        (i in known.contributions) + (i in known.leavings)
        for waits in known.waiting.values()
        for i in (*waits.contributions, *waits.leaving)
    )
    assert known.usable_choice.best(known.rules.genesis_id) == choose_tip(
        known.usable_choice.tree, known.rules.genesis_id
    )


# ------------------------------------------------------------------------------ newcomers


def seated(salt: str, names: list[str], tip: str, chain: ChainBuilder) -> set[str]:
    known = Knowledge(chain.rules, salt=salt)
    for record_id, record in chain.records.items():
        known.add(record_id, record)
    for name in names:
        known.add(*item(contribution(name, tip, known.facts[tip].height)))
    return {known.contributions[i].author for i in known.based_on[tip]} & set(names)


def test_a_newcomer_gets_a_seat_as_often_as_any_other_that_is_heard() -> None:
    chain = grown(4)
    tip = chain.known.header_choice.current()[-1]
    names = [*(f"sybil-{i}" for i in range(3 * SEATS)), "honest"]  # the slowest of all
    hits = 0
    for salt in range(60):
        chosen = seated(str(salt), names, tip, chain)
        assert len(chosen) == SEATS
        hits += "honest" in chosen
    assert 11 <= hits <= 29, "about 20, which is 128 of 385; the salts are fixed"


def test_identities_that_were_ground_for_one_member_are_any_others_for_the_next() -> None:
    chain = grown(2)
    tip = chain.known.header_choice.current()[-1]
    ground: list[str] = []
    for start in range(0, 8 * SEATS, 2 * SEATS):
        names = [*ground, *(f"sybil-{i}" for i in range(start, start + 2 * SEATS))]
        ground = sorted(seated("guessed", names, tip, chain))
    honest = [f"honest-{i}" for i in range(SEATS)]
    there = seated("guessed", [*ground, *honest], tip, chain)
    elsewhere = seated("secret", [*ground, *honest], tip, chain)
    assert len(there & set(honest)) < SEATS / 4
    assert len(elsewhere & set(honest)) > SEATS / 3


def test_what_a_newcomer_was_turned_away_with_is_let_in_when_a_commit_lists_it() -> None:
    chain = grown(4)
    tip = chain.known.header_choice.current()[-1]
    known = Knowledge(chain.rules, salt="x")
    for record_id, record in chain.records.items():
        known.add(record_id, record)
    crowd = [item(contribution(f"s{i}", tip, 4)) for i in range(3 * SEATS)]
    refused = [(i, r) for i, r in crowd if not known.add(i, r)]
    assert refused
    listing = chain.draft(tip, [refused[0][0], chain.contribution("a", tip)])
    for record_id, record in chain.records.items():
        known.add(record_id, record)
    commit_id, _ = item(listing)
    assert known.add(commit_id, listing)
    assert known.missing_records() == [refused[0][0]]
    assert known.add(*refused[0])
    assert known.header_choice.best(known.rules.genesis_id) == commit_id
    for late in range(3 * SEATS):
        known.add(*item(contribution(f"late{late}", tip, 4)))
    assert refused[0][0] in known.contributions, "what is listed has no need of a seat"


def test_members_and_former_members_have_room_that_newcomers_cannot_take() -> None:
    chain = ChainBuilder(make_rules(expiry_rounds=2))
    gone = chain.rounds(chain.genesis, "ab", 3)
    tip = chain.rounds(gone[-1], "a", 4)[-1]
    known = Knowledge(chain.rules)
    for record_id, record in chain.records.items():
        known.add(record_id, record)
    assert known.add(*item(contribution("a", tip, 7)))
    assert known.add(*item(contribution("b", tip, 7)))
    for number in range(2 * SEATS):
        known.add(*item(contribution(f"s{number}", tip, 7)))
    assert len(known.based_on[tip]) == SEATS + 2
    assert {known.contributions[i].author for i in known.based_on[tip]} >= {"a", "b"}


# ------------------------------------------------------------------------------- branches


def test_the_branch_of_the_other_half_outlasts_any_number_of_strangers_branches() -> None:
    chain = grown(3)
    fork = chain.known.header_choice.current()[-1]
    ours = chain.rounds(fork, "ab", 6)
    theirs = chain.rounds(fork, "c", 5)
    disk = Disk(Knowledge(chain.rules))
    feed(disk, chain.records)
    for record_id, record in Strangers(disk.known, seed=2).records(8_000):
        disk.take(record_id, record)
    assert disk.known.bounds.turned_away["too many commits beside the chain"] > 300
    assert {*ours, *theirs} <= disk.known.facts.keys()
    assert len(disk.known.facts) <= len(chain.known.facts) + MOST_SIDE


def test_the_chain_of_who_founded_the_run_apart_is_taken_in_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounds, "MAX_SIDE_COMMITS", 8)
    monkeypatch.setattr(bounds, "SIDE_SLACK", 2)
    monkeypatch.setattr(side_branches.side_commits_to_forget, "__defaults__", (8,))
    rules = make_rules(publisher="")
    islands = [ChainBuilder(rules), ChainBuilder(rules)]
    ends = [
        islands[0].rounds(islands[0].genesis, "ab", 40)[-1],
        islands[1].rounds(islands[1].genesis, "cd", 30)[-1],
    ]
    both = ChainBuilder(rules)
    for island in islands:
        for record_id, record in island.records.items():
            both.known.add(record_id, record)
    want = choose_tip(both.known.headers, rules.genesis_id)
    for order in (1, -1):
        disk = Disk(Knowledge(rules))
        for island in islands[::order]:
            feed(disk, island.records)
        assert disk.known.header_choice.current()[-1] == want
    assert want in ends


def test_what_the_member_stands_on_and_has_signed_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_branches.side_commits_to_forget, "__defaults__", (4,))
    monkeypatch.setattr(bounds, "MAX_SIDE_COMMITS", 4)
    monkeypatch.setattr(bounds, "SIDE_SLACK", 0)
    chain = grown(3)
    fork = chain.known.header_choice.current()[-1]
    pinned = chain.rounds(fork, "c", 2)
    signed_on = chain.rounds(fork, "b", 2)
    chain.rounds(fork, "ab", 8)
    known = Knowledge(chain.rules, me="me", pins=lambda: (pinned[-1], hash_of("not here yet")))
    disk = Disk(known)
    feed(disk, chain.records)
    own = item(contribution("me", signed_on[-1], 5))
    disk.take(*own)
    for record_id, record in Strangers(known, seed=4).records(3_000):
        disk.take(record_id, record)
    assert {*pinned, *signed_on} <= known.facts.keys()
    assert own[0] in known.contributions
    assert own[0] in disk.records


def test_proofs_against_members_are_kept_and_those_against_nobody_are_not() -> None:
    chain = grown(3)
    tip = chain.known.header_choice.current()[-1]
    disk = Disk(Knowledge(chain.rules))
    feed(disk, chain.records)
    for author in ("c", "stranger"):
        pair = [item(contribution(author, tip, 3, tokens=n)) for n in (1, 2)]
        for record_id, record in pair:
            disk.take(record_id, record)
        disk.known.bounds.keep_proof(author, [i for i, _ in pair])
        kept = {i for i, _ in pair} <= disk.known.bounds._proofs
        assert kept is (author == "c")
    for record_id, record in Strangers(disk.known, seed=5).records(5_000):
        disk.take(record_id, record)
    assert disk.known.bounds._proofs <= disk.records.keys()


# -------------------------------------------------------------------------------- by name


def test_what_is_over_a_bound_is_named() -> None:
    chain = grown(2)
    known = chain.known
    tip = known.header_choice.current()[-1]
    listed = [chain.contribution(f"n{i}", tip) for i in range(33)]
    too_long = commit(known, tip, "x", tuple(listed))
    assert not known.add(*item(too_long))
    twice = commit(known, tip, "x", (tip,))
    assert not known.add(*item(twice))
    for number in range(bounds.MAX_COMMITS_PER_PROPOSER):
        chain.commit(tip, [listed[number]], proposer="x")
    assert not known.add(*item(commit(known, tip, "x", (listed[-1],))))
    for tokens in (3, 4, 5):
        known.add(*item(contribution("y", tip, 2, tokens=tokens)))
    assert known.bounds.turned_away == {
        "it lists more than a commit may": 1,
        "it names one record twice": 1,
        "its proposer has too many commits on that parent": 1,
        "its author has too many records on that base": 1,
    }


def test_an_invalid_commit_is_remembered_for_a_while_and_not_kept() -> None:
    chain = grown(2)
    disk = Disk(Knowledge(chain.rules))
    feed(disk, chain.records)
    tip = chain.known.header_choice.current()[-1]
    for number in range(bounds.MAX_INVALID + 50):
        draft = commit(disk.known, tip, f"s{number}", ())
        disk.take(*item(draft))
    assert len(disk.known.invalid) == bounds.MAX_INVALID
    assert disk.records.keys() == chain.records.keys()
