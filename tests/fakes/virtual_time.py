"""Runs trio code in virtual time: nothing passes but what the test lets pass."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio
from trio.testing import MockClock

_T = TypeVar("_T")
_never = threading.Event()


def run_virtual(main: Callable[[MockClock], Awaitable[_T]], *, jumps: bool = False) -> _T:
    """Run `main(clock)`.

    Args:
        main: the test's body.
        jumps: whether time jumps to the next deadline when all wait; never with real processes,
            sockets or threads (see `run_threads_inline`), since waiting for those looks the same.
    """
    clock = MockClock(autojump_threshold=0.0 if jumps else math.inf)
    return trio.run(main, clock, clock=clock)


async def run_threads_inline(work: Callable[..., _T], *args: Any, **options: Any) -> _T:
    """Stand in for `trio.to_thread.run_sync` where time jumps."""
    await trio.lowlevel.checkpoint()
    return work(*args)


async def until(condition: Callable[[], object]) -> None:
    """Wait, in real time, until something outside has happened; pytest's timeout ends it."""
    while not condition():
        await trio.to_thread.run_sync(_never.wait, 0.002)


async def let_processes_run(turns: int = 1) -> None:
    """Give other processes some real milliseconds, and every task its turns."""
    for _ in range(turns):
        await trio.to_thread.run_sync(_never.wait, 0.002)


async def settle(rounds: int = 50) -> None:
    """Let every task that can run do so, without time passing."""
    for _ in range(rounds):
        await trio.lowlevel.checkpoint()


def in_nursery(
    body: Callable[[trio.Nursery, MockClock], Awaitable[Any]],
) -> Callable[[MockClock], Awaitable[None]]:
    """Return a main for `run_virtual` that gives `body` a nursery and cancels it afterwards."""

    @functools.wraps(body)
    async def main(clock: MockClock) -> None:
        async with trio.open_nursery() as nursery:
            await body(nursery, clock)
            nursery.cancel_scope.cancel()

    return main
