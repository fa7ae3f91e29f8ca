"""What the owner has said about pausing: now, for a while, or when the round has closed.

Runs in: agent. It is kept over a restart (kept_pause.py), until it is taken back or over. A finish
that something else interrupts is a pause from then on: the round is missed anyway, and a machine
that was told to rest must not begin again at night to end a round. An agent that was to end with
the round, and is started anew by the system after a crash, ends with it all the same; the owner's
own `start` takes that back (tui/launch.py).
"""

from __future__ import annotations

import functools
from pathlib import Path

import trio

from volunteer.agent.kept_pause import KeptWord, keep_pause, read_pause
from volunteer.policy.signals import OwnerPause

FINISH_ROUNDS = 3.0
"""A round that has not closed within so many of its lengths will not: it is left then."""


class OwnersWord:
    """The last one counts."""

    def __init__(self, file: Path, now_s: float, *, is_owners_start: bool = False) -> None:
        """Take it from the disk.

        Args:
            file: where it is kept.
            now_s: the agent's clock.
            is_owners_start: whether the owner has just started the agent: a stop before is over.
        """
        self._file = file
        kept = read_pause(file, now_s)
        if kept.ends_agent and is_owners_start:
            keep_pause(file, None, now_s)
            kept = KeptWord()
        self.pause = kept.pause
        """None: the owner has not said pause."""
        self._is_kept_as_pause = False
        self.ends_agent = kept.ends_agent
        """Whether the agent ends with the round that is finished."""

    @property
    def finishes_round(self) -> int | None:
        """The round after whose close it rests, as people count them; None: none is awaited."""
        if self.pause is None or self.pause.after_round is None:
            return None
        return self.pause.after_round - 1

    def say_pause(self, now_s: float, for_s: float | None) -> None:
        """Rest, for some seconds or until resumed."""
        self.ends_agent = False
        self.pause = OwnerPause(until_s=None if for_s is None else now_s + for_s)

    def say_finish(
        self, now_s: float, round_index: int, round_s: float, *, ends_agent: bool
    ) -> None:
        """Rest, or end the agent, when the round that is trained on `round_index` has closed."""
        self.ends_agent = ends_agent
        self.pause = OwnerPause(
            after_round=round_index + 1, at_latest_s=now_s + FINISH_ROUNDS * round_s
        )

    def say_resume(self) -> None:
        """Take everything back."""
        self.ends_agent = False
        self.pause = None

    async def keep(self, now_s: float) -> None:
        """Put it on the disk."""
        await self._write(self.pause, now_s)

    async def keep_as_pause(self, now_s: float) -> None:
        """Put a finish that has come to pass on the disk as a pause, once."""
        if not self._is_kept_as_pause:
            await self._write(OwnerPause(), now_s)
            self._is_kept_as_pause = True

    async def _write(self, pause: OwnerPause | None, now_s: float) -> None:
        self._is_kept_as_pause = False
        ends_agent = self.ends_agent and pause is not None
        keep = functools.partial(keep_pause, self._file, pause, now_s, ends_agent=ends_agent)
        await trio.to_thread.run_sync(keep)
