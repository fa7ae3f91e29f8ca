"""Members whose exchanges are real, on a network that is not; and what a liar sends them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from trio.testing import MockClock

from tests.fakes.members import (
    MODULE,
    PEOPLE,
    RUN_ID,
    Member,
    hash_of,
    sign,
)
from tests.fakes.network import FakeSwarm
from tests.fakes.virtual_time import run_virtual
from volunteer.agent.exchange import SYNC_PROTOCOL, Exchange
from volunteer.agent.peer_memory import PeerMemory
from volunteer.agent.record_book import SignedRecord
from volunteer.agent.sync_pages import SyncPages
from volunteer.agent.wire import (
    MAX_SYNC_BYTES,
)
from volunteer.rounds.records import Leaving


@dataclass
class Neighbour:
    """One member on a fake network, with its real exchange."""

    member: Member
    swarm: FakeSwarm
    memory: PeerMemory
    closed: list[tuple[str, str]] = field(default_factory=list)
    is_full: bool = False
    pages: SyncPages = field(init=False)
    exchange: Exchange = field(init=False)

    def __post_init__(self) -> None:
        self.pages = SyncPages(self.member.machine, self.member.book)
        self.exchange = Exchange(
            self.swarm.as_swarm,
            self.member.book,
            self.pages,
            self._take,
            lambda peer, base: self.closed.append((peer, base)),
            self.memory,
        )

    async def _take(self, signed: SignedRecord) -> None:
        if not self.is_full:
            await self.member.keep([signed])

    @property
    def peer_id(self) -> str:
        return self.swarm.peer_id

    def listen(self) -> None:
        self.swarm.serve(
            SYNC_PROTOCOL,
            self.exchange._respond,
            max_request_bytes=MAX_SYNC_BYTES,
            purpose="sync",
        )


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def main(clock: MockClock) -> None:
        await body()

    run_virtual(main)


def hostile_envelopes() -> dict[str, bytes]:
    record = Leaving(
        run_id=RUN_ID, module_id=MODULE, round_index=0, author=PEOPLE[0].peer_id, base=hash_of("b")
    )
    elsewhere = Leaving(
        run_id="cd" * 32,
        module_id=MODULE,
        round_index=0,
        author=PEOPLE[0].peer_id,
        base=hash_of("b"),
    )
    return {
        "wrong run": sign(elsewhere).envelope,
        "bad signature": sign(record, by=PEOPLE[1]).envelope,
        "garbage": b"\x00\x01\x02",
        "empty": b"",
        "huge": b"\x00" * 70_000,
    }
