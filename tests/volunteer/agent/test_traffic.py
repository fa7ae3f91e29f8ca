"""Every byte has a purpose."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import trio
from trio.testing import MockClock

from tests.fakes.members import SignedChain, rules
from tests.fakes.virtual_time import in_nursery, run_virtual, settle
from volunteer.agent.bookkeeper import Bookkeeper
from volunteer.agent.traffic import MAX_PURPOSES, TrafficMeter
from volunteer.rounds.knowledge import Knowledge
from volunteer.rounds.records import Contribution


def test_every_byte_is_accounted_once() -> None:
    written: list[tuple[str, int, int]] = []
    counters = SimpleNamespace(
        sent_bytes_by_purpose={"sync": 10},
        received_bytes_by_purpose={"states": 5},
        wire_sent_bytes=13,
        wire_received_bytes=5,
    )
    swarm = cast("Any", SimpleNamespace(statistics=lambda: counters))
    queue: list[Callable[[], object]] = []
    keeper = cast("Bookkeeper", SimpleNamespace(queue=queue.append))
    ledger = cast("Any", SimpleNamespace(add_bytes=lambda *row: written.append(row)))
    meter = TrafficMeter(swarm, keeper, ledger, Knowledge(rules()))

    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        await meter.flush()
        nursery.start_soon(meter.run)
        await settle()
        counters.sent_bytes_by_purpose = {"sync": 25}  # counted, and not yet on the wire
        clock.jump(60.0)
        await settle()
        counters.wire_sent_bytes = 30
        await meter.flush()
        for write in queue:
            write()

    run_virtual(in_nursery(main))
    assert written == [
        *(("overhead", 3, 0), ("states", 0, 5), ("sync", 10, 0)),
        *(("overhead", -3, 0), ("sync", 15, 0)),
        ("overhead", 5, 0),
    ]
    assert meter.by_purpose() == {
        "overhead": {"sent": 5, "received": 0},
        "states": {"sent": 0, "received": 5},
        "sync": {"sent": 25, "received": 0},
    }


def test_an_upload_is_a_contribution_or_a_state() -> None:
    chain = SignedChain()
    chain.grow(chain.genesis, MAX_PURPOSES // 2 + 1)
    known = Knowledge(rules())
    nowhere = cast("Any", None)
    meter = TrafficMeter(nowhere, nowhere, nowhere, known)
    state = "5a" * 32
    assert meter.purpose_of(state) == "states"
    blobs = []
    for record_id, record in chain.builder.records.items():
        known.add(record_id, record)
        if isinstance(record, Contribution):
            blobs.append(record.blob_id)
            assert meter.purpose_of(record.blob_id) == "contributions"
    assert len(set(blobs)) > MAX_PURPOSES
    assert [meter.purpose_of(blob) for blob in (blobs[0], state)] == ["contributions", "states"]
    assert len(meter._purposes) == MAX_PURPOSES
