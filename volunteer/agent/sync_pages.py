"""What to ask and what to answer in a sync: pages of records by height.

Runs in: agent. No network in here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from volunteer.agent.record_book import RecordBook
from volunteer.agent.wire import (
    MAX_HAVE,
    MAX_WANT,
    PAGE_BYTES,
    PushRecords,
    RecordsRequest,
    SyncReply,
    SyncRequest,
    WireError,
    encode,
    parse_sync_message,
)
from volunteer.rounds.machine import Machine

OVERLAP_HEIGHTS = 4
"""Below the last final commit, so that late contributions there are exchanged as well."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a neighbour's message leads to."""

    reply: SyncReply
    pushed: tuple[bytes, ...] = ()
    """Envelopes that it sent, not verified yet."""
    closed_base: str | None = None
    """A base whose round it has closed."""


class SyncPages:
    """Both sides of the exchange, for one module."""

    def __init__(self, machine: Machine, book: RecordBook) -> None:
        """Read the member's state from `machine` and its records from `book`."""
        self._machine = machine
        self._book = book
        self.run_id = machine.rules.run_id
        self.module_id = machine.rules.module_id
        self._step_back_heights = 0

    @property
    def key(self) -> tuple[str, str]:
        """(run id, module id)."""
        return (self.run_id, self.module_id)

    def knows(self, tip: str) -> bool:
        """Return whether a neighbour's tip is nothing new."""
        return tip in self._machine.known.facts

    def first_height(self) -> int:
        """Return where to begin: just below the last final commit.

        While commits wait for ancestors that are not here (a branch that left ours further down),
        each further try begins twice as far down.
        """
        final = self._machine.known.facts.get(self._machine.final_id)
        if self._machine.known.waiting:
            self._step_back_heights = max(8, 2 * self._step_back_heights)
        else:
            self._step_back_heights = 0
        height = final.height if final is not None else 0
        start = max(0, height - OVERLAP_HEIGHTS - self._step_back_heights)
        if start == 0:
            # What still waits may wait for what never was: not everything again each time.
            self._step_back_heights = 0
        return start

    def request(self, from_height: int) -> bytes:
        """Return the request that says what is here from `from_height` on."""
        tip = self._machine.tip or self._machine.rules.genesis_id
        return encode(
            SyncRequest(
                run_id=self.run_id,
                module_id=self.module_id,
                from_height=from_height,
                have=_raw(self._book.ids_from(from_height)[:MAX_HAVE]),
                tip=tip,
                has_closed=self._has_closed(tip),
            )
        )

    def ask_for(self, record_ids: list[str]) -> bytes:
        """Return the request for these very records."""
        return encode(
            RecordsRequest(
                run_id=self.run_id, module_id=self.module_id, ids=_raw(record_ids[:MAX_WANT])
            )
        )

    async def pushes(self, want: Iterable[bytes]) -> list[bytes]:
        """Return the messages that bring a neighbour what it wants."""
        page, _ = await self._book.page_of((i.hex() for i in want), PAGE_BYTES)
        if not page:
            return []
        push = PushRecords(run_id=self.run_id, module_id=self.module_id, envelopes=page)
        return [encode(push)]

    async def answer(self, data: bytes) -> Answer:
        """Answer a neighbour's message.

        Raises:
            WireError: malformed, or of another run.
        """
        message = parse_sync_message(data)
        if (message.run_id, message.module_id) != self.key:
            raise WireError("not a member of that run")
        match message:
            case SyncRequest():
                return await self._answer_sync(message)
            case RecordsRequest(ids=ids):
                page, has_more = await self._book.page_of((i.hex() for i in ids), PAGE_BYTES)
                return Answer(SyncReply(envelopes=page, has_more=has_more))
            case PushRecords(envelopes=envelopes):
                return Answer(SyncReply(), pushed=envelopes)

    async def _answer_sync(self, message: SyncRequest) -> Answer:
        have = {i.hex() for i in message.have}
        mine = self._book.ids_from(message.from_height)
        page, has_more = await self._book.page_of((i for i in mine if i not in have), PAGE_BYTES)
        want = [i for i in have if not self._book.has(i)]
        tip = self._machine.tip or self._machine.rules.genesis_id
        reply = SyncReply(
            envelopes=page,
            has_more=has_more,
            want=_raw(sorted(want)[:MAX_WANT]),
            tip=tip,
            has_closed=self._has_closed(tip),
        )
        return Answer(reply, closed_base=message.tip if message.has_closed else None)

    def _has_closed(self, tip: str) -> bool:
        return tip in self._machine.known.closed


def _raw(record_ids: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(bytes.fromhex(i) for i in record_ids)
