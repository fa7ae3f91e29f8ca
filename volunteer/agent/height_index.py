"""Record ids by height, so that a question about the newest never looks at the oldest.

Runs in: agent.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator


class HeightIndex:
    """Ids with their heights; within a height in the order in which they came."""

    def __init__(self) -> None:
        """Begin empty."""
        self._height_of: dict[str, int] = {}
        self._at: dict[int, dict[str, None]] = {}
        self._heights: list[int] = []

    def __len__(self) -> int:
        """Count the ids."""
        return len(self._height_of)

    def __contains__(self, record_id: object) -> bool:
        """Return whether an id is there."""
        return record_id in self._height_of

    def __getitem__(self, record_id: str) -> int:
        """Return the height of an id; KeyError if it is not there."""
        return self._height_of[record_id]

    def add(self, record_id: str, height: int) -> None:
        """Put an id in; again changes nothing."""
        if record_id in self._height_of:
            return
        self._height_of[record_id] = height
        if height not in self._at:
            self._at[height] = {}
            bisect.insort(self._heights, height)
        self._at[height][record_id] = None

    def discard(self, record_id: str) -> None:
        """Take an id out, if it is there."""
        height = self._height_of.pop(record_id, None)
        if height is None:
            return
        del self._at[height][record_id]
        if not self._at[height]:
            del self._at[height]
            del self._heights[bisect.bisect_left(self._heights, height)]

    def rising(self, from_height: int) -> Iterator[str]:
        """Yield the ids from a height on, the lowest first. Nothing may change meanwhile."""
        for height in self._heights[bisect.bisect_left(self._heights, from_height) :]:
            yield from self._at[height]

    def falling(self, from_height: int) -> Iterator[str]:
        """Yield the ids from a height on, the highest first. Nothing may change meanwhile."""
        for height in reversed(self._heights[bisect.bisect_left(self._heights, from_height) :]):
            yield from self._at[height]
