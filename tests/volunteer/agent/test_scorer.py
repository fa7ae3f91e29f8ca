"""A scorer's verdict: what it is due for, what it names, and when it says nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import trio
from trio.testing import MockClock

from tests.volunteer.rounds.chain_builder import hash_of
from tests.volunteer.rounds.desk import Desk
from tests.volunteer.rounds.test_exclusion import EIGHT, grown
from volunteer.agent.aggregator_service import AggregatorLostError, AggregatorService
from volunteer.agent.scorer import MIN_COPY_DELAY_S, NUM_TRIES, Scorer
from volunteer.messages import (
    AggregatorCommand,
    AggregatorEvent,
    ContributionsScored,
    Outcome,
    Score,
    ScoreContributions,
)
from volunteer.rounds import events as ev
from volunteer.rounds.chain import active_at
from volunteer.rounds.machine import Machine
from volunteer.rounds.scoring import draw_scored, draw_scorers


@dataclass
class Measuring:
    """Stands in for the aggregator: measures a few at a time."""

    harmful: set[str] = field(default_factory=set)
    at_a_time: int = 4
    is_lost: bool = False
    asked: list[ScoreContributions] = field(default_factory=list)

    async def ask(self, make: Callable[[int], AggregatorCommand]) -> AggregatorEvent:
        await trio.lowlevel.checkpoint()
        command = make(7)
        assert isinstance(command, ScoreContributions)
        self.asked.append(command)
        if self.is_lost:
            raise AggregatorLostError
        scores = tuple(
            Score(
                contribution_id=work.contribution_id,
                change=0.5 if work.contribution_id in self.harmful else -0.5,
                stderr=0.01,
                loss=2.0,
            )
            for work in command.works[: self.at_a_time]
        )
        return ContributionsScored(request_id=command.request_id, scores=scores)


class Scene:
    """A commit of eight, and one of its scorers, who has just computed it."""

    def __init__(self, authors: str = EIGHT) -> None:
        self.chain, tip = grown(authors)
        self.commit_id = self.chain.round(tip, authors)
        facts = self.chain.facts(self.commit_id)
        self.me = draw_scorers(self.commit_id, active_at(self.chain.rules, facts))[0]
        self.machine = self.machine_of(self.me)
        self.ids = self.chain.known.commits[self.commit_id].contributions
        self.drawn = [
            i
            for i in sorted(draw_scored(self.commit_id, self.ids))
            if self.chain.known.contributions[i].author != self.me
        ]
        self.measuring = Measuring()
        self.scorer = Scorer(self.me, cast("AggregatorService", self.measuring))
        self.outcomes = {i: outcome(i) for i in self.ids}
        self.posted: list[ev.Event] = []

    def machine_of(self, author: str) -> Machine:
        desk = Desk(self.chain, author)
        desk.stand_on(self.commit_id)
        return desk.machine

    async def score(self) -> list[ev.Event]:
        outcomes = tuple(self.outcomes.values())
        await self.scorer.score(
            self.machine, self.commit_id, outcomes, lambda _, i: hash_of(i), self.posted.append
        )
        return self.posted

    def others(self) -> list[str]:
        contributions = self.chain.known.contributions
        return [i for i in self.ids if contributions[i].author != self.me]


def outcome(
    contribution_id: str, *, weight: float = 0.125, copies: tuple[str, ...] = ()
) -> Outcome:
    return Outcome(
        contribution_id=contribution_id,
        weight=weight,
        norm=1.0,
        clip_scale=0.75,
        refused_reason="" if weight else "bad",
        copies=copies,
    )


def run(scene: Scene) -> list[ev.Event]:
    return trio.run(scene.score, clock=MockClock(autojump_threshold=0))


def test_it_is_due_for_who_was_drawn_and_contributes() -> None:
    scene = Scene()
    assert scene.scorer.is_due(scene.machine, scene.commit_id)
    stranger = next(a for a in EIGHT if a not in draw_scorers(scene.commit_id, EIGHT))
    other = Scorer(stranger, cast("AggregatorService", scene.measuring))
    assert not other.is_due(scene.machine_of(stranger), scene.commit_id)
    scene.machine.handle(ev.ContributingChanged(False), 1.0)
    assert not scene.scorer.is_due(scene.machine, scene.commit_id)


def test_it_is_not_due_for_what_lies_below_or_where_nobody_can_be_blamed() -> None:
    scene = Scene()
    below = scene.chain.facts(scene.commit_id).parent_id
    me = draw_scorers(below, EIGHT)[0]
    assert not Scorer(me, cast("AggregatorService", scene.measuring)).is_due(
        scene.machine_of(me), below
    )
    four = Scene("abcd")
    assert not four.scorer.is_due(four.machine, four.commit_id)


def test_what_raises_the_loss_is_named() -> None:
    scene = Scene()
    scene.measuring.harmful = {scene.drawn[1]}
    assert run(scene) == [ev.VerdictReached(scene.commit_id, (scene.drawn[1],))]
    (command,) = scene.measuring.asked
    assert [work.contribution_id for work in command.works] == scene.drawn
    assert command.clip_scales == (0.75,) * len(scene.drawn)
    parent = scene.chain.facts(scene.commit_id).parent_id
    assert (command.parent_state, command.request_id) == (hash_of(parent), 7)


def test_what_has_no_weight_is_not_measured() -> None:
    scene = Scene()
    scene.outcomes[scene.drawn[0]] = outcome(scene.drawn[0], weight=0.0)
    run(scene)
    assert [w.contribution_id for w in scene.measuring.asked[0].works] == scene.drawn[1:]


def test_what_was_cut_short_is_asked_again_and_then_given_up() -> None:
    scene = Scene()
    scene.measuring.at_a_time = -(-len(scene.drawn) // NUM_TRIES)
    scene.measuring.harmful = {scene.drawn[-1]}
    assert run(scene) == [ev.VerdictReached(scene.commit_id, (scene.drawn[-1],))]
    slow = Scene()
    slow.measuring.at_a_time = 0
    slow.measuring.harmful = set(slow.drawn)
    assert run(slow) == [], "no verdict is better than one on a part"
    assert len(slow.measuring.asked) == NUM_TRIES


def test_without_an_aggregator_there_is_no_verdict() -> None:
    scene = Scene()
    scene.measuring.is_lost = True
    assert run(scene) == []


def heard(scene: Scene, delay_s: float) -> tuple[str, str]:
    """Two of the same direction, the second heard of later by `delay_s`."""
    first, second = scene.others()[:2]
    scene.outcomes[first] = outcome(first, copies=(second,))
    scene.outcomes[second] = outcome(second, copies=(first,))

    async def hear() -> None:
        scene.scorer.note_heard(first)
        await trio.sleep(delay_s)  # noqa: TID251 - virtual time
        scene.scorer.note_heard(second)
        scene.scorer.note_heard(first)  # asked for again: nothing new
        await scene.score()

    trio.run(hear, clock=MockClock(autojump_threshold=0))
    return first, second


def test_of_two_that_are_one_the_later_is_named() -> None:
    scene = Scene()
    _, second = heard(scene, MIN_COPY_DELAY_S)
    assert scene.posted == [ev.VerdictReached(scene.commit_id, (second,))]


def test_of_two_heard_at_about_the_same_time_none_is() -> None:
    scene = Scene()
    heard(scene, MIN_COPY_DELAY_S / 2)
    assert scene.posted == [ev.VerdictReached(scene.commit_id, ())]


def test_who_copies_our_own_is_named() -> None:
    scene = Scene()
    contributions = scene.chain.known.contributions
    mine = next(i for i in scene.ids if contributions[i].author == scene.me)
    copy = scene.others()[0]
    assert mine in scene.machine.own
    scene.outcomes[mine] = outcome(mine, copies=(copy,))
    scene.outcomes[copy] = outcome(copy, copies=(mine,))

    async def hear() -> None:
        scene.scorer.note_heard(copy)
        await scene.score()

    trio.run(hear, clock=MockClock(autojump_threshold=0))
    assert scene.posted == [ev.VerdictReached(scene.commit_id, (copy,))]
