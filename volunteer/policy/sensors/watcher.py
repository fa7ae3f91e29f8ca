"""A thread of its own for each thing that may hang: a driver, a bus, a display, a network home.

Runs in: agent. Nobody waits for such a thread. It keeps its last reading; a reading that is older
than its period and the deadline counts as none, and says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from volunteer.errors import VolunteerError

DEADLINE_S = 2.0
"""No source may take longer to tell."""
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class SensorError(VolunteerError):
    """A source that should tell does not; the message is the end of `NAME: ...`."""


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """What a source said last."""

    value: T | None
    """None: it cannot tell."""
    problem: str = ""
    """Why not; empty where it has told, or is not there at all."""
    is_first: bool = False
    """Whether it has not said anything yet, and may still."""


class Source(Protocol[T_co]):
    """Something to ask; used by one thread only."""

    name: str

    def read(self) -> T_co:
        """Return what it says now; may wait for news for `every_s`.

        Raises:
            SensorError, OSError: it cannot tell.
        """

    def close(self) -> None:
        """Let go of what it holds open."""


class Watcher(Generic[T]):
    """Asks one source again and again."""

    def __init__(
        self,
        source: Source[T],
        every_s: float,
        notify: Callable[[], None] = lambda: None,
        *,
        deadline_s: float = DEADLINE_S,
        is_news: Callable[[T | None, T | None], bool] = lambda before, after: before != after,
    ) -> None:
        """Watch `source`.

        Args:
            source: asked by this watcher's thread alone.
            every_s: pause between two questions.
            notify: called, in that thread, when it says something else than before.
            deadline_s: how long an answer may take.
            is_news: whether an answer differs from the one before.
        """
        self.name = source.name
        self._source = source
        self._every_s = every_s
        self._deadline_s = deadline_s
        self._notify = notify
        self._is_news = is_news
        self._ending = threading.Event()
        self._hurry = threading.Event()
        self._told = threading.Event()
        self._last: tuple[float, Reading[T]] | None = None
        self._asked_at_s = time.monotonic()
        # A daemon: one that hangs must not keep the agent from ending.
        self._thread = threading.Thread(target=self._run, name=f"sensor {self.name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._asked_at_s = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Have the thread end; does not wait for it."""
        self._ending.set()
        self._hurry.set()

    def hurry(self) -> None:
        """Have it ask at once, e.g. after waking."""
        self._hurry.set()

    def wait_told(self, timeout_s: float) -> bool:
        """Wait until it has told something at all, or failed to."""
        return self._told.wait(timeout_s)

    def latest(self) -> Reading[T]:
        """Return the last reading, or what is wrong with it; never waits."""
        now_s = time.monotonic()
        silent_s = now_s - self._asked_at_s
        if self._last is None:
            if silent_s <= self._deadline_s:
                return Reading(None, is_first=True)
            return Reading(None, f"has not answered for {silent_s:.0f} s")
        told_at_s, reading = self._last
        if self._asked_at_s > told_at_s and silent_s > self._deadline_s:
            return Reading(None, f"has not answered for {silent_s:.0f} s")
        if now_s - told_at_s > self._every_s + 2 * self._deadline_s:
            return Reading(None, "its thread no longer asks")
        return reading

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                self._ask()
                self._hurry.wait(self._every_s)
                self._hurry.clear()
        finally:
            self._source.close()

    def _ask(self) -> None:
        self._asked_at_s = time.monotonic()
        try:
            reading = Reading(self._source.read())
        except SensorError as error:
            reading = Reading(None, str(error))
        except OSError as error:
            reading = Reading(None, error.strerror or str(error))
        before = self._last[1] if self._last is not None else None
        self._last = (time.monotonic(), reading)
        self._told.set()
        if (
            before is None
            or before.problem != reading.problem
            or self._is_news(before.value, reading.value)
        ):
            self._notify()
