"""The run's traffic with other members: gossip of records and heartbeats, and anti-entropy.

Runs in: agent. Gossip only shortens the wait: everything that matters also arrives by the sync
exchange with one random neighbour every `sync_s` (ROUNDS.md rule 25).
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeGuard

import trio

from p2p.errors import P2PError, RequestRefusedError
from p2p.swarm import Swarm
from volunteer.agent.clock import now_s
from volunteer.agent.intake import NewKind, verify_incoming
from volunteer.agent.peer_memory import PeerMemory
from volunteer.agent.record_book import RecordBook, SignedRecord
from volunteer.agent.sync_pages import SyncPages
from volunteer.agent.timing import HEARTBEAT_FLOOR_S, heartbeat_period_s
from volunteer.agent.wire import (
    MAX_HEARTBEAT_BYTES,
    MAX_SYNC_BYTES,
    Heartbeat,
    SyncReply,
    WireError,
    encode,
    parse_heartbeat,
    parse_sync_reply,
)
from volunteer.rounds.records import MAX_ENVELOPE_BYTES, Close, RecordError

log = logging.getLogger(__name__)
SYNC_PROTOCOL = "/allmende/sync/1"
REQUEST_TIMEOUT_S = 20.0
MAX_PAGES = 4096
HEARD_FOR_S = 120.0
"""A peer not heard for so long, and for some of its heartbeats' periods, is no longer counted."""
PERIODS_HEARD = 3
PERIODS_SETTLED = 10
"""Of a sync: 30 % of a round."""
DISTRUST_ROUNDS = 2.0
"""After a sync had to bring what gossip had not, no sync is passed over for so long."""
GOSSIP_LATE_S = 5.0
"""What a sync brought and gossip still has not, at most so long after it, counts as not brought."""
MAX_AHEAD = 1024
"""Records of which that is waited for; with more of them gossip has failed."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A peer's last heartbeat."""

    heartbeat: Heartbeat
    at_s: float


class Exchange:
    """One module's traffic."""

    def __init__(
        self,
        swarm: Swarm,
        book: RecordBook,
        pages: SyncPages,
        on_record: Callable[[SignedRecord], Awaitable[None]],
        on_closed: Callable[[str, str], None],
        memory: PeerMemory,
    ) -> None:
        """Join a module's topics and protocol; `run` does the work.

        Args:
            swarm: the network.
            book: the records.
            pages: what to say in a sync.
            on_record: told every verified record, new or not.
            on_closed: told a neighbour, and a base whose round it has closed.
            memory: told where members listen.
        """
        self._swarm = swarm
        self._book = book
        self._pages = pages
        self._on_record = on_record
        self._on_closed = on_closed
        self._memory = memory
        self._sync_now = trio.Event()
        self._neighbour_came = trio.Event()
        self._round_s = 0.0
        self._is_settled: Callable[[], bool] = lambda: False
        self._sync_s = 0.0
        self._gossip_failed_at_s = -math.inf
        self._ahead: dict[str, float] = {}
        """Records that a sync brought before gossip did, and when."""
        self._wanted: set[str] = set()
        self.heard: dict[str, Heard] = {}
        self._topic = f"allmende/1/{pages.run_id}/{pages.module_id}"

    async def run(
        self,
        sync_s: float,
        make_heartbeat: Callable[[], Heartbeat | None],
        *,
        round_s: float = 0.0,
        is_settled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Gossip, answer and ask, for ever.

        Args:
            sync_s: seconds between two exchanges with a random neighbour.
            make_heartbeat: makes our own; None while there is nothing to say.
            round_s: the run's, by which heartbeats are sent.
            is_settled: whether nothing is to be expected soon; then there are fewer exchanges,
                unless gossip has lately proved not to bring everything.
        """
        self._sync_s = sync_s
        self._round_s = round_s
        self._is_settled = is_settled
        await self._swarm.subscribe(
            f"{self._topic}/records",
            self._accept_record,
            self._on_gossiped_record,
            max_bytes=MAX_ENVELOPE_BYTES,
            purpose="records",
        )
        await self._swarm.subscribe(
            f"{self._topic}/heartbeats",
            self._accept_heartbeat,
            self._on_heartbeat,
            max_bytes=MAX_HEARTBEAT_BYTES,
            purpose="heartbeats",
        )
        self._swarm.serve(
            SYNC_PROTOCOL, self._respond, max_request_bytes=MAX_SYNC_BYTES, purpose="sync"
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_heartbeats, make_heartbeat)
            nursery.start_soon(self._sync_often, sync_s)

    # ------------------------------------------------------------------------------ gossip

    async def publish(self, signed: SignedRecord) -> None:
        """Gossip a record; losing it only costs time."""
        try:
            await self._swarm.publish(f"{self._topic}/records", signed.envelope, purpose="records")
        except P2PError as error:
            log.debug("record=%s not gossiped: %s", signed.record_id[:12], error)

    async def _accept_record(self, author: str, data: bytes) -> bool:
        try:
            self._verify(data)
        except RecordError as error:
            log.debug("peer=%s gossiped a bad record: %s", author, error)
            return False
        return True  # one of a new kind is passed on as well: those behind us may know it

    async def _on_gossiped_record(self, author: str, data: bytes) -> None:
        signed = self._verify(data)
        if isinstance(signed, SignedRecord):
            self._ahead.pop(signed.record_id, None)
            await self._on_record(signed)

    def _verify(self, data: bytes) -> SignedRecord | NewKind:
        return verify_incoming(data, *self._pages.key)

    async def _accept_heartbeat(self, author: str, data: bytes) -> bool:
        try:
            heartbeat = parse_heartbeat(data)
        except WireError as error:
            log.debug("peer=%s sent a bad heartbeat: %s", author, error)
            return False
        return (heartbeat.run_id, heartbeat.module_id) == self._pages.key

    async def _on_heartbeat(self, author: str, data: bytes) -> None:
        heartbeat = parse_heartbeat(data)
        if author == self._swarm.peer_id:
            return
        self.heard[author] = Heard(heartbeat, now_s())
        self._swarm.remember(author, heartbeat.addrs)
        self._memory.note(author, heartbeat.addrs)
        if not self._pages.knows(heartbeat.tip):
            self._sync_now.set()

    async def _send_heartbeats(self, make_heartbeat: Callable[[], Heartbeat | None]) -> None:
        while True:
            heartbeat = make_heartbeat()
            if heartbeat is not None:
                try:
                    await self._swarm.publish(
                        f"{self._topic}/heartbeats", encode(heartbeat), purpose="heartbeats"
                    )
                except P2PError as error:
                    log.debug("heartbeat not gossiped: %s", error)
            period_s = HEARTBEAT_FLOOR_S if heartbeat is None else self._heartbeat_s()
            with trio.move_on_after(period_s * random.uniform(0.8, 1.2)):  # noqa: S311
                # At most about one message a second from the whole swarm.
                least_s = max(HEARTBEAT_FLOOR_S, float(self._num_others()))
                await trio.sleep(least_s * random.uniform(1.0, 1.5))  # noqa: TID251, S311
                await self._neighbour_came.wait()
            self._neighbour_came = trio.Event()

    def _num_others(self) -> int:
        return max(len(self.heard), len(self._swarm.peers()))

    def _heartbeat_s(self) -> float:
        return heartbeat_period_s(self._round_s, self._num_others())

    def members(self) -> dict[str, Heard]:
        """Return the peers heard lately."""
        oldest = now_s() - max(HEARD_FOR_S, PERIODS_HEARD * self._heartbeat_s())
        self.heard = {p: h for p, h in self.heard.items() if h.at_s >= oldest}
        return self.heard

    def note_neighbour(self) -> None:
        """A neighbour has connected: compare the records, and say soon who we are."""
        self._sync_now.set()
        self._neighbour_came.set()

    # -------------------------------------------------------------------------------- sync

    def want(self, record_id: str) -> None:
        """Ask the next neighbour for this record."""
        self._wanted.add(record_id)
        self._sync_now.set()

    def sync_soon(self) -> None:
        """Do not wait for the period."""
        self._sync_now.set()

    async def _sync_often(self, sync_s: float) -> None:
        last: str | None = None
        while True:
            await self._wait_sync_due(sync_s)
            peers = [p.peer_id for p in self._swarm.peers()]
            others = [p for p in peers if p != last] or peers
            if others:
                last = random.choice(others)  # noqa: S311 - any neighbour will do
                try:
                    await self._sync_with(last)
                except (P2PError, WireError, RecordError) as error:
                    log.debug("peer=%s sync failed: %s", last, error)
            await trio.sleep(min(0.2, sync_s))  # noqa: TID251 - at most five a second

    async def _wait_sync_due(self, sync_s: float) -> None:
        """Wait for the period, or for a reason to ask at once.

        A settled member skips most periods: whoever waits for something asks it often enough, and
        an exchange brings both up to date. Where gossip fails it skips none (rule 25).
        """
        for _ in range(PERIODS_SETTLED):
            with trio.move_on_after(sync_s):
                await self._sync_now.wait()
            if self._sync_now.is_set() or not self._may_pass_over():
                break
        self._sync_now = trio.Event()

    def _may_pass_over(self) -> bool:
        """Return whether syncs are needed less: nothing is to come, or gossip would bring it."""
        self._judge_gossip()
        distrust_s = DISTRUST_ROUNDS * self._round_s
        return self._is_settled() and now_s() - self._gossip_failed_at_s >= distrust_s

    def _judge_gossip(self) -> None:
        """Note what gossip has not brought by now; it goes from neighbour to neighbour."""
        late_s = min(GOSSIP_LATE_S, self._sync_s)
        latest = now_s() - late_s
        is_full = len(self._ahead) >= MAX_AHEAD
        late = [i for i, at_s in self._ahead.items() if is_full or at_s <= latest]
        for record_id in late:
            self._gossip_failed_at_s = max(self._gossip_failed_at_s, self._ahead.pop(record_id))

    async def _sync_with(self, peer_id: str) -> None:
        """Fetch what `peer_id` has and we lack, page by page, and push what it wants."""
        wanted = [i for i in self._wanted if not self._book.has(i)]
        self._wanted.clear()
        if wanted:
            await self._take_reply(peer_id, await self._ask(peer_id, self._pages.ask_for(wanted)))
        from_height = self._pages.first_height()
        if self._may_pass_over():  # what is older was compared when the round began
            from_height = max(from_height, self._pages.recent_height())
        for _ in range(MAX_PAGES):
            num_known = len(self._book)
            reply = await self._ask(peer_id, self._pages.request(from_height))
            highest = await self._take_reply(peer_id, reply)
            for push in await self._pages.pushes(reply.want):
                await self._ask(peer_id, push)
            if not reply.has_more or highest is None:
                return
            if highest - 1 <= from_height and len(self._book) == num_known:
                return  # nothing of it was new, or there is no room to keep it
            from_height = max(from_height, highest - 1)

    async def _ask(self, peer_id: str, request: bytes) -> SyncReply:
        data = await self._swarm.request(
            peer_id,
            SYNC_PROTOCOL,
            request,
            timeout_s=REQUEST_TIMEOUT_S,
            max_response_bytes=MAX_SYNC_BYTES,
            purpose="sync",
        )
        return parse_sync_reply(data)

    async def _take_reply(self, peer_id: str, reply: SyncReply) -> int | None:
        """Take in the records of a reply; return the greatest height among them."""
        highest = None
        for data in reply.envelopes:
            signed = self._verify(data)
            if not _is_kept(signed):
                continue
            await self._take_synced(signed)
            highest = max(highest or 0, signed.record.round_index)
        if reply.has_closed and reply.tip is not None:
            self._on_closed(peer_id, reply.tip)
        return highest

    async def _take_synced(self, signed: SignedRecord) -> None:
        """Take in a record that came by a sync; gossip should bring it as well."""
        if not self._book.has(signed.record_id):
            if len(self._ahead) >= MAX_AHEAD:
                self._judge_gossip()
            self._ahead[signed.record_id] = now_s()
        await self._on_record(signed)

    async def _respond(self, peer_id: str, data: bytes) -> bytes:
        try:
            answer = await self._pages.answer(peer_id, data)
        except WireError as error:
            raise RequestRefusedError(str(error)) from error
        for envelope in answer.pushed:
            try:
                signed = self._verify(envelope)
            except RecordError as error:
                raise RequestRefusedError(str(error)) from error
            if _is_kept(signed):
                await self._take_synced(signed)
        if answer.closed_base is not None:
            self._on_closed(peer_id, answer.closed_base)
        return encode(answer.reply)


def _is_kept(signed: SignedRecord | NewKind) -> TypeGuard[SignedRecord]:
    """Return whether a record goes into the book.

    Not a `close`, a hint that `has_closed` carries; nor a kind that a newer version has.
    """
    return isinstance(signed, SignedRecord) and not isinstance(signed.record, Close)
