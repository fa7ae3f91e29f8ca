"""How much of something each peer may do in a time. Runs in: agent. Pure: the clock comes in.

One bucket for each key: full at first, refilled at a steady rate. The number of buckets is bounded;
the one that was used longest ago is forgotten, which can only be to the advantage of its peer.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

MAX_KEYS: Final = 1024


class TokenBuckets:
    """A bucket of tokens for each key."""

    def __init__(self, *, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._filled: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str, now_s: float, amount: float = 1.0) -> float:
        """Take up to `amount` tokens out of the bucket of `key`.

        Args:
            key: Whose bucket.
            now_s: Monotonic seconds.
            amount: How many are wanted.

        Returns:
            How many of them were lacking: 0.0 when all were there.
        """
        tokens, at_s = self._filled.pop(key, (self._burst, now_s))
        tokens = min(self._burst, tokens + (now_s - at_s) * self._per_s)
        taken = min(tokens, amount)
        self._filled[key] = (tokens - taken, now_s)
        if len(self._filled) > MAX_KEYS:
            self._filled.popitem(last=False)
        return amount - taken

    def forget(self, key: str) -> None:
        """Drop the bucket of `key`: the next one is full."""
        self._filled.pop(key, None)
