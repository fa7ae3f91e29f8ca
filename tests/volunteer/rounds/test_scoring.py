"""Verdicts: who scores, when blame falls, and what liars can do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import pytest

from tests.volunteer.rounds.chain_builder import ChainBuilder, hash_of
from tests.volunteer.rounds.desk import ROUND_S, Desk
from tests.volunteer.rounds.test_exclusion import EIGHT, grown
from volunteer.rounds import events as ev
from volunteer.rounds.chain import active_at, excluded_at
from volunteer.rounds.records import Contribution
from volunteer.rounds.scoring import (
    MIN_AGREEING,
    NUM_SCORED,
    NUM_SCORERS,
    blamed_authors,
    draw_scored,
    draw_scorers,
    is_harmful,
)


def scorers_at(chain: ChainBuilder, commit_id: str) -> tuple[str, ...]:
    return draw_scorers(commit_id, active_at(chain.rules, chain.facts(commit_id)))


def listed_of(chain: ChainBuilder, commit_id: str, author: str) -> str:
    known = chain.known
    return next(
        i for i in known.commits[commit_id].contributions if known.contributions[i].author == author
    )


def round_with(chain: ChainBuilder, tip: str, verdicts: dict[str, Iterable[str]]) -> str:
    """Add a commit of all eight, some of which have verdicts on `tip`."""
    return chain.commit(tip, [chain.contribution(a, tip, harmful=verdicts.get(a)) for a in EIGHT])


def victim_at(chain: ChainBuilder, tip: str) -> str:
    return next(a for a in EIGHT if a not in scorers_at(chain, tip))


def blamed_after(chain: ChainBuilder, tip: str, victim: str, says: str) -> bool:
    """Whether `victim` is struck where the scorers say yes (y), no (n), nothing (_)."""
    target = listed_of(chain, tip, victim)
    verdicts: dict[str, Iterable[str]] = {}
    for scorer, word in zip(scorers_at(chain, tip), says, strict=True):
        if word != "_":
            verdicts[scorer] = [target] if word == "y" else []
    after = round_with(chain, tip, verdicts)
    return victim in chain.facts(after).strikes.marks


@pytest.mark.parametrize(
    ("says", "is_blamed"),
    [
        ("yyyyy", True),
        ("yyyyn", True),  # one who covers for the other
        ("nyyy_", True),
        ("yyy__", True),  # two are away
        ("__yyy", True),
        ("yyynn", False),
        ("yy___", False),
        ("yyn__", False),
        ("y____", False),
        ("nnnnn", False),
        ("_____", False),
    ],
)
def test_blame_takes_three_scorers_and_three_quarters_of_those_there(
    says: str, is_blamed: bool
) -> None:
    chain, tip = grown()
    assert blamed_after(chain, tip, victim_at(chain, tip), says) is is_blamed


def blamed_where(bad: set[str], scorers: Iterable[str], lies: Iterable[str]) -> frozenset[str]:
    """Return whom a commit of EIGHT's scorers blame: the bad ones name `lies`, all others the bad.

    Everyone's contribution is called as its author.
    """
    verdicts = [
        Contribution(
            run_id="",
            module_id="dense",
            round_index=1,
            author=scorer,
            base=hash_of("a commit"),
            vote=True,
            blob_id=hash_of(scorer),
            blob_bytes=1,
            codec="int4",
            codec_version=1,
            tokens=1,
            harmful=tuple(sorted(lies if scorer in bad else bad - {scorer})),
        )
        for scorer in scorers
    ]
    return blamed_authors({author: author for author in EIGHT}, verdicts, tuple(scorers))


def test_two_copiers_of_eight_are_blamed_whoever_is_drawn() -> None:
    bad = {"g", "h"}
    for scorers in itertools.combinations(EIGHT, NUM_SCORERS):
        assert blamed_where(bad, scorers, lies=()) == bad


def test_two_liars_of_eight_can_have_nobody_blamed_whoever_is_drawn_or_away() -> None:
    for num_there in range(1, NUM_SCORERS + 1):
        for scorers in itertools.combinations(EIGHT, num_there):
            for victims in ("a", "ab", "abcdef"):
                assert blamed_where({"g", "h"}, scorers, lies=victims) <= {"g", "h"}


def test_a_quarter_that_lies_can_have_others_blamed_in_a_tenth_of_commits_at_most() -> None:
    def chance(num_liars: int, num_members: int) -> float:
        worse = range(MIN_AGREEING, NUM_SCORERS + 1)
        honest = num_members - num_liars
        ways = [math.comb(num_liars, n) * math.comb(honest, NUM_SCORERS - n) for n in worse]
        return sum(ways) / math.comb(num_members, NUM_SCORERS)

    assert chance(2, 8) == 0.0
    assert round(chance(3, 12), 4) == 0.0455
    assert round(chance(8, 32), 4) == 0.0854
    assert max(chance(n // 4, n) for n in range(5, 4000)) < 0.104
    blamed = blamed_where({"f", "g", "h"}, "abfgh", lies="a")
    assert blamed == {"a"}, "one who was drawn with three of them"
    assert blamed_where({"f", "g", "h"}, "abfgh", lies="c") == frozenset()


def test_verdicts_of_those_who_were_not_drawn_count_for_nothing() -> None:
    chain, tip = grown()
    victim = victim_at(chain, tip)
    liars = [a for a in EIGHT if a not in (*scorers_at(chain, tip), victim)]
    target = listed_of(chain, tip, victim)
    after = round_with(chain, tip, {liar: [target] for liar in liars})
    assert chain.facts(after).strikes.marks == {}


def test_scorers_have_no_say_on_their_own_work() -> None:
    chain, tip = grown()
    first, *others = scorers_at(chain, tip)
    target = listed_of(chain, tip, first)
    after = round_with(chain, tip, {first: [], **dict.fromkeys(others[:3], (target,))})
    assert first in chain.facts(after).strikes.marks
    alone = round_with(chain, tip, {first: [target], **dict.fromkeys(others[:2], (target,))})
    assert chain.facts(alone).strikes.marks == {}


def test_of_five_authors_four_judge_the_fifth() -> None:
    chain, tip = grown("abcde")
    target = listed_of(chain, tip, "e")
    for covering, is_blamed in (("", True), ("d", True), ("cd", False)):
        verdicts = {a: [] if a in covering else [target] for a in "abcd"}
        listed = [chain.contribution(a, tip, harmful=verdicts.get(a)) for a in "abcde"]
        after = chain.facts(chain.commit(tip, listed))
        assert ("e" in after.strikes.marks) is is_blamed


def test_scorers_that_condemn_more_than_a_quarter_condemn_nobody() -> None:
    chain, tip = grown()
    scorers = scorers_at(chain, tip)
    targets = [listed_of(chain, tip, a) for a in EIGHT if a not in scorers][:3]
    after = round_with(chain, tip, dict.fromkeys(scorers, targets))
    assert chain.facts(after).strikes.marks == {}


def test_in_a_small_run_nobody_is_blamed() -> None:
    chain, tip = grown("abcd")
    verdicts = {a: [listed_of(chain, tip, "d")] for a in scorers_at(chain, tip) if a != "d"}
    listed = [chain.contribution(a, tip, harmful=verdicts.get(a)) for a in "abcd"]
    assert chain.facts(chain.commit(tip, listed)).strikes.marks == {}


def test_blame_in_two_rounds_excludes() -> None:
    chain, tip = grown()
    found: list[str] = []
    while "h" not in excluded_at(chain.facts(tip)):
        verdicts: dict[str, Iterable[str]] = {}
        if "h" in {chain.known.contributions[i].author for i in chain.facts(tip).listed}:
            target = listed_of(chain, tip, "h")
            verdicts = {scorer: [target] for scorer in scorers_at(chain, tip) if scorer != "h"}
        tip = round_with(chain, tip, verdicts)
        found.append(tip)
        assert len(found) <= 3
    assert len(found) == 2


def test_the_draw_is_of_members_and_another_one_for_each_commit() -> None:
    chain, tip = grown()
    drawn = [scorers_at(chain, commit_id) for commit_id in chain.rounds(tip, EIGHT, 12)]
    assert all(len(set(some)) == NUM_SCORERS for some in drawn)
    assert {peer for some in drawn for peer in some} == set(EIGHT)
    ids = [hash_of(str(n)) for n in range(9)]
    assert len(draw_scored(tip, ids)) == NUM_SCORED
    assert draw_scored(tip, ids) == draw_scored(tip, ids[::-1])
    assert draw_scored(tip, ids[:2]) != ()


def test_a_verdict_goes_out_with_the_contribution_on_that_commit_alone() -> None:
    chain, tip = grown()
    desk = Desk(chain, "a")
    desk.stand_on(tip)
    harmful = listed_of(chain, tip, "h")
    desk.feed(ev.VerdictReached(tip, (harmful,)))
    desk.wait(ROUND_S)
    record = desk.contribute(tip)
    assert record.harmful == (harmful,)
    assert record.content_hash == hash_of("own content")
    other = Desk(chain, "b")
    other.stand_on(tip)
    other.feed(ev.VerdictReached(chain.facts(tip).parent_id, (harmful,)))
    other.wait(ROUND_S)
    assert not other.contribute(tip).harmful


@pytest.mark.parametrize(
    ("change", "stderr", "is_bad"),
    [(0.01, 0.003, True), (0.01, 0.004, False), (0.0003, 0.0, False), (-0.01, 0.001, False)],
)
def test_harm_is_three_standard_errors_and_a_part_of_the_loss(
    change: float, stderr: float, is_bad: bool
) -> None:
    assert is_harmful(change, stderr, loss=2.0) is is_bad
