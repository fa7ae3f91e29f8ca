"""Who uses a Mac or a Windows machine: one source, in a thread of its own.

Runs in: agent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from volunteer.policy.sensors.linux_presence import Presence
from volunteer.policy.sensors.watcher import Source, Watcher
from volunteer.policy.signals import InputReading, SourceFailure

INPUT_EVERY_S = 0.4
_SAME_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignReading:
    """What such a system says."""

    touched_at_s: float
    """Instant on the monotonic clock."""
    is_locked: bool | None
    inhibitors: tuple[str, ...] = ()
    games: int = 0


class ForeignPresence:
    """The watcher of such a system."""

    def __init__(self, source: Source[ForeignReading], notify: Callable[[], None]) -> None:
        """Watch `source`."""
        self._watcher = Watcher(source, INPUT_EVERY_S, notify, is_news=_is_news)

    def start(self) -> None:
        """Begin to watch."""
        self._watcher.start()

    def stop(self) -> None:
        """End; does not wait."""
        self._watcher.stop()

    def hurry(self) -> None:
        """Have it ask at once."""
        self._watcher.hurry()

    def watchers(self) -> list[Watcher[object]]:
        """Return the one watcher."""
        return [self._watcher]  # type: ignore[list-item]  # read only

    def note_client(self, pid: int) -> None:
        """Terminals are not looked at here."""

    def allow_sleep(self) -> None:
        """Sleep is only noticed afterwards here."""

    def read(self, now_s: float) -> Presence:
        """Return the reading at `now_s` of the monotonic clock; never waits."""
        reading = self._watcher.latest()
        told = reading.value
        if told is None:
            failures = (SourceFailure(name=self._watcher.name, problem=reading.problem),)
            return Presence(
                input=InputReading(has_desktop=True, failures=failures if reading.problem else ())
            )
        return Presence(
            input=InputReading(
                has_desktop=True,
                idle_s=max(0.0, now_s - told.touched_at_s),
                desktop_source=self._watcher.name,
                is_locked=told.is_locked,
                inhibitors=told.inhibitors,
            ),
            games=told.games,
        )


def _is_news(before: ForeignReading | None, after: ForeignReading | None) -> bool:
    if before is None or after is None:
        return before is not after
    has_moved = abs(after.touched_at_s - before.touched_at_s) > _SAME_S
    rest = [(r.is_locked, r.inhibitors, r.games) for r in (before, after)]
    return has_moved or rest[0] != rest[1]
