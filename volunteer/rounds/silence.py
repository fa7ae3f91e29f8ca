"""Keeps a member silent that has lost what it signed.

Runs in: agent, simulation. Sans-IO.

A member whose disk is gone but not its key has signed votes, contributions and proposals that it
does not know of, and to sign another one is proof of lying (ROUNDS.md rules 24 and 26). Whatever it
signed before stands on commits that somebody knew then. So it listens first, for two rounds; its
own records come back to it meanwhile, as anybody's do. Then it signs only on heights above all that
was known when it had listened: where it cannot have signed before. One more height is left out,
since its last proposal may have reached nobody that it has heard.

Where nobody has committed anything for long, it may be alone: what it signed was then lost with its
disk, and nobody is left to be lied to. It goes on, since a run whose last member has lost its
records would otherwise end; the wait is longer than a network is down.

Time counts in small steps, so that a clock which jumps does not end the listening.
"""

from __future__ import annotations

from dataclasses import dataclass

LISTEN_ROUNDS = 2.0
MARGIN_HEIGHTS = 1
ALONE_ROUNDS = 144.0
"""A day at 600 s. Members that were away for longer may still ban such a one."""
STEPS_PER_ROUND = 10
"""Between two events at most this part of a round counts as listened to."""


@dataclass(slots=True)
class Silence:
    """Whether a member may sign anything."""

    is_kept: bool = False
    """Whether it has lost what it signed, and does not know enough to sign again."""
    _floor: int = 0
    """Height up to which it may have signed before."""
    _highest: int = 0
    _listened_s: float = 0.0
    _quiet_s: float = 0.0
    """Listened to since the last commit above all others."""
    _last_s: float | None = None

    def may_sign(self, height: int, highest_known: int, now_s: float, round_s: float) -> bool:
        """Return whether something may be signed on a commit at `height`.

        Args:
            height: of the tip.
            highest_known: height of the highest valid commit known, on any branch.
            now_s: own clock.
            round_s: length of a round.
        """
        if not self.is_kept:
            return True
        passed_s = 0.0
        if self._last_s is not None:
            passed_s = min(now_s - self._last_s, round_s / STEPS_PER_ROUND)
        self._last_s = now_s
        self._listened_s += passed_s
        self._quiet_s = 0.0 if highest_known > self._highest else self._quiet_s + passed_s
        self._highest = max(self._highest, highest_known)
        if self._quiet_s >= ALONE_ROUNDS * round_s:
            self.is_kept = False
            return True
        # Who has heard of no commit has heard nobody: what it signed was at least on the genesis.
        if not highest_known or self._listened_s < LISTEN_ROUNDS * round_s:
            self._floor = max(self._floor, highest_known)
            return False
        self.is_kept = height <= self._floor + MARGIN_HEIGHTS
        return not self.is_kept
