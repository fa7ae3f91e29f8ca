"""Locks that cost nothing where they are free. Runs in: agent.

trio gives way to all other tasks for each lock that is taken. Bytes in bulk take three for each
piece, and what they wait for next gives way as well.
"""

from __future__ import annotations

import trio


async def take(lock: trio.Lock) -> None:
    """Take `lock`, at once where nobody has it or waits for it; the caller releases it.

    Cancellation: the lock is not taken; but where it is free, a cancellation is not noticed here.
    """
    try:
        lock.acquire_nowait()
    except trio.WouldBlock:
        await lock.acquire()
