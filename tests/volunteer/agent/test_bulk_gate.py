"""What holds the network's bulk shut stops it at once, and it goes on where it was."""

from __future__ import annotations

import trio
import trio.testing

from tests.fakes.virtual_time import in_nursery, run_virtual, settle
from volunteer.agent.bulk_gate import BulkGate


def test_a_transfer_waits_stops_and_goes_on() -> None:
    gate = BulkGate()
    begun: list[float] = []
    done = trio.Event()

    async def transfer() -> None:
        begun.append(trio.current_time())
        await done.wait()

    async def main(nursery: trio.Nursery, clock: trio.testing.MockClock) -> None:
        gate.hold("hours", "it is night")
        ended = trio.Event()

        async def whole() -> None:
            await gate.run(transfer)
            ended.set()

        nursery.start_soon(whole)
        await settle()
        assert begun == []
        gate.hold("hours", "")
        await settle()
        assert len(begun) == 1
        gate.hold("metered", "it is paid by volume")
        gate.hold("hours", "it is night")
        await settle()
        assert gate.reason == "it is paid by volume"
        gate.hold("metered", "")
        await settle()
        assert gate.reason == "it is night"
        assert len(begun) == 1, "somebody still holds it"
        gate.hold("hours", "")
        await settle()
        assert len(begun) == 2
        done.set()
        await ended.wait()
        gate.hold("hours", "it is night")  # nothing is under way

    run_virtual(in_nursery(main))
    assert gate.reason == "it is night"


def test_a_cancelled_transfer_stays_cancelled() -> None:
    gate = BulkGate()

    async def main(nursery: trio.Nursery, clock: trio.testing.MockClock) -> None:
        with trio.CancelScope() as scope:
            nursery.start_soon(settle)
            scope.cancel()
            await gate.run(trio.sleep_forever)
        assert scope.cancelled_caught

    run_virtual(in_nursery(main))


def test_who_only_minds_fetching_lets_others_have_what_is_here() -> None:
    gate = BulkGate()
    assert gate.may_serve
    gate.hold("disk", "it is full", is_fetching_only=True)
    assert gate.reason
    assert gate.may_serve
    gate.hold("policy", "it is paid by volume")
    assert not gate.may_serve
    gate.hold("policy", "")
    assert gate.may_serve
