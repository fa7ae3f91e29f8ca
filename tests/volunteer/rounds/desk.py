"""One machine on a desk: feeds events, does at once what a driver must, and notes the rest."""

from __future__ import annotations

import math
from collections import deque
from typing import TypeVar

from tests.volunteer.rounds.chain_builder import ChainBuilder, hash_of
from tests.volunteer.rounds.test_chain import grown
from volunteer.rounds import events as ev
from volunteer.rounds.chain import rank_order
from volunteer.rounds.machine import Machine
from volunteer.rounds.records import Contribution, Record, encode_body, record_id_of
from volunteer.rounds.turn import Timing

ROUND_S, GRACE_S, FAILOVER_S = 100.0, 10.0, 20.0
TICK_S = ROUND_S / 4
A = TypeVar("A")


class Desk:
    """A member `me` that knows what `chain` knows once `learn` is called."""

    def __init__(self, chain: ChainBuilder, me: str = "a") -> None:
        self.chain = chain
        self.me = me
        self.now_s = 0.0
        self.disk: dict[str, Record] = {}
        self.actions: list[ev.Action] = []
        self.machine = self._machine()

    def _machine(self) -> Machine:
        timing = Timing(round_s=ROUND_S, grace_s=GRACE_S, failover_s=FAILOVER_S)
        return Machine(self.chain.rules, timing, self.me)

    def feed(self, *events: ev.Event) -> list[ev.Action]:
        """Feed events; return all that the machine asks for, publications included."""
        todo: deque[ev.Action] = deque()
        done: list[ev.Action] = []
        for event in events:
            todo.extend(self.machine.handle(event, self.now_s))
            while todo:
                action = todo.popleft()
                done.append(action)
                if isinstance(action, ev.PublishRecord):
                    record_id = record_id_of(encode_body(action.record))
                    self.disk[record_id] = action.record
                    arrived = ev.RecordArrived(record_id, action.record)
                    todo.extend(self.machine.handle(arrived, self.now_s))
        self.actions += done
        return done

    def learn(self, *, held: bool = True, verified: tuple[str, ...] = ()) -> list[ev.Action]:
        """Feed all records of the chain, their blobs, and which states were verified."""
        events: list[ev.Event] = []
        for record_id, record in self.chain.records.items():
            if record_id not in self.disk:
                self.disk[record_id] = record
                events.append(ev.RecordArrived(record_id, record))
            if held and isinstance(record, Contribution):
                events.append(ev.BlobHeld(record_id))
        events += [ev.StateHeld(commit_id) for commit_id in verified]
        return self.feed(*events)

    def stand_on(self, tip: str, *, tokens: int = 100) -> list[ev.Action]:
        """Know everything, stand on `tip`, be contributing and have work."""
        return [
            *self.learn(verified=(self.chain.genesis, tip)),
            *self.feed(ev.ContributingChanged(True), ev.WorkReported(tokens)),
        ]

    def wait(self, seconds: float) -> list[ev.Action]:
        """Let time pass, with a tick now and then."""
        num_ticks = max(1, math.ceil(seconds / TICK_S))
        done: list[ev.Action] = []
        for _ in range(num_ticks):
            self.now_s += seconds / num_ticks
            done += self.feed(ev.Ticked())
        return done

    def sleep(self, seconds: float) -> list[ev.Action]:
        """Close the lid; return what the first tick after it leads to."""
        self.now_s += seconds
        return self.feed(ev.Ticked())

    def contribute(self, base: str, *, carries: tuple[str, ...] = ()) -> Contribution:
        """Answer an `Encode`; return what was published."""
        done = self.feed(
            ev.ContributionEncoded(
                base=base,
                blob_id=hash_of(f"own blob {base} {self.me}"),
                blob_bytes=10,
                codec="int4",
                codec_version=1,
                tokens=100,
                carries=carries,
                content_hash=hash_of("own content"),
            )
        )
        records = [a.record for a in done if isinstance(a, ev.PublishRecord)]
        assert len(records) == 1, done
        assert isinstance(records[0], Contribution)
        return records[0]

    def restart(self, verified: tuple[str, ...]) -> list[ev.Action]:
        """Lose everything but the disk; say what the loading asked for."""
        self.machine = self._machine()
        self.now_s += 1000.0
        events: list[ev.Event] = [ev.RecordArrived(i, record) for i, record in self.disk.items()]
        events += [ev.BlobHeld(i) for i, r in self.disk.items() if isinstance(r, Contribution)]
        events += [ev.StateHeld(commit_id) for commit_id in (self.chain.genesis, *verified)]
        return self.feed(*events)


def only(actions: list[ev.Action], kind: type[A]) -> list[A]:
    """Return the actions of one kind."""
    return [action for action in actions if isinstance(action, kind)]


def published(actions: list[ev.Action], kind: type[A]) -> list[A]:
    """Return the published records of one kind."""
    records = [action.record for action in actions if isinstance(action, ev.PublishRecord)]
    return [record for record in records if isinstance(record, kind)]


def desk_at(rank: int = 0) -> tuple[ChainBuilder, str, Desk]:
    """A member with that rank on a grown chain's tip."""
    chain, tip = grown()
    desk = Desk(chain, rank_order(chain.rules, chain.facts(tip))[rank])
    desk.stand_on(tip)
    assert desk.machine.tip == tip
    return chain, tip, desk


def others(desk: Desk) -> list[str]:
    return sorted(set("abc") - {desk.me})


def newest_own(desk: Desk) -> str:
    return list(desk.machine.own)[-1]


def hear(desk: Desk, contribution_id: str) -> list[ev.Action]:
    record = desk.chain.known.contributions[contribution_id]
    desk.disk[contribution_id] = record
    return desk.feed(ev.RecordArrived(contribution_id, record), ev.BlobHeld(contribution_id))


def hear_commit(desk: Desk, commit_id: str) -> list[ev.Action]:
    desk.disk[commit_id] = desk.chain.known.commits[commit_id]
    return desk.feed(ev.RecordArrived(commit_id, desk.chain.known.commits[commit_id]))
