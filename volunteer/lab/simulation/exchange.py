"""What a simulated member says to others: gossip, and the exchange with a random neighbour.

Runs in: simulation. ROUNDS.md rule 25, and the pages of `volunteer.agent.sync_pages`: ask from just
below the last final commit, further down while something waits for what lies deeper.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from volunteer.lab.simulation.traffic import ID_BYTES, SYNC_BYTES
from volunteer.rounds.records import Close, Record, RecordError, parse_envelope

if TYPE_CHECKING:
    from volunteer.lab.simulation.member import Member

OVERLAP_HEIGHTS = 4
FIRST_STEP_BACK = 8


class Exchange:
    """One member's side of the network."""

    __slots__ = ("_member", "_others", "_step_back", "_wanted", "num_refused")

    def __init__(self, member: Member) -> None:
        """Speak for `member`."""
        self._member = member
        self._others: tuple[str, ...] = ()
        self._step_back = 0
        self._wanted: set[str] = set()
        self.num_refused = 0
        """Envelopes that were no record of this version."""

    def start(self) -> None:
        """Begin the exchange; what the process before this one had in memory is gone."""
        self._step_back = 0
        self._wanted = set()
        self._sync()

    def can_reach(self, peer: Member) -> bool:
        """Return whether a stream to `peer` can be opened now."""
        member = self._member
        return (
            peer.is_up
            and not peer.is_frozen
            and peer is not member
            and member.world.are_linked(member.me, peer.me)
            and not are_cut_off(member, peer)
        )

    # ------------------------------------------------------------------------------ gossip

    def gossip(
        self, record_id: str, record: Record, audience: Collection[Member] | None = None
    ) -> None:
        """Send a record to everyone, or to `audience` alone; losing it only costs time."""
        member, world = self._member, self._member.world
        if not world.net.has_gossip:
            return
        if audience is None and member.mesh is not None:
            reached = member.mesh.spread(member.me)
            self._deliver(
                [(member.peers[name], s) for name, s in reached.items()], record_id, record
            )
            member.traffic.note_record(record_id, record, member.mesh.num_copies)
            return
        peers = member.peers.values() if audience is None else audience
        deliveries: list[tuple[Member, float]] = []
        copies = 0
        for peer in peers:
            if peer is member or are_cut_off(member, peer):
                continue
            if not world.are_linked(member.me, peer.me):
                continue
            copies += 1
            deliveries.extend(
                (peer, world.delay_s())
                for _ in range(2 if world.rng.random() < world.net.duplicates else 1)
                if world.rng.random() >= world.net.loss
            )
        self._deliver(deliveries, record_id, record)
        member.traffic.note_record(record_id, record, copies)

    def _deliver(
        self, deliveries: Sequence[tuple[Member, float]], record_id: str, record: Record
    ) -> None:
        """Deliver after so many seconds each; not what the receiver would not look at."""
        if isinstance(record, Close):
            deliveries = [
                (peer, delay_s)
                for peer, delay_s in deliveries
                if peer.is_up and record.base not in peer.machine.known.closed
            ]

        def receive(i: int) -> None:
            deliveries[i][0].receive(record_id, record)

        self._member.world.after_each([delay_s for _, delay_s in deliveries], receive)

    def receive_bytes(self, data: bytes) -> None:
        """Bytes have come that only say they are a record."""
        if self._member.is_reachable:
            try:
                parse_envelope(data)
            except RecordError:
                self.num_refused += 1

    # -------------------------------------------------------------------------------- sync

    def want(self, record_id: str) -> None:
        """Ask a neighbour for this record, soon."""
        member = self._member
        if not self._wanted:
            member.after(2 * member.world.delay_s(), self._ask_for_wanted)
        self._wanted.add(record_id)

    def _ask_for_wanted(self) -> None:
        member = self._member
        wanted, self._wanted = self._wanted, set()
        peers = [peer for peer in member.peers.values() if self.can_reach(peer)]
        if not peers:
            return
        peer = member.world.rng.choice(peers)
        member.traffic.note("sync", SYNC_BYTES + ID_BYTES * len(wanted))
        self._take([(i, peer.disk.records[i]) for i in sorted(wanted) if i in peer.disk.records])

    def _sync(self) -> None:
        member, world = self._member, self._member.world
        member.after(world.net.sync_s * world.rng.uniform(0.7, 1.3), self._sync)
        names = self._neighbours()
        for _ in range(min(3, len(names))):  # who cannot be reached is found out at once
            peer = member.peers[names[int(world.rng.random() * len(names))]]
            if self.can_reach(peer):
                start = self._first_height()
                world.send(member.me, peer.me, partial(peer.exchange.answer, member, start))
                return

    def _neighbours(self) -> tuple[str, ...]:
        member = self._member
        if member.mesh is not None:
            return member.mesh.neighbours[member.me]
        if not self._others:
            self._others = tuple(name for name in member.peers if name != member.me)
        return self._others

    def _first_height(self) -> int:
        """Return where to begin: as `SyncPages.first_height`."""
        known = self._member.machine.known
        if known.waiting:
            self._step_back = max(FIRST_STEP_BACK, 2 * self._step_back)
        else:
            self._step_back = 0
        final = known.facts[self._member.machine.final_id]
        start = max(0, final.height - OVERLAP_HEIGHTS - self._step_back)
        if start == 0:
            self._step_back = 0
        return start

    def answer(self, asking: Member, from_height: int) -> None:
        """A neighbour says what it has from `from_height` on; send what it lacks, ask for the rest.

        What it has is looked up now and not when it asked: a record that has come to it meanwhile
        is not sent again.
        """
        member = self._member
        if not member.is_reachable or are_cut_off(member, asking):
            return
        lacking, wanted = _differences(member, asking, from_height)
        num_have = asking.disk.num_from(from_height)
        member.traffic.note("sync", 2 * SYNC_BYTES + ID_BYTES * (num_have + len(wanted)))
        self._take_closed(asking)
        world = member.world
        world.send(member.me, asking.me, partial(asking.exchange.take_answer, member, lacking))
        if wanted:
            # Its push follows on the same stream, once it has our answer.
            delay_s = 2 * world.delay_s()
            world.after(delay_s, partial(asking.exchange.push, member, wanted))

    def push(self, peer: Member, wanted: list[tuple[str, Record]]) -> None:
        """Send a neighbour what it wanted of us."""
        if self._member.is_reachable and peer.is_reachable and self.can_reach(peer):
            peer.exchange.take_pushed(wanted)

    def take_pushed(self, records: list[tuple[str, Record]]) -> None:
        """A neighbour has sent what we wanted."""
        self._take(records)

    def take_answer(self, peer: Member, records: list[tuple[str, Record]]) -> None:
        """The neighbour's records have come."""
        if self._member.is_reachable:
            self._take(records)
            self._take_closed(peer)

    def _take(self, records: list[tuple[str, Record]]) -> None:
        member = self._member
        for record_id, record in records:
            member.traffic.note("synced records", member.traffic.size_of(record_id))
            member.receive(record_id, record)

    def _take_closed(self, peer: Member) -> None:
        """A neighbour says whether it has closed the round on our tip."""
        member = self._member
        tip, known = member.machine.tip, member.machine.known
        if not peer.is_up or tip is None or tip in known.closed:
            return
        if tip in peer.machine.known.closed:
            close = Close(
                run_id=member.rules.run_id,
                module_id=member.rules.module_id,
                round_index=known.facts[tip].height,
                author=peer.me,
                base=tip,
            )
            member.receive(f"{peer.me}/{tip}", close)


def _differences(
    one: Member, other: Member, from_height: int
) -> tuple[list[tuple[str, Record]], list[tuple[str, Record]]]:
    """Return what `one` has and `other` lacks from a height on, and the reverse, by height."""
    mine, theirs = one.disk.by_height, other.disk.by_height
    lacking: list[tuple[str, Record]] = []
    wanted: list[tuple[str, Record]] = []
    nothing: dict[str, Record] = {}
    marks, their_marks = one.disk.marks, other.disk.marks
    differing = [
        height
        for height in marks.keys() | their_marks.keys()
        if height >= from_height and marks.get(height, 0) != their_marks.get(height, 0)
    ]
    for height in sorted(differing):
        here, there = mine.get(height, nothing), theirs.get(height, nothing)
        unwanted, no_room = other.disk.turned_away.keys(), one.disk.turned_away.keys()
        lacking += [(i, here[i]) for i in sorted(here.keys() - there.keys() - unwanted)]
        wanted += [(i, there[i]) for i in sorted(there.keys() - here.keys() - no_room)]
    return lacking, wanted


def are_cut_off(one: Member, other: Member) -> bool:
    """Return whether either has cut the other off."""
    return other.me in one.banned or one.me in other.banned
