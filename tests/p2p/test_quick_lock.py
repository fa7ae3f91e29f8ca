"""A lock that is free is taken without a turn of the loop; one that is not, in its turn."""

from __future__ import annotations

import trio
from trio.testing import assert_no_checkpoints, wait_all_tasks_blocked

from p2p.quick_lock import take


def test_who_waits_goes_first() -> None:
    taken: list[str] = []
    lock = trio.Lock()

    async def use(name: str) -> None:
        await take(lock)
        taken.append(name)
        lock.release()

    async def main() -> None:
        with assert_no_checkpoints():
            await take(lock)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(use, "waiting")
            await wait_all_tasks_blocked()
            lock.release()
            await use("later")

    trio.run(main)
    assert taken == ["waiting", "later"]


def test_who_is_cancelled_while_waiting_does_not_have_it() -> None:
    async def main() -> None:
        lock = trio.Lock()
        await take(lock)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(take, lock)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        lock.release()
        assert not lock.locked()

    trio.run(main)
