"""Signals that must not come between starting a process and knowing it.

Runs in: the command line, demo.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from types import FrameType


@contextlib.contextmanager
def holding_signals(*numbers: signal.Signals) -> Iterator[None]:
    """Let what must be whole be whole: a signal in the meantime is raised at the end.

    A handler holds them, not a mask: that a started process would inherit.
    """
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(number)

    before = {number: signal.signal(number, hold) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _raise_first(held)


def _raise_first(held: Sequence[int]) -> None:
    if held:
        signal.raise_signal(held[0])
