"""One simulated member: the real machine, and a model of the driver, its disk and its trainer.

Runs in: simulation. What the real driver promises is kept here: records are on disk before they are
sent, own records are fed back at once, a crash leaves the disk and nothing else, and every request
is answered. What takes time is in `files.py`, what crosses the network in `exchange.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from volunteer.lab.simulation.byzantine import Liar
from volunteer.lab.simulation.disk import Disk
from volunteer.lab.simulation.errors import BrokenRule
from volunteer.lab.simulation.exchange import Exchange
from volunteer.lab.simulation.files import Files
from volunteer.lab.simulation.gossip import Mesh
from volunteer.lab.simulation.judged import Judged
from volunteer.lab.simulation.traffic import Traffic
from volunteer.lab.simulation.trainer_model import Contents, Snapshot, TrainerModel
from volunteer.lab.simulation.world import World
from volunteer.rounds import events as ev
from volunteer.rounds.chain import ChainRules
from volunteer.rounds.machine import Machine
from volunteer.rounds.records import Close, Contribution, Record
from volunteer.rounds.turn import Timing

TICK_S = 2.5
BATCH_S = 0.5
"""What arrives within so long is taken in at once, as by a driver that is busy meanwhile."""
IDLE_TICK_S = 12.0
"""Between two closes, when only what could not be fetched waits for the time to try again."""
UNITS_PER_DISK = 1_000_000
"""What a member trains after it has lost its disk gets numbers of its own."""


class Observer(Protocol):
    """Who watches that the rules hold."""

    def note_saved(self, peer: str, snapshot: Snapshot) -> None:
        """Units are on a disk."""

    def note_disk_lost(self, peer: str) -> None:
        """All units on that disk are gone."""

    def note_published(self, record_id: str, record: Record) -> None:
        """A member has signed a record and put it on disk."""

    def note_final(self, member: Member, action: ev.Finalise) -> None:
        """A member holds a commit to be final."""

    def note_alarm(self, member: Member, action: ev.RaiseAlarm) -> None:
        """A member has raised the alarm of rule 18."""

    def note_ban(self, member: Member, action: ev.BanPeer) -> None:
        """A member has cut off another one for good."""

    def check(self, member: Member) -> None:
        """Something has happened to a member."""


@dataclass(slots=True, kw_only=True)
class Member:
    """One member, up or down."""

    me: str
    rules: ChainRules
    timing: Callable[[], Timing]
    world: World
    contents: Contents
    traffic: Traffic
    judged: Judged
    referee: Observer
    peers: Mapping[str, Member]
    tokens_per_s: float
    slowness: float = 1.0
    """Factor on the time that its transfers take."""
    mesh: Mesh | None = None
    liar: Liar | None = None
    disk: Disk = field(default_factory=Disk)
    machine: Machine = field(init=False)
    files: Files = field(init=False)
    exchange: Exchange = field(init=False)
    trainer: TrainerModel | None = None
    is_up: bool = False
    is_frozen: bool = False
    """Its lid is closed: time stands still for it, and nothing reaches it."""
    wants_to_contribute: bool = True
    is_contributing: bool = False
    banned: set[str] = field(default_factory=set)
    num_starts: int = 0
    num_disks: int = 1
    clock_ahead_s: float = 0.0
    """What its clock has jumped."""
    _frozen_at_s: float = 0.0
    _after_thaw: list[Callable[[], None]] = field(default_factory=list)
    _inbox: list[ev.Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Have the parts that know the member."""
        self.files = Files(self)
        self.exchange = Exchange(self)

    @property
    def is_liar(self) -> bool:
        """Whether it breaks the rules on purpose."""
        return self.liar is not None

    @property
    def is_reachable(self) -> bool:
        """Whether it answers."""
        return self.is_up and not self.is_frozen

    # ---------------------------------------------------------------------- starts and ends

    def start(self) -> None:
        """Start the agent with what is on disk."""
        self.is_up = True
        self.num_starts += 1
        has_lost_records = self.num_disks > 1 and not self.disk.has_signed
        self.machine = Machine(self.rules, self.timing(), self.me, has_lost_records)
        self.machine.known.judged = self.judged
        self._load()
        self._tick()
        self.exchange.start()
        if self.wants_to_contribute:
            self.resume()

    def _load(self) -> None:
        """Bring the machine to where it was; nobody does what it may ask for meanwhile."""
        records, blobs = self.disk.records, self.disk.blobs
        self.feed_silently(ev.WorkDropped(tuple(self.disk.dropped)))
        self.feed_silently(*(ev.RecordArrived(i, record) for i, record in records.items()))
        contributions = [(i, r) for i, r in records.items() if isinstance(r, Contribution)]
        self.feed_silently(*(ev.BlobHeld(i) for i, r in contributions if r.blob_id in blobs))
        genesis = self.rules.genesis_id
        if not self.disk.verified:
            self.disk.verified.append(genesis)
            self.disk.states[genesis] = ""
        known, held = self.machine.known.facts, self.disk.states
        states: list[ev.Event] = []
        for commit_id in self.disk.verified:
            if commit_id in known:
                states.append(ev.StateHeld(commit_id))
                if commit_id not in held:
                    states.append(ev.StateDropped(commit_id))
        self.feed_silently(*states)

    def feed_silently(self, *events: ev.Event) -> None:
        """Feed events of loading: they must lead to nothing but the bans of before."""
        for action in self.machine.handle_all(events, self.clock_s()):
            if not isinstance(action, ev.BanPeer):
                raise BrokenRule(f"{self.me}: reading back what is on disk leads to {action}")
            self.banned.add(action.peer)

    def crash(self) -> None:
        """End with no last word; what is on disk stays."""
        self.is_up = self.is_frozen = False
        self.is_contributing = False
        self._after_thaw.clear()
        self._inbox.clear()
        self.disk.turned_away.clear()
        if self.trainer is not None:
            self.trainer.is_ended = True
        self.trainer = None

    def lose_disk(self) -> None:
        """End, and lose everything but the key."""
        self.crash()
        self.disk = Disk(snapshot=Snapshot(num_units=self.num_disks * UNITS_PER_DISK))
        self.num_disks += 1
        self.referee.note_disk_lost(self.me)

    def freeze(self) -> None:
        """Close the lid: the agent keeps its memory, and notices nothing."""
        self.is_frozen = True
        self._frozen_at_s = self.world.now_s

    def thaw(self) -> None:
        """Open the lid: whatever was due meanwhile happens at once."""
        if not self.is_frozen:
            return
        self.is_frozen = False
        if self.trainer is not None:
            self.trainer.stood_still(self.world.now_s - self._frozen_at_s)
        waiting, self._after_thaw = self._after_thaw, []
        for act in waiting:
            act()

    def pause(self) -> None:
        """The owner is back."""
        self.wants_to_contribute = False
        if not self.is_reachable or not self.is_contributing:
            return
        self.is_contributing = False
        assert self.trainer is not None
        given_up = self.trainer.end()
        self.trainer = None
        self.feed(ev.WorkReported(0))
        if given_up is not None:
            self.feed(ev.RequestFailed(given_up))
        self.feed(ev.ContributingChanged(False))

    def resume(self) -> None:
        """The owner has gone."""
        self.wants_to_contribute = True
        if not self.is_reachable or self.is_contributing:
            return
        self.is_contributing = True
        self.trainer = TrainerModel(
            me=self.me,
            world=self.world,
            contents=self.contents,
            tokens_per_s=self.tokens_per_s,
            snapshot=self.disk.snapshot,
            own=self.machine.own,
            save=self._save,
            answer=self.feed,
            after=self.after,
            is_honest=not self.is_liar,
        )
        self.feed(ev.ContributingChanged(True))
        last = self.disk.snapshot.last
        signed = {c.blob_id for c in self.machine.own.values()}
        if last is not None and last.blob_id not in signed:
            self.feed(last)
        self.trainer.is_placed = True
        self.feed(ev.TrainerReady())

    def _save(self, snapshot: Snapshot) -> None:
        self.disk.snapshot = snapshot
        if snapshot.last is not None:
            self.disk.blobs.add(snapshot.last.blob_id)
        self.referee.note_saved(self.me, snapshot)

    # --------------------------------------------------------------------------------- time

    def clock_s(self) -> float:
        """Return its own clock, which agrees with nobody's, nor with itself across a restart."""
        return self.world.now_s + self.clock_ahead_s + 1000.0 * self.num_starts + len(self.me)

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do `act` later, unless this process has ended by then; not before the lid is open."""
        # Not a closure that names itself: each would be a cycle for the garbage collector.
        self.world.after(delay_s, partial(self._act_if_up, self.num_starts, act))

    def _act_if_up(self, generation: int, act: Callable[[], None]) -> None:
        if not self.is_up or self.num_starts != generation:
            return
        if self.is_frozen:
            self._after_thaw.append(partial(self._act_if_up, generation, act))
        else:
            act()

    def _tick(self) -> None:
        if self.trainer is not None:
            self.trainer.train()
            # How many matters to nobody here: rounds close by time.
            if not self.machine.tokens_since_contribution and (tokens := self.trainer.tokens()):
                self.feed(ev.WorkReported(tokens))
        self.feed(ev.Ticked())
        self.after(self._tick_s(), self._tick)

    def _tick_s(self) -> float:
        """Return when to tick again: often while a round is being closed, and at its end."""
        machine = self.machine
        if machine.closed_at_s is not None or machine.tip is None:
            return TICK_S
        left_s = machine.applied_at_s + machine.timing.round_s - self.clock_s()
        return min(IDLE_TICK_S, max(0.5, left_s))

    # --------------------------------------------------------------------------- the driver

    def post(self, event: ev.Event) -> None:
        """Have the machine take in `event` with all that comes at about the same time."""
        if not self._inbox:
            self.after(BATCH_S, self._empty_inbox)
        self._inbox.append(event)

    def _empty_inbox(self) -> None:
        events, self._inbox = self._inbox, []
        if events:
            self._act(self.machine.handle_all(events, self.clock_s()))

    def feed(self, event: ev.Event) -> None:
        """Have the machine take in `event` now, after all that was posted."""
        events, self._inbox = [*self._inbox, event], []
        self._act(self.machine.handle_all(events, self.clock_s()))

    def _act(self, begin_with: list[ev.Action]) -> None:
        if begin_with:
            actions = deque(begin_with)
            while actions:
                action = actions.popleft()
                if isinstance(action, ev.PublishRecord):
                    actions.extend(self._publish(action.record))
                else:
                    self._dispatch(action)
        forgotten = self.machine.known.bounds.take_forgotten()
        if forgotten:
            self.disk.forget(forgotten)
        self.referee.check(self)

    def _publish(self, record: Record) -> list[ev.Action]:
        if self.liar is not None:
            record = self.liar.alter(record)
        record_id = self.traffic.register(record)
        if not isinstance(record, Close):
            self.disk.keep(record_id, record)
            self.disk.has_signed = True
            self.referee.note_published(record_id, record)
        actions = self.machine.handle(ev.RecordArrived(record_id, record), self.clock_s())
        audience = None if self.liar is None else self.liar.tell_others_otherwise(record)
        self.exchange.gossip(record_id, record, audience)
        return actions

    def receive(self, record_id: str, record: Record) -> None:
        """A record with a good signature has come from somebody."""
        if not self.is_reachable or record_id in self.disk.records:
            return
        if isinstance(record, Close):
            if record.base in self.machine.known.closed:
                return  # the machine would not look at it
        else:
            self.disk.keep(record_id, record)
        self.post(ev.RecordArrived(record_id, record))

    def _dispatch(self, action: ev.Action) -> None:
        match action:
            case ev.Encode():
                if self.trainer is not None:
                    self.trainer.send(action)
            case ev.MoveTo():
                self.files.prune(action.round_index)
                if self.trainer is not None:
                    self.trainer.send(self._without_lost(action))
            case ev.DropWork(contribution_ids):
                self.disk.dropped += contribution_ids
            case ev.Finalise():
                self.referee.note_final(self, action)
            case ev.RaiseAlarm():
                self.referee.note_alarm(self, action)
            case ev.BanPeer(peer):
                self.banned.add(peer)
                self.referee.note_ban(self, action)
            case _:
                self.files.begin(action)

    def _without_lost(self, action: ev.MoveTo) -> ev.MoveTo:
        """Return the order without work whose blob is gone, which is given up, as by the driver."""
        own, blobs = self.machine.own, self.disk.blobs
        lost = tuple(
            i
            for i in action.pending
            if any(own[k].blob_id not in blobs for k in (i, *own[i].carries) if k in own)
        )
        if not lost:
            return action
        self.disk.dropped += lost
        self.after(0.0, partial(self.feed, ev.WorkDropped(lost)))
        kept = tuple(i for i in action.pending if i not in lost)
        return ev.MoveTo(action.commit_id, action.round_index, action.state_hash, kept)
