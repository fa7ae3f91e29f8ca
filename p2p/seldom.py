"""Logs what can be caused at will: once a kind, and later again with how often.

Runs in: agent. Pure but for the log.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

LOG_AGAIN_S: Final = 600.0


class SeldomLog:
    """One line a kind in ten minutes, so that nobody can fill the disk with log."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        """Log to `log`; `clock` gives monotonic seconds."""
        self._log = log
        self._clock = clock
        self._logged_at_s: dict[str, float] = {}
        self._num_unlogged: Counter[str] = Counter()

    def note(self, who: str, what: str) -> None:
        """Note that `who` did `what`, a sentence that is one of few."""
        logged_at_s = self._logged_at_s.get(what)
        if logged_at_s is not None and self._clock() - logged_at_s < LOG_AGAIN_S:
            self._num_unlogged[what] += 1
            return
        self._logged_at_s[what] = self._clock()
        self._log.info("refused %s others=%d: %s", who, self._num_unlogged.pop(what, 0), what)
