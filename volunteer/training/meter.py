"""How fast training goes, and how well: what the progress reports say.

Runs in: trainer. Pure.
"""

from __future__ import annotations

from collections import deque

RATE_WINDOW_S = 10.0
"""Of training time: long enough to be steady, short enough to show a change."""


class Meter:
    """Speed over the last RATE_WINDOW_S of training, and the mean loss since the last report."""

    def __init__(self, now_s: float) -> None:
        """Begin at `now_s`, on any monotonic clock."""
        self.reported_at = now_s
        self._steps: deque[tuple[float, int]] = deque()
        self._losses: list[float] = []
        self._rest_s = 0.0

    def add_rest(self, duration_s: float) -> None:
        """Count the rest that the owner's duty cycle wants before the next step."""
        self._rest_s += duration_s

    def add_step(self, duration_s: float, num_tokens: int, loss: float) -> None:
        """Count one inner step."""
        self._losses.append(loss)
        self._steps.append((duration_s + self._rest_s, num_tokens))
        self._rest_s = 0.0
        while len(self._steps) > 1 and self._training_s - self._steps[0][0] >= RATE_WINDOW_S:
            self._steps.popleft()

    @property
    def _training_s(self) -> float:
        return sum(duration_s for duration_s, _ in self._steps)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of training and the rest between steps; pauses do not count."""
        num_tokens = sum(num_tokens for _, num_tokens in self._steps)
        return num_tokens / self._training_s if self._training_s > 0 else 0.0

    def take_mean_loss(self, now_s: float) -> float:
        """Return the mean loss of the steps since the last call; there was at least one."""
        mean = sum(self._losses) / len(self._losses)
        self._losses.clear()
        self.reported_at = now_s
        return mean
