"""What a pause costs is said before it, and what it gave back after it."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from tests.fakes.fake_agent import make_status
from tui import pause_words, view_state
from volunteer.answers import Release

BERLIN = timezone(timedelta(hours=1))
NOW = datetime(2026, 11, 30, 12, 0, tzinfo=BERLIN)


def test_a_pause_says_that_steps_are_kept_and_the_round_is_missed() -> None:
    assert pause_words.pause_cost(make_status()) == (
        "Round 12, step 3100, closes in about 5 min 50 s; pausing now keeps your steps but misses"
        " this round.",
        "Steps are saved first: a pause loses nothing, or, if the trainer has to be killed, at most"
        " those since its last checkpoint.",
        "527k tokens not sent yet are kept, and sent after you resume.",
    )


def test_the_cost_of_a_pause_is_not_made_up() -> None:
    closing = make_status(round_elapsed_s=700.0, tokens_since_contribution=0)
    assert pause_words.pause_cost(closing)[0].startswith("Round 12, step 3100, is closing now;")
    assert pause_words.round_left(make_status(round_s=0.0)) == "Round 12, step 3100, is open"
    assert len(pause_words.pause_cost(None)) == 1


@pytest.mark.parametrize("state", ["starting", "catching_up"])
def test_before_the_first_step_no_round_is_said_to_close(state: str) -> None:
    young = make_status(state=state, tokens_since_contribution=0, round_elapsed_s=700.0)
    said = "Nothing has been trained in this round yet: a pause loses nothing, but misses it."
    assert pause_words.cost_sentence(young) == said
    begun = make_status(state=state, round_elapsed_s=700.0)
    assert pause_words.cost_sentence(begun).startswith("Round 12, step 3100, is closing now;")


@pytest.mark.parametrize("state", ["paused", "waiting", "stopped"])
def test_where_nothing_is_trained_a_pause_costs_nothing(state: str) -> None:
    status = make_status(state=state, tokens_since_contribution=0)
    assert pause_words.pause_cost(status) == (
        "Nothing is trained just now: a pause costs nothing.",
    )


def test_what_is_to_be_finished_is_said_with_what_comes_then() -> None:
    assert pause_words.finish_sentence(make_status()) == ""
    pausing = make_status(finishes_round=12)
    said = "When round 12 has closed, in about 5 min 50 s, this machine pauses, as you said."
    assert pause_words.finish_sentence(pausing) == said
    assert said in view_state.activity(pausing)
    stopping = make_status(finishes_round=12, stops_then=True, round_elapsed_s=601.0)
    assert pause_words.finish_sentence(stopping) == (
        "When round 12 has closed, the agent stops, as you said."
    )


@pytest.mark.parametrize(
    ("num_processes", "freed_bytes", "problem", "said"),
    [
        (
            2,
            7_600_000_000,
            "",
            "2 processes ended within 1.2 s, 7.60 GB of GPU memory are free again.",
        ),
        (1, None, "", "1 process ended within 1.2 s."),
        (0, None, "", ""),
        (2, 0, "process 7 cannot be ended", "Not all is free: process 7 cannot be ended."),
    ],
)
def test_what_came_back_is_said(
    num_processes: int, freed_bytes: int | None, problem: str, said: str
) -> None:
    release = Release(
        after_s=1.23, num_processes=num_processes, gpu_freed_bytes=freed_bytes, problem=problem
    )
    status = make_status(state="paused", trainer_pid=None, release=release)
    assert pause_words.released(status) == said
    assert said in view_state.activity(status)
    assert pause_words.released(make_status()) == ""


def test_the_next_start_is_local_time() -> None:
    status = make_status(state="waiting", resumes_at_utc="2026-11-30T17:00:00Z")
    assert pause_words.next_start(status, NOW) == "18:00:00"
    assert any("18:00:00" in line for line in view_state.status_lines(status, NOW))
    assert pause_words.next_start(make_status(), NOW) == ""


def test_status_names_what_holds_the_network_unless_it_is_the_reason() -> None:
    held = "the network connection is metered"
    other = make_status(state="paused", reason="paused by you", network_held=held)
    assert any(held in line for line in view_state.status_lines(other, NOW))
    same = make_status(state="waiting", reason=held, network_held=held)
    assert sum(held in line for line in view_state.status_lines(same, NOW)[1:]) == 0
