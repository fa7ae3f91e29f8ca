"""How fast bytes may go, and whose go first. Runs in: agent.

Two things, for all connections of a swarm together:

* A rate limit for each direction. Whatever a socket carries is counted against it; blob answers
  wait for it before each piece, and reading waits for it, so that small messages are never held up
  by it, and the blobs, which are nearly all bytes, pay for them.
* Bulk yields. While urgent blobs move, bulk ones get a tenth of what those do, and a little at
  least, so that nobody can stop them altogether by trickling.

`RateLimit` and `Yielding` are pure: the clock comes in.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Final

import trio

from p2p.allowance import Allowance

BURST_S: Final = 0.25  # of the rate: what may go at once after a silence
QUIET_S: Final = 1.0  # without an urgent byte: bulk need not yield; 64 KiB at 64 KiB/s
BULK_SHARE: Final = 0.1  # of the urgent bytes, while those move
BULK_FLOOR_BYTES_PER_S: Final = 16 << 10
MAX_BULK_CREDIT_BYTES: Final = 128 << 10  # two pieces
MIN_WAIT_S: Final = 0.001  # shorter ones are lost in rounding
LOOK_EVERY_S: Final = 0.05  # while bulk yields
MIN_READ_BYTES: Final = 8 << 10  # of one socket at a time, where downloads are limited
READS_PER_S: Final = 8  # so that one socket's piece delays the others by no more than 1/8 s


class Priority(Enum):
    """Which blobs go first."""

    URGENT = "urgent"
    BULK = "bulk"


class RateLimit:
    """A bucket of bytes that may be in debt: what cannot wait is counted, what can waits for it."""

    def __init__(self, bytes_per_s: int) -> None:
        """Allow `bytes_per_s`; 0: no limit."""
        self.bytes_per_s = bytes_per_s
        self._balance = 0.0
        self._at_s = -math.inf
        self._prepaid = 0.0

    def share_of(self, bytes_per_s: int, most: int) -> int:
        """Say how many, at least 1 and at most `most`, can have `bytes_per_s` each."""
        return max(1, min(most, self.bytes_per_s // bytes_per_s)) if self.bytes_per_s else most

    def wait_s(self, now_s: float) -> float:
        """Give the seconds until bytes may go again; 0.0: now."""
        if not self.bytes_per_s:
            return 0.0
        self._refill(now_s)
        return max(0.0, -self._balance / self.bytes_per_s)

    def prepay(self, num_bytes: int, now_s: float) -> None:
        """Count bytes that are about to reach a socket."""
        if self.bytes_per_s:
            self._refill(now_s)
            self._balance -= num_bytes
            self._prepaid += num_bytes

    def count(self, num_bytes: int, now_s: float) -> None:
        """Count bytes at a socket, less those that were paid for before."""
        if self.bytes_per_s:
            paid = min(self._prepaid, num_bytes)
            self._prepaid -= paid
            self._refill(now_s)
            self._balance -= num_bytes - paid

    def _refill(self, now_s: float) -> None:
        most = self.bytes_per_s * BURST_S
        self._balance = min(most, self._balance + (now_s - self._at_s) * self.bytes_per_s)
        self._at_s = now_s


class Yielding:
    """When bulk bytes may go, next to urgent ones."""

    def __init__(self) -> None:
        self.num_urgent_waiting = 0
        """Urgent pieces that wait for the rate limit: no bulk goes before them."""
        self._urgent_at_s = -math.inf
        self._credit_bytes = 0.0
        self._at_s = -math.inf

    def note_urgent(self, num_bytes: int, now_s: float) -> None:
        """Urgent bytes have moved."""
        self._refill(now_s)
        self._urgent_at_s = now_s
        self._credit(num_bytes * BULK_SHARE)

    def may_go(self, now_s: float) -> bool:
        """Tell whether bulk bytes may go now."""
        if not self._is_active(now_s):
            return True
        self._refill(now_s)
        return self._credit_bytes >= 0.0

    def take(self, num_bytes: int, now_s: float) -> None:
        """Bulk bytes go."""
        if self._is_active(now_s):
            self._refill(now_s)
            self._credit_bytes -= num_bytes

    def _is_active(self, now_s: float) -> bool:
        return self.num_urgent_waiting > 0 or now_s - self._urgent_at_s < QUIET_S

    def _refill(self, now_s: float) -> None:
        if now_s - self._at_s > QUIET_S:  # nothing was urgent: begin anew
            self._credit_bytes = 0.0
        else:
            self._credit((now_s - self._at_s) * BULK_FLOOR_BYTES_PER_S)
        self._at_s = now_s

    def _credit(self, num_bytes: float) -> None:
        self._credit_bytes = min(MAX_BULK_CREDIT_BYTES, self._credit_bytes + num_bytes)


class Flow:
    """The bytes of one swarm."""

    def __init__(
        self,
        upload_bytes_per_s: int,
        download_bytes_per_s: int,
        allowance: Allowance | None = None,
    ) -> None:
        """Limit all connections together; 0: no limit. What crosses is taken from `allowance`."""
        self.allowance = allowance or Allowance()
        self.num_bytes_written = 0
        """By all sockets that there were."""
        self.num_bytes_read = 0
        self.upload = RateLimit(upload_bytes_per_s)
        self.download = RateLimit(download_bytes_per_s)
        self._sending = Yielding()
        self._asking = Yielding()
        # Those that wait go in the order in which they came; urgent ones have a queue of their own.
        self._queues = {priority: trio.Lock() for priority in Priority}

    # -- sockets

    def note_written(self, num_bytes: int) -> None:
        """A socket has taken so many bytes."""
        self.upload.count(num_bytes, trio.current_time())
        self.num_bytes_written += num_bytes
        self.allowance.take(num_bytes)

    def note_read(self, num_bytes: int) -> None:
        """A socket has given so many bytes."""
        self.download.count(num_bytes, trio.current_time())
        self.num_bytes_read += num_bytes
        self.allowance.take(num_bytes)

    async def wait_to_read(self) -> None:
        """Wait until the limit of downloads lets a socket be read."""
        while (wait_s := self.download.wait_s(trio.current_time())) > 0.0:  # noqa: ASYNC110 -- time
            await trio.sleep(max(wait_s, MIN_WAIT_S))  # noqa: TID251 -- the rate

    def max_read_bytes(self, most: int) -> int:
        """Say how much of a socket to read at a time."""
        rate = self.download.bytes_per_s
        return min(most, max(MIN_READ_BYTES, int(rate / READS_PER_S))) if rate else most

    # -- blobs

    async def wait_to_send(self, num_bytes: int, priority: Priority) -> None:
        """Wait until a piece of a blob of `priority` may be written, and pay for it."""
        is_urgent = priority is Priority.URGENT
        self._sending.num_urgent_waiting += is_urgent
        try:
            async with self._queues[priority]:
                while (wait_s := self._send_wait_s(priority)) > 0.0:  # noqa: ASYNC110 -- time
                    await trio.sleep(max(wait_s, MIN_WAIT_S))  # noqa: TID251 -- the rate
                self.upload.prepay(num_bytes, trio.current_time())
        finally:
            self._sending.num_urgent_waiting -= is_urgent
        now_s = trio.current_time()
        if is_urgent:
            self._sending.note_urgent(num_bytes, now_s)
        else:
            self._sending.take(num_bytes, now_s)

    def note_sending(self, num_bytes: int) -> None:
        """An urgent piece is about to be written without a wait: uploads are not limited."""
        self._sending.note_urgent(num_bytes, trio.current_time())

    def _send_wait_s(self, priority: Priority) -> float:
        now_s = trio.current_time()
        wait_s = self.upload.wait_s(now_s)
        if priority is Priority.BULK and not self._sending.may_go(now_s):
            wait_s = max(wait_s, LOOK_EVERY_S)
        return wait_s

    def note_fetched(self, num_bytes: int, priority: Priority) -> None:
        """Bytes of a blob have come; what is sent in bulk yields to urgent ones too."""
        if priority is Priority.URGENT:
            now_s = trio.current_time()
            self._sending.note_urgent(num_bytes, now_s)
            self._asking.note_urgent(num_bytes, now_s)

    def may_ask(self, num_bytes: int, priority: Priority) -> bool:
        """Tell whether a chunk of a blob may be asked for now, and count it if so."""
        now_s = trio.current_time()
        if priority is Priority.BULK:
            if not self._asking.may_go(now_s):
                return False
            self._asking.take(num_bytes, now_s)
        return True
