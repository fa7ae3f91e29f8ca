"""What the log tells of odd time, and that ordinary time is not told of."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from volunteer.agent.time_watch import LOOK_EVERY_S, TimeWatch


@dataclass
class Clocks:
    """Three clocks that a test moves."""

    clock_s: float = 1000.0
    wall_s: float = 1.8e9
    awake_s: float = 900.0

    def pass_time(self, seconds: float = LOOK_EVERY_S, *, asleep_s: float = 0.0) -> None:
        self.clock_s += seconds + asleep_s
        self.wall_s += seconds + asleep_s
        self.awake_s += seconds


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def watch(clocks: Clocks) -> TimeWatch:
    watch = TimeWatch(lambda: clocks.clock_s, lambda: clocks.wall_s, lambda: clocks.awake_s)
    assert watch.look() == []
    return watch


def test_ordinary_time_and_small_corrections_are_not_told(clocks: Clocks, watch: TimeWatch) -> None:
    for _ in range(100):
        clocks.pass_time(LOOK_EVERY_S + 3)
        clocks.wall_s += 30
        assert watch.look() == []


@pytest.mark.parametrize(
    ("set_s", "words"),
    [
        (86400, "forward by 24 h"),
        (-2 * 86400, "back by 48 h"),
        (5400, "forward by 1 h 30 min"),
        (-60, "back by 1 min"),
    ],
)
def test_a_clock_that_was_set_is_told_once(
    clocks: Clocks, watch: TimeWatch, set_s: float, words: str
) -> None:
    clocks.pass_time()
    clocks.wall_s += set_s
    assert watch.look() == [f"the system's clock was set {words}"]
    clocks.pass_time()
    assert watch.look() == []


def test_standing_still_is_told_from_sleep(clocks: Clocks, watch: TimeWatch) -> None:
    clocks.pass_time(62.0)
    assert watch.look() == ["this program stood still for 60 s"]
    clocks.pass_time(asleep_s=3600.0)
    assert watch.look() == ["the machine has slept for 3600 s"]
