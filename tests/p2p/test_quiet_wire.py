"""What goes over the wire besides what is said: little, and nothing for what was heard already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from p2p import guarded_yamux, stream_window
from p2p.guarded_yamux import GuardedYamux
from p2p.stream_window import MIN_TOLD_BYTES, tell_window
from p2p.swarm import Swarm
from tests.p2p.support import Listener, publish_until_heard, swarm, trio_test, until

NUM_MESSAGES = 20
MESSAGE_BYTES = 500
PERIOD_S = 5.0
MOST_ADDED_BYTES = 320
"""A message's signature, key, author, number and topic, and the frames around it."""


def test_a_reader_tells_of_many_bytes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    async def stock(_stream: object, *, bytes_read: int) -> None:
        await trio.lowlevel.checkpoint()
        told.append(bytes_read)

    monkeypatch.setattr(stream_window, "_stock", stock)
    stream = cast("Any", SimpleNamespace(target_recv_window=256 << 10))

    async def main() -> None:
        for num_bytes in (1, 1, 500, MIN_TOLD_BYTES - 503):
            await tell_window(stream, bytes_read=num_bytes)
        assert told == []
        await tell_window(stream, bytes_read=1)
        await tell_window(stream, bytes_read=7)
        await tell_window(stream, bytes_read=2 * MIN_TOLD_BYTES)

    trio.run(main)
    assert told == [MIN_TOLD_BYTES, 2 * MIN_TOLD_BYTES + 7], "every byte, in time"


@trio_test
async def test_hearing_a_message_costs_next_to_nothing() -> None:
    quiet = {"ping_every_s": 60.0, "discover_every_s": 60.0}
    async with swarm(**quiet) as one, swarm(*one.listen_addrs, **quiet) as other:
        at_one, at_other = Listener(), Listener()
        await at_one.subscribe(one)
        await at_other.subscribe(other)
        await publish_until_heard(one, b"hello", at_other)
        await publish_until_heard(other, b"hello", at_one)
        sent, answered = _wire_sent(one), _wire_sent(other)
        before = len(at_other.heard)
        for number in range(NUM_MESSAGES):
            payload = b"%03d" % number + bytes(MESSAGE_BYTES - 3)
            await one.publish("test/topic", payload, purpose="talk")
        await until(lambda: len(at_other.heard) >= before + NUM_MESSAGES)
        sent, answered = _wire_sent(one) - sent, _wire_sent(other) - answered
        assert sent <= NUM_MESSAGES * (MESSAGE_BYTES + MOST_ADDED_BYTES)
        assert answered <= sent / 20


class Connection:
    """What a multiplexer waits with: the socket's last byte, and its end."""

    def __init__(self) -> None:
        self.last_received_at = trio.current_time()
        self.event_shutting_down = trio.Event()

    async def hear_every(self, period_s: float) -> None:
        while True:
            await trio.sleep(period_s)  # noqa: TID251 - virtual time
            self.last_received_at = trio.current_time()

    async def silent_s(self) -> float:
        """Return how long it takes until the other end is asked."""
        begun_s = trio.current_time()
        await GuardedYamux._wait_silent(cast("Any", self), PERIOD_S)
        return trio.current_time() - begun_s


def test_only_a_silent_end_is_asked_and_a_talking_one_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guarded_yamux, "tcp_stream_of", lambda connection: connection)

    async def main() -> None:
        for _ in range(20):
            assert PERIOD_S <= await Connection().silent_s() <= 1.5 * PERIOD_S
        async with trio.open_nursery() as nursery:
            # A question of the other end is a byte as well: whoever asks first asks alone.
            talking = Connection()
            nursery.start_soon(talking.hear_every, 0.9 * PERIOD_S)
            waited_s = await talking.silent_s()
            assert waited_s == pytest.approx(guarded_yamux.PINGS_SKIPPED * PERIOD_S)
            nursery.cancel_scope.cancel()
        ending = Connection()
        ending.event_shutting_down.set()
        assert await ending.silent_s() == 0.0

    trio.run(main, clock=MockClock(autojump_threshold=0))


def _wire_sent(one: Swarm) -> int:
    return one.statistics().wire_sent_bytes
