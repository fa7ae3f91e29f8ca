"""A trainer hangs when it takes no step for long, by what it has needed before."""

from __future__ import annotations

from volunteer.agent.step_watch import (
    SILENCE_DEADLINE_S,
    SLOWEST_TIMES,
    WATCH_EVERY_S,
    StepWatch,
)


def silent_s(watch: StepWatch) -> float:
    """Return how long it may be silent from now on."""
    for number in range(1, 10_000):
        if watch.is_hung(WATCH_EVERY_S):
            return number * WATCH_EVERY_S
    raise AssertionError("for ever")


def pass_time(watch: StepWatch, seconds: float) -> None:
    for _ in range(int(seconds / WATCH_EVERY_S)):
        assert not watch.is_hung(WATCH_EVERY_S)


def test_one_that_never_starts_hangs() -> None:
    assert silent_s(StepWatch()) == SILENCE_DEADLINE_S


def test_one_that_was_not_told_where_to_stand_has_nothing_to_do() -> None:
    watch = StepWatch()
    watch.note_started()
    pass_time(watch, 100 * SILENCE_DEADLINE_S)
    watch.note_placed()
    assert silent_s(watch) == SILENCE_DEADLINE_S


def test_the_first_weights_may_take_long_to_read_but_only_the_first() -> None:
    watch = StepWatch()
    watch.note_placed()
    pass_time(watch, SILENCE_DEADLINE_S - WATCH_EVERY_S)
    watch.note_rebased()
    pass_time(watch, SILENCE_DEADLINE_S - WATCH_EVERY_S)
    watch.note_rebased()
    assert silent_s(watch) == WATCH_EVERY_S


def test_a_slow_machine_has_as_much_time_as_it_is_slow() -> None:
    watch = StepWatch()
    watch.note_placed()
    for _ in range(3):
        pass_time(watch, 60.0)
        watch.note_step()
    assert silent_s(watch) == SLOWEST_TIMES * 60.0


def test_time_that_nobody_has_watched_counts_little() -> None:
    watch = StepWatch()
    watch.note_placed()
    assert not watch.is_hung(100 * SILENCE_DEADLINE_S)
    watch.note_step()
    assert watch.deadline_s == SILENCE_DEADLINE_S, "nor is it how slow the machine is"


def test_who_prepares_data_for_hours_does_not_hang() -> None:
    watch = StepWatch()
    for _ in range(1000):
        assert not watch.is_hung(WATCH_EVERY_S)
        watch.note_preparing()
        assert watch.is_preparing
    watch.note_prepared()
    assert not watch.is_preparing
    hung_after = next(n for n in range(1000) if watch.is_hung(WATCH_EVERY_S))
    assert abs(hung_after * WATCH_EVERY_S - SILENCE_DEADLINE_S) <= 2 * WATCH_EVERY_S
