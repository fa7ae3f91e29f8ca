"""What each verb of the control socket does, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from tests.fakes.status_facts import Facts, source
from volunteer.agent.verbs import (
    MAX_CONTRIBUTIONS,
    MAX_HISTORY,
    MAX_PAUSE_S,
    MAX_SINCE_S,
    make_verbs,
)
from volunteer.answers import ContributionPoint, Release, RoundPoint, Stats, Status
from volunteer.errors import ControlError


class Asked:
    """Records what the verbs ask of the agent's parts."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.source = source(Facts())
        self.release: Release | None = None
        self.is_running = True

    async def pause(self, for_s: float | None) -> None:
        await trio.lowlevel.checkpoint()
        self.calls.append(("pause", for_s))

    async def resume(self) -> None:
        await trio.lowlevel.checkpoint()
        self.calls.append(("resume",))

    async def flush(self) -> None:
        await trio.lowlevel.checkpoint()
        self.calls.append(("flush",))

    def stats(self, since_utc: str | None) -> Stats:
        return Stats(tokens_done=5)

    def stats_of_last(self, seconds: float) -> Stats:
        return Stats(tokens_done=3, since_utc=f"{seconds}")

    def history(self, run_id: str, module_id: str, limit: int) -> tuple[RoundPoint, ...]:
        self.calls.append(("history", run_id, module_id, limit))
        return ()

    def contributions(
        self, run_id: str, module_id: str, limit: int
    ) -> tuple[ContributionPoint, ...]:
        self.calls.append(("contributions", run_id, module_id, limit))
        return ()

    async def finish(self, *, ends_agent: bool = False) -> None:
        await trio.lowlevel.checkpoint()
        self.calls.append(("finish", ends_agent))

    def call(self, verb: str, args: Mapping[str, Any]) -> object:
        policy = SimpleNamespace(
            pause=self.pause,
            finish=self.finish,
            resume=self.resume,
            flush=lambda: self.calls.append(("count",)),
            release=self.release,
            is_running=self.is_running,
        )
        self.source.keeper = cast(
            "Any",
            SimpleNamespace(
                flush=self.flush,
                with_listing=list,
                last_confirmed_at_s=None,
                tokens_confirmed=0,
                tokens_elsewhere=0,
                steps_elsewhere=0,
            ),
        )
        verbs = make_verbs(
            self.source,
            cast("Any", self),
            cast("Any", policy),
            cast("Any", SimpleNamespace(flush=self.flush)),
            lambda: self.calls.append(("stop",)),
            cast("Any", SimpleNamespace()),
        )
        return trio.run(verbs[verb], args)


def test_the_figures_have_what_was_trained_since_the_last_snapshot() -> None:
    source = Asked().source
    source.keeper = cast("Any", SimpleNamespace(tokens_elsewhere=100, steps_elsewhere=10))
    source.trainer.view.tokens_total, source.trainer.view.inner_step = 50, 5
    kept = Stats(tokens_done=120, tokens_pending=20, tokens_confirmed=100, inner_steps=12)
    stats = source.with_steps_since_snapshot(kept)
    assert (stats.tokens_done, stats.tokens_pending, stats.inner_steps) == (150, 50, 15)
    assert stats.tokens_done == stats.tokens_pending + stats.tokens_confirmed
    source.trainer.view.tokens_total, source.trainer.view.inner_step = 20, 2
    assert source.with_steps_since_snapshot(kept) == kept, "paused: the snapshot has everything"


def test_the_figures_of_a_time_are_asked_for_in_seconds() -> None:
    stats = Asked().call("stats", {"since_s": 86400.0})
    assert isinstance(stats, Stats)
    assert stats.since_utc == "86400.0"
    for nonsense in (-1, "7d", True, MAX_SINCE_S + 1, float("nan")):
        with pytest.raises(ControlError, match="since_s"):
            Asked().call("stats", {"since_s": nonsense})


def test_each_verb_does_its_one_thing() -> None:
    asked = Asked()
    assert isinstance(asked.call("status", {}), Status)
    assert asked.call("peers", {}) == asked.source.peers()
    assert asked.call("stats", {}) == Stats(tokens_done=5)
    assert asked.calls == [("count",), ("flush",), ("flush",)], "what is not written yet counts"
    asked.calls.clear()
    assert isinstance(asked.call("resume", {}), Status)
    assert asked.call("stop", {}) == {"stopping": True}
    assert asked.calls == [("resume",), ("stop",)]


@pytest.mark.parametrize(
    ("args", "for_s"),
    [
        ({}, None),
        ({"for_s": None}, None),
        ({"for_s": 1}, 1.0),
        ({"for_s": MAX_PAUSE_S}, MAX_PAUSE_S),
    ],
)
def test_pausing_takes_seconds_or_nothing(args: dict[str, Any], for_s: float | None) -> None:
    asked = Asked()
    assert isinstance(asked.call("pause", args), Status)
    assert asked.calls == [("pause", for_s)]


def test_finishing_waits_for_the_round_and_stops_at_once_where_there_is_none() -> None:
    asked = Asked()
    asked.call("pause", {"finish": True})
    assert asked.call("stop", {"finish": True}) == {"stopping": False}
    assert asked.calls == [("finish", False), ("finish", True)]
    asked.calls.clear()
    asked.is_running = False
    assert asked.call("stop", {"finish": True}) == {"stopping": True}
    assert asked.calls == [("stop",)]


def test_a_pause_that_leaves_something_is_an_error_that_says_what() -> None:
    asked = Asked()
    asked.release = Release(
        after_s=5.0, num_processes=2, gpu_freed_bytes=None, problem="process 7 cannot be ended"
    )
    with pytest.raises(ControlError, match="process 7 cannot be ended"):
        asked.call("pause", {})
    assert asked.calls == [("pause", None)]


@pytest.mark.parametrize(
    "for_s", [0, 0.5, -1, MAX_PAUSE_S + 1, "10", True, [], {}, float("nan"), float("inf"), 10**30]
)
def test_pausing_for_nonsense_is_refused(for_s: object) -> None:
    asked = Asked()
    with pytest.raises(ControlError, match="for_s"):
        asked.call("pause", {"for_s": for_s})
    assert not asked.calls


@pytest.mark.parametrize(
    ("verb", "most"), [("history", MAX_HISTORY), ("contributions", MAX_CONTRIBUTIONS)]
)
def test_long_lists_have_a_limit(verb: str, most: int) -> None:
    asked = Asked()
    for args in ({}, {"limit": 1}, {"limit": most}):
        asked.call(verb, args)
    calls = [call for call in asked.calls if call[0] == verb]
    assert [call[3] for call in calls] == [200, 1, most]
    assert calls[0][1:3] == (asked.source.spec.run_id, "dense")
    for limit in (0, -5, most + 1, "all", None, 1e300):
        with pytest.raises(ControlError, match="limit"):
            asked.call(verb, {"limit": limit})
