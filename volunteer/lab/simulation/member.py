"""One simulated member: the real machine, and a model of the driver, its disk and its trainer.

What the real driver promises is kept here: records are on disk before they are sent, own records
are fed back at once, a crash leaves the disk and nothing else, and every request is answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec
from blake3 import blake3

from volunteer.lab.simulation.disk import Disk
from volunteer.lab.simulation.trainer_model import Contents, Snapshot, TrainerModel
from volunteer.lab.simulation.world import World
from volunteer.rounds import events as ev
from volunteer.rounds.chain import ChainRules, listed_in_order
from volunteer.rounds.machine import Machine
from volunteer.rounds.records import (
    Close,
    Commit,
    Contribution,
    Record,
    author_of,
    encode_body,
    record_id_of,
)
from volunteer.rounds.turn import Timing

TICK_S = 2.0
APPLY_S = 0.5
JOURNAL_ROUNDS = 8


class Observer(Protocol):
    """Who watches that the rules hold."""

    def note_saved(self, peer: str, snapshot: Snapshot) -> None:
        """Units are on a disk."""

    def note_published(self, record_id: str, record: Record) -> None:
        """A member has signed a record and put it on disk."""

    def note_final(self, member: Member, action: ev.Finalise) -> None:
        """A member holds a commit to be final."""

    def note_alarm(self, member: Member, action: ev.RaiseAlarm) -> None:
        """A member has raised the alarm of rule 18."""

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
    referee: Observer
    peers: Mapping[str, Member]
    tokens_per_s: float
    disk: Disk = field(default_factory=Disk)
    machine: Machine = field(init=False)
    trainer: TrainerModel | None = None
    is_up: bool = False
    wants_to_contribute: bool = True
    is_contributing: bool = False
    banned: set[str] = field(default_factory=set)
    num_starts: int = 0
    is_liar: bool = False
    """Votes for whatever it stands on, and signs two commits where it proposes."""

    # ---------------------------------------------------------------------- starts and ends

    def start(self) -> None:
        """Start the agent with what is on disk."""
        self.is_up = True
        self.num_starts += 1
        self.machine = Machine(self.rules, self.timing(), self.me)
        self._load()
        self._tick(self.num_starts)
        self._sync(self.num_starts)
        if self.wants_to_contribute:
            self.resume()

    def _load(self) -> None:
        """Bring the machine to where it was; nobody does what it may ask for meanwhile."""
        self.feed_silently(ev.WorkDropped(tuple(self.disk.dropped)))
        for record_id, record in self.disk.records.items():
            self.feed_silently(ev.RecordArrived(record_id, record))
        for record_id, record in self.disk.records.items():
            if isinstance(record, Contribution) and record.blob_id in self.disk.blobs:
                self.feed_silently(ev.BlobHeld(record_id))
        genesis = self.rules.genesis_id
        if not self.disk.verified:
            self.disk.verified.append(genesis)
            self.disk.states.add(genesis)
        for commit_id in self.disk.verified:
            self.feed_silently(ev.StateHeld(commit_id))
            if commit_id not in self.disk.states:
                self.feed_silently(ev.StateDropped(commit_id))

    def feed_silently(self, event: ev.Event) -> None:
        """Feed an event of loading: it must lead to nothing."""
        assert not self.machine.handle(event, self._clock()), event

    def crash(self) -> None:
        """End with no last word; what is on disk stays."""
        self.is_up = False
        self.is_contributing = False
        if self.trainer is not None:
            self.trainer.is_ended = True
        self.trainer = None

    def pause(self) -> None:
        """The owner is back."""
        self.wants_to_contribute = False
        if not self.is_up or not self.is_contributing:
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
        if not self.is_up or self.is_contributing:
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

    def _clock(self) -> float:
        # Nobody's clock agrees with anybody's, nor with itself across a restart.
        return self.world.now_s + 1000.0 * self.num_starts + len(self.me)

    # --------------------------------------------------------------------------------- time

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do `act` later, unless this process has ended by then."""
        generation = self.num_starts

        def act_if_up() -> None:
            if self.is_up and self.num_starts == generation:
                act()

        self.world.after(delay_s, act_if_up)

    def _tick(self, generation: int) -> None:
        if self.trainer is not None:
            self.feed(ev.WorkReported(self.trainer.tokens()))
        self.feed(ev.Ticked())
        self.after(TICK_S, partial(self._tick, generation))

    # --------------------------------------------------------------------------- the driver

    def feed(self, event: ev.Event) -> None:
        """Have the machine take in `event`, and do what it says."""
        actions = deque(self.machine.handle(event, self._clock()))
        while actions:
            action = actions.popleft()
            if isinstance(action, ev.PublishRecord):
                actions.extend(self._publish(action.record))
            else:
                self._dispatch(action)
        self.referee.check(self)

    def _publish(self, record: Record) -> list[ev.Action]:
        if self.is_liar and isinstance(record, Contribution):
            record = msgspec.structs.replace(record, vote=True)
        record_id = record_id_of(encode_body(record))
        if not isinstance(record, Close):
            self.disk.records.setdefault(record_id, record)
            self.referee.note_published(record_id, record)
        actions = self.machine.handle(ev.RecordArrived(record_id, record), self._clock())
        peers = [peer for peer in self.peers.values() if peer is not self]
        if self.is_liar and isinstance(record, Commit) and len(record.contributions) > 1:
            other = self._second_commit(record)
            other_id = record_id_of(encode_body(other))
            self.disk.records[other_id] = other
            self._gossip(other_id, other, peers[::2])
            peers = peers[1::2]
        self._gossip(record_id, record, peers)
        return actions

    def _gossip(self, record_id: str, record: Record, peers: list[Member]) -> None:
        for peer in peers:
            if self.world.net.has_gossip and not are_cut_off(self, peer):
                self.world.send(self.me, peer.me, partial(peer.receive, record_id, record))

    def _second_commit(self, commit: Commit) -> Commit:
        """Return another commit for the same parent and rank: one contribution less.

        Every other one states a hash that is not that of its state.
        """
        known = self.machine.known
        listed_ids = commit.contributions[1:]
        listed = listed_in_order(listed_ids, known.facts[commit.parent], known.contributions)
        state_hash = self.state_after(commit.parent, listed)
        if commit.round_index % 2:
            state_hash = state_hash[::-1]
        return msgspec.structs.replace(commit, contributions=listed_ids, state_hash=state_hash)

    def receive(self, record_id: str, record: Record) -> None:
        """A record with a good signature has come from somebody."""
        if not self.is_up or record_id in self.disk.records:
            return
        if not isinstance(record, Close):
            self.disk.records[record_id] = record
        self.feed(ev.RecordArrived(record_id, record))

    def _dispatch(self, action: ev.Action) -> None:
        match action:
            case ev.Encode() | ev.MoveTo():
                if isinstance(action, ev.MoveTo):
                    self._prune(action.round_index)
                if self.trainer is not None:
                    self.trainer.send(action)
            case ev.DropWork(contribution_ids):
                self.disk.dropped += contribution_ids
            case ev.Finalise():
                self.referee.note_final(self, action)
            case ev.RaiseAlarm():
                self.referee.note_alarm(self, action)
            case ev.BanPeer(peer):
                self.banned.add(peer)
            case _:
                self._start(action)

    def _start(self, action: ev.Action) -> None:
        """Begin what takes its time."""
        match action:
            case ev.FetchBlob(contribution_id, contribution):
                delay_s = self.world.fetch_s(self.world.net.fetch_s)
                self.after(delay_s, partial(self._fetch_blob, contribution_id, contribution))
            case ev.FetchState(commit_id, _):
                delay_s = self.world.fetch_s(self.world.net.state_fetch_s)
                self.after(delay_s, partial(self._fetch_state, commit_id))
            case ev.FetchRecord(record_id):
                self.after(2 * self.world.delay_s(), partial(self._fetch_record, record_id))
            case ev.ComputeState():
                self.after(APPLY_S, partial(self._compute_state, action))
            case ev.ComputeProposal():
                self.after(APPLY_S, partial(self._compute_proposal, action))
            case _:
                raise AssertionError(action)

    # ------------------------------------------------------------------------ files, slowly

    def _linked(self) -> list[Member]:
        return [
            peer
            for peer in self.peers.values()
            if peer is not self
            and peer.is_up
            and self.world.are_linked(self.me, peer.me)
            and not are_cut_off(self, peer)
        ]

    def _fetch_blob(self, contribution_id: str, contribution: Contribution) -> None:
        blob_id = contribution.blob_id
        if not any(blob_id in peer.disk.blobs for peer in self._linked()):
            self.feed(ev.RequestFailed(contribution_id))
        elif blob_id in self.contents.units_of:
            self.disk.blobs.add(blob_id)
            self.feed(ev.BlobHeld(contribution_id))
        else:
            self.feed(ev.BlobRefused(contribution_id, "not finite"))

    def _fetch_state(self, commit_id: str) -> None:
        if any(commit_id in peer.disk.states for peer in self._linked()):
            self._hold_state(commit_id)
        else:
            self.feed(ev.RequestFailed(commit_id))

    def _fetch_record(self, record_id: str) -> None:
        holders = [peer for peer in self._linked() if record_id in peer.disk.records]
        if holders:
            self.receive(record_id, holders[0].disk.records[record_id])

    def _compute_state(self, action: ev.ComputeState) -> None:
        commit = action.commit
        if not self._can_apply(commit.parent, action.listed):
            self.feed(ev.RequestFailed(action.commit_id))
        elif commit.state_hash != self.state_after(commit.parent, action.listed):
            self.feed(ev.StateRefused(action.commit_id, "another hash"))
        else:
            self._hold_state(action.commit_id)

    def _compute_proposal(self, action: ev.ComputeProposal) -> None:
        if not self._can_apply(action.parent, action.listed):
            self.feed(ev.RequestFailed(action.parent))
            return
        listed = tuple(entry.contribution_id for entry in action.listed)
        state_hash = self.state_after(action.parent, action.listed)
        self.feed(ev.ProposalComputed(action.parent, listed, state_hash))

    def _can_apply(self, parent: str, listed: tuple[ev.Listed, ...]) -> bool:
        blobs = {entry.contribution.blob_id for entry in listed}
        return self.is_contributing and parent in self.disk.states and blobs <= self.disk.blobs

    def state_after(self, parent: str, listed: tuple[ev.Listed, ...]) -> str:
        """Return the hash of what applying `listed` to the state of `parent` gives."""
        text = self.machine.state_hash_of(parent) + "".join(
            f"/{e.contribution_id}:{e.is_late}:{e.is_on_probation}" for e in listed
        )
        return blake3(text.encode()).hexdigest()

    def _hold_state(self, commit_id: str) -> None:
        if commit_id not in self.disk.verified:
            self.disk.verified.append(commit_id)
        self.disk.states.add(commit_id)
        self.feed(ev.StateHeld(commit_id))

    def _prune(self, height: int) -> None:
        facts = self.machine.known.facts
        for commit_id in sorted(self.disk.states):
            if facts[commit_id].height < height - JOURNAL_ROUNDS:
                self.disk.states.discard(commit_id)
                self.after(0.0, partial(self.feed, ev.StateDropped(commit_id)))
        old = [
            record.blob_id
            for record in self.disk.records.values()
            if isinstance(record, Contribution)
            and record.round_index < height - JOURNAL_ROUNDS
            and record.author != self.me
        ]
        self.disk.blobs.difference_update(old)

    # ------------------------------------------------------------------- the exchange (25)

    def _sync(self, generation: int) -> None:
        self.after(
            self.world.net.sync_s * self.world.rng.uniform(0.7, 1.3),
            partial(self._sync, generation),
        )
        linked = self._linked()
        if linked:
            peer = self.world.rng.choice(linked)
            self.world.send(self.me, peer.me, partial(peer.answer_sync, self))

    def answer_sync(self, asking: Member) -> None:
        """A neighbour says what it has; take what is new, and send back what it lacks."""
        if not self.is_up or are_cut_off(self, asking):
            return
        self._take_all(asking)
        self.world.send(self.me, asking.me, partial(asking.take_answer, self))

    def take_answer(self, peer: Member) -> None:
        """The neighbour's records have come."""
        if self.is_up:
            self._take_all(peer)

    def _take_all(self, peer: Member) -> None:
        for record_id, record in list(peer.disk.records.items()):
            if record_id not in self.disk.records and author_of(record) != self.me:
                self.receive(record_id, record)
        tip = self.machine.tip
        if peer.is_up and tip is not None and tip in peer.machine.known.closed:
            closer = Close(
                run_id=self.rules.run_id,
                module_id=self.rules.module_id,
                round_index=self.machine.known.facts[tip].height,
                author=peer.me,
                base=tip,
            )
            self.receive(record_id_of(encode_body(closer)), closer)


def are_cut_off(one: Member, other: Member) -> bool:
    """Return whether either has cut the other off."""
    return other.me in one.banned or one.me in other.banned
