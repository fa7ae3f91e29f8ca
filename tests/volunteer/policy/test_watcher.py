"""A source may hang, fail or be slow: who reads the watcher never waits, and is told which."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from volunteer.policy.sensors.watcher import Reading, SensorError, Watcher

pytestmark = pytest.mark.slow


class Script:
    """A source that does what a test says."""

    name = "script"

    def __init__(self) -> None:
        self.answer: int | Exception = 1
        self.gate = threading.Event()
        self.gate.set()
        self.asked = threading.Semaphore(0)
        self.is_closed = threading.Event()

    def read(self) -> int:
        self.asked.release()
        self.gate.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.is_closed.set()


@contextmanager
def watching(
    source: Script, every_s: float = 0.01, deadline_s: float = 0.2
) -> Iterator[tuple[Watcher[int], threading.Semaphore]]:
    news = threading.Semaphore(0)
    watcher = Watcher(source, every_s, news.release, deadline_s=deadline_s)
    watcher.start()
    try:
        yield watcher, news
    finally:
        source.gate.set()
        watcher.stop()
        assert source.is_closed.wait(5)


def until(condition: Callable[[], bool]) -> None:
    never = threading.Event()
    while not condition():
        never.wait(0.002)  # pytest's timeout ends it


def test_it_keeps_the_last_answer_and_tells_only_news() -> None:
    source = Script()
    with watching(source) as (watcher, news):
        assert watcher.wait_told(5)
        assert watcher.latest() == Reading(1)
        assert news.acquire(timeout=5)
        for _ in range(5):
            assert source.asked.acquire(timeout=5)
        assert not news.acquire(blocking=False), "the same again is no news"
        source.answer = 2
        assert news.acquire(timeout=5)
        assert watcher.latest() == Reading(2)


def test_before_the_first_answer_it_may_still_come() -> None:
    source = Script()
    source.gate.clear()
    with watching(source) as (watcher, _):
        assert source.asked.acquire(timeout=5)
        assert watcher.latest() == Reading(None, is_first=True)
        assert not watcher.wait_told(0.01)
        until(lambda: not watcher.latest().is_first)
        assert watcher.latest().problem.startswith("has not answered for")


def test_one_that_hangs_later_is_told_and_comes_back() -> None:
    source = Script()
    with watching(source) as (watcher, _):
        assert watcher.wait_told(5)
        source.gate.clear()
        until(lambda: watcher.latest().problem != "")
        assert watcher.latest().value is None, "an old answer is no answer"
        assert watcher.latest().problem.startswith("has not answered for")
        source.gate.set()
        until(lambda: watcher.latest() == Reading(1))


def test_failures_are_told_and_are_news_once() -> None:
    source = Script()
    source.answer = SensorError("it is shy")
    with watching(source) as (watcher, news):
        assert watcher.wait_told(5)
        assert watcher.latest() == Reading(None, "it is shy")
        assert news.acquire(timeout=5)
        source.answer = PermissionError(13, "Permission denied")
        assert news.acquire(timeout=5)
        assert watcher.latest() == Reading(None, "Permission denied")
        source.answer = 3
        assert news.acquire(timeout=5)
        assert watcher.latest() == Reading(3)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_died_of_a_bug_is_no_answer() -> None:
    source = Script()
    with watching(source, deadline_s=0.05) as (watcher, _):
        assert watcher.wait_told(5)
        source.answer = ZeroDivisionError("a bug")
        assert source.is_closed.wait(5)
        until(lambda: watcher.latest().problem != "")


def test_in_a_hurry_it_asks_at_once() -> None:
    source = Script()
    with watching(source, every_s=1000.0) as (watcher, _):
        assert source.asked.acquire(timeout=5)
        assert watcher.wait_told(5)
        source.answer = 2
        watcher.hurry()
        assert source.asked.acquire(timeout=5)
        until(lambda: watcher.latest() == Reading(2))
