"""What to ask and what to answer in a sync: pages of records.

Runs in: agent. No network in here.

A page begins with what a neighbour needs to follow our chain, and goes on with all else only when
it has that: whatever strangers have sent cannot come between a newcomer and the chain. What we send
to one neighbour, and to all together, has a rate; who asks for more gets an empty page that says
that there is more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from p2p.token_buckets import TokenBuckets
from volunteer.agent.clock import now_s
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
MAX_IDS_LOOKED_UP = 2048
"""For one page: more than fit."""
PEER_BYTES_PER_S = 256 * 1024
PEER_BURST_BYTES = 8 * 1024 * 1024
"""A chain of 2,000 rounds of 4 members is about 4 MiB."""
ALL_BYTES_PER_S = 1024 * 1024
ALL_BURST_BYTES = 32 * 1024 * 1024
REQUEST_COST_BYTES = 16 * 1024
"""What any request costs its peer besides the bytes of records that it brings or takes."""
ID_COST_BYTES = 8
"""What looking at one id costs."""
_EVERYBODY = ""


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

    def __init__(
        self, machine: Machine, book: RecordBook, clock: Callable[[], float] = now_s
    ) -> None:
        """Read the member's state from `machine` and its records from `book`.

        Args:
            machine: the member.
            book: its records.
            clock: monotonic seconds.
        """
        self._machine = machine
        self._book = book
        self.run_id = machine.rules.run_id
        self.module_id = machine.rules.module_id
        self._step_back_heights = 0
        self._clock = clock
        self._of_peers = TokenBuckets(per_s=PEER_BYTES_PER_S, burst=PEER_BURST_BYTES)
        self._of_all = TokenBuckets(per_s=ALL_BYTES_PER_S, burst=ALL_BURST_BYTES)

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

    def recent_height(self) -> int:
        """Return the least height of records that a child of our tip may list."""
        tip = self._machine.known.facts.get(self._machine.tip or "")
        return max(0, tip.height - 1) if tip is not None else 0

    def request(self, from_height: int) -> bytes:
        """Return the request that says what is here from `from_height` on.

        What was lately turned away for want of room is named as well, so that it does not come
        again from each neighbour that had room for it.
        """
        tip = self._machine.tip or self._machine.rules.genesis_id
        have = itertools.chain(
            self._book.ids_from(from_height), self._book.ids_turned_away_from(from_height)
        )
        return encode(
            SyncRequest(
                run_id=self.run_id,
                module_id=self.module_id,
                from_height=from_height,
                have=_raw(itertools.islice(have, MAX_HAVE)),
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
        page, _ = await self._book.page_of(self._by_height(want), PAGE_BYTES)
        if not page:
            return []
        push = PushRecords(run_id=self.run_id, module_id=self.module_id, envelopes=page)
        return [encode(push)]

    def _by_height(self, raw_ids: Iterable[bytes]) -> list[str]:
        kept = [i for i in (raw.hex() for raw in raw_ids) if self._book.has(i)]
        return sorted(kept, key=self._book.height_of)

    async def answer(self, peer_id: str, data: bytes) -> Answer:
        """Answer a neighbour's message; one that asks too much gets less, and is told nothing else.

        Raises:
            WireError: malformed, or of another run.
        """
        message = parse_sync_message(data)
        if (message.run_id, message.module_id) != self.key:
            raise WireError("not a member of that run")
        is_over = self._is_over(peer_id, REQUEST_COST_BYTES)
        match message:
            case SyncRequest():
                return await self._answer_sync(peer_id, message, is_over=is_over)
            case RecordsRequest(ids=ids):
                wanted = [] if is_over else self._by_height(ids)
                page, has_more = await self._book.page_of(wanted, PAGE_BYTES)
                self._is_over(peer_id, _size_bytes(page))
                return Answer(SyncReply(envelopes=page, has_more=has_more))
            case PushRecords(envelopes=envelopes):
                is_over |= self._is_over(peer_id, _size_bytes(envelopes))
                return Answer(SyncReply(), pushed=() if is_over else envelopes)

    def _is_over(self, peer_id: str, cost_bytes: float) -> bool:
        """Charge a peer; return whether it had less than that left, or all together had."""
        now = self._clock()
        lacking = self._of_peers.take(peer_id, now, cost_bytes)
        return self._of_all.take(_EVERYBODY, now, cost_bytes) > 0 or lacking > 0

    async def _answer_sync(self, peer_id: str, message: SyncRequest, *, is_over: bool) -> Answer:
        have = {i.hex(): None for i in message.have}
        page: tuple[bytes, ...] = ()
        has_more = True
        if not is_over:
            looked_at = _Counted(self._offers(message.from_height))
            lacking = (i for i in looked_at if i not in have)
            ids = list(itertools.islice(lacking, MAX_IDS_LOOKED_UP))
            page, has_more = await self._book.page_of(ids, PAGE_BYTES)
            has_more |= len(ids) == MAX_IDS_LOOKED_UP
            self._is_over(peer_id, _size_bytes(page) + ID_COST_BYTES * looked_at.count)
        # In the order of `have`, which names last what the neighbour does not have to give.
        want = (i for i in have if not self._book.has(i) and not self._book.was_turned_away(i))
        tip = self._machine.tip or self._machine.rules.genesis_id
        reply = SyncReply(
            envelopes=page,
            has_more=has_more,
            want=_raw(itertools.islice(want, MAX_WANT)),
            tip=tip,
            has_closed=self._has_closed(tip),
        )
        return Answer(reply, closed_base=message.tip if message.has_closed else None)

    def _offers(self, from_height: int) -> Iterator[str]:
        """Yield the ids of what is here from a height on: our chain first, then all else.

        Each commit of the chain comes before what it lists, so that this is known to be needed.
        """
        known, book = self._machine.known, self._book
        chain = known.header_choice.current()
        for commit_id in chain[from_height:]:
            commit = known.commits.get(commit_id)
            if commit is not None:  # not the genesis
                yield commit_id
                for record_id in (*commit.contributions, *commit.leaving):
                    if book.has(record_id) and book.height_of(record_id) >= from_height:
                        yield record_id
        for record_id in book.ids_rising_from(from_height):
            if not self._is_of_chain(record_id, chain):
                yield record_id

    def _is_of_chain(self, record_id: str, chain: list[str]) -> bool:
        known = self._machine.known
        commits = known.listed_by.get(record_id, ()) or (record_id,)
        heights = (known.facts[i].height for i in commits if i in known.facts)
        return any(h < len(chain) and chain[h] in commits for h in heights)

    def _has_closed(self, tip: str) -> bool:
        return tip in self._machine.known.closed


def _raw(record_ids: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(bytes.fromhex(i) for i in record_ids)


def _size_bytes(envelopes: Iterable[bytes]) -> int:
    return sum(len(envelope) for envelope in envelopes)


class _Counted:
    """An iterator that says how far it was followed."""

    def __init__(self, ids: Iterator[str]) -> None:
        self._ids = ids
        self.count = 0

    def __iter__(self) -> Iterator[str]:
        for record_id in self._ids:
            self.count += 1
            yield record_id
