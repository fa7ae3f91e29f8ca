"""Does what the round protocol's machine says, and tells it what has happened.

Runs in: agent. One event at a time; what takes long runs in tasks of its own and comes back as an
event. Own records are on disk (fsync) before they are sent.

Reading order: `run`, `_step`, `_dispatch`; then `module_files.py` for blobs and states.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import deque
from collections.abc import Callable

import trio

from volunteer.agent.bookkeeper import Bookkeeper
from volunteer.agent.clock import now_s
from volunteer.agent.exchange import Exchange
from volunteer.agent.module_files import ModuleFiles
from volunteer.agent.record_book import RecordBook, SignedRecord
from volunteer.agent.record_log import RecordLog
from volunteer.agent.state_fetch import StateProgress
from volunteer.agent.timing import ExchangeClock
from volunteer.agent.trainer_events import encoded_event
from volunteer.agent.trainer_service import TrainerService
from volunteer.errors import StorageFullError
from volunteer.messages import (
    Contribute,
    Encoded,
    NothingToContribute,
    OwnWork,
    Rebase,
    Rebased,
    SnapshotSaved,
    StateEvaluated,
    Stepped,
    TrainerEvent,
    TrainerStarted,
)
from volunteer.rounds import events as ev
from volunteer.rounds.credit import new_tokens
from volunteer.rounds.machine import Machine
from volunteer.rounds.records import Close, Contribution, Record

log = logging.getLogger(__name__)
TICK_S = 0.25
MAX_ARRIVED = 256
"""Contributions whose exchange is being timed; old ones whose blob nobody needs never end."""
BEHIND_HEIGHTS = 2
KNOWN_CONTRIBUTIONS = 64
"""How many of our newest contributions the trainer is told, to judge how old its snapshot is."""


class RoundDriver:
    """One member in one run's module."""

    def __init__(
        self,
        machine: Machine,
        book: RecordBook,
        record_log: RecordLog,
        files: ModuleFiles,
        keeper: Bookkeeper,
        clock: ExchangeClock,
    ) -> None:
        """Drive `machine`; `exchange` and `trainer` are set before `run`."""
        self.machine = machine
        self._book = book
        self._log = record_log
        self.files = files
        self._keeper = keeper
        self._clock = clock
        self.exchange: Exchange
        self.trainer: TrainerService
        self._send, self._events = trio.open_memory_channel[ev.Event | Callable[[], None]](math.inf)
        self._encoding: str | None = None
        self._unwritten: list[Record] = []
        self._is_snapshot_known = False
        """Whether a trainer has said what its snapshot holds: until then that blob looks unused."""
        self._arrived: dict[str, float] = {}
        self.held_out: StateEvaluated | None = None
        self.storage_problem = ""
        self._moved_to, self._is_rebase_due = "", False
        files.post = self.post

    # ------------------------------------------------------------------------------- entry

    def post(self, event: ev.Event) -> None:
        """Have the machine take in `event`, after all that was posted before."""
        self._send.send_nowait(event)

    async def take_record(self, signed: SignedRecord) -> None:
        """A verified record came from a neighbour: keep it, then use it."""
        try:
            is_new = await self._book.keep(signed, is_own=False)
        except StorageFullError as error:
            self.storage_problem = str(error)
            return
        self.storage_problem = ""
        if is_new:
            if isinstance(signed.record, Contribution):
                self._arrived[signed.record_id] = now_s()
                if len(self._arrived) > MAX_ARRIVED:
                    del self._arrived[next(iter(self._arrived))]
            self.post(ev.RecordArrived(signed.record_id, signed.record))

    @property
    def state_hash(self) -> str:
        """The hash of the shared state at the tip."""
        machine = self.machine
        return self.files.state_hash_of(machine, machine.tip or machine.rules.genesis_id)

    @property
    def is_catching_up(self) -> bool:
        """Whether signed commits are known well above where this member stands."""
        machine = self.machine
        height = machine.known.facts[machine.tip].height if machine.tip else 0
        return machine.known.highest_height >= height + BEHIND_HEIGHTS

    @property
    def state_progress(self) -> StateProgress | None:
        """How far the fetch of a state is; None while none is fetched."""
        return self.files.states.progress()

    async def wait_quiet(self) -> None:
        """Wait until every event posted so far has been handled and its records are sent."""
        done = trio.Event()
        self._send.send_nowait(done.set)
        await done.wait()

    def take_closed(self, peer: str, base: str) -> None:
        """A neighbour says that it has closed the round on `base`: a hint (rule 25)."""
        rules = self.machine.rules
        facts = self.machine.known.facts.get(base)
        if facts is not None and base not in self.machine.known.closed:
            close = Close(
                run_id=rules.run_id,
                module_id=rules.module_id,
                round_index=facts.height,
                author=peer,
                base=base,
            )
            self.post(ev.RecordArrived(f"{peer}/{base}", close))

    async def load(self) -> None:
        """Bring the machine to where it was: records and verified states from disk."""
        records = await trio.to_thread.run_sync(self._book.load)
        notes = await trio.to_thread.run_sync(lambda: list(self._log.notes()))
        self._keeper.refused.update(
            text.partition(" ")[::2] for kind, text in notes if kind == "refused"
        )
        dropped = tuple(text for kind, text in notes if kind == "dropped")
        # The machine only remembers until the first tick wakes it up.
        self.machine.handle(ev.WorkDropped(dropped), now_s())
        for signed in records:
            self.machine.handle(ev.RecordArrived(signed.record_id, signed.record), now_s())
        verified = [text for kind, text in notes if kind == "verified"]
        states = self.files.state_events(self.machine, verified)
        for event in states:
            self.machine.handle(event, now_s())
        # A kill may have come between a record and its line in the books; again changes nothing.
        for contribution_id in list(self.machine.own)[-KNOWN_CONTRIBUTIONS:]:
            self._keeper.note_own(contribution_id)
        run_id = self.machine.rules.run_id
        log.info("run=%s records=%d states=%d loaded", run_id[:12], len(records), len(states))

    async def run(self) -> None:
        """Handle events, for ever. `load` comes first."""
        async with trio.open_nursery() as nursery:
            self.files.nursery = nursery
            nursery.start_soon(self._tick)
            nursery.start_soon(self.files.build_genesis_if_needed, self.machine)
            async for event in self._events:
                if callable(event):
                    event()
                else:
                    await self._step(event)

    async def _tick(self) -> None:
        while True:
            self.machine.timing.grace_s = self._clock.grace_s
            self.machine.timing.failover_s = self._clock.failover_s
            self.post(ev.Ticked())
            await trio.sleep(TICK_S)  # noqa: TID251 - a period

    async def _step(self, event: ev.Event) -> None:
        if isinstance(event, ev.BlobHeld) and event.contribution_id in self._arrived:
            self._clock.note_exchange(now_s() - self._arrived.pop(event.contribution_id))
        if isinstance(event, ev.StateHeld):
            await self._note("verified", event.commit_id)
        if isinstance(event, ev.ContributingChanged):
            self.files.states.set_allowed(event.is_contributing)
        actions = deque(self.machine.handle(event, now_s()))
        self._is_snapshot_known |= isinstance(event, ev.TrainerReady)
        if isinstance(event, ev.Ticked):
            actions.extendleft(reversed(await self._publish_unwritten()))
        while actions:
            action = actions.popleft()
            if isinstance(action, ev.PublishRecord):
                actions.extend(await self._publish(action.record))
            else:
                await self._dispatch(action)
        self.files.apply_ahead(self.machine)
        if self._is_rebase_due and not self.machine.is_on_its_way:
            self._send_rebase()

    async def _publish(self, record: Record) -> list[ev.Action]:
        signed = self._book.sign(record)
        try:
            await self._book.keep(signed, is_own=True)
        except StorageFullError as error:
            # Not sent, so nothing depends on it yet. The machine counts it as signed and will not
            # make another, so it is this very record that is tried again.
            if not self.storage_problem:
                log.error("record=%s not written: %s", signed.record_id[:12], error)
            self.storage_problem = str(error)
            self._unwritten.append(record)
            return []
        self.storage_problem = ""
        actions = self.machine.handle(ev.RecordArrived(signed.record_id, record), now_s())
        if isinstance(record, Contribution):
            self._keeper.note_own(signed.record_id)
        if self.files.nursery is not None:
            self.files.nursery.start_soon(self.exchange.publish, signed)
        return actions

    async def _publish_unwritten(self) -> list[ev.Action]:
        """Try again what the full disk did not take, in order."""
        waiting, self._unwritten = self._unwritten, []
        actions: list[ev.Action] = []
        for number, record in enumerate(waiting):
            actions += await self._publish(record)
            if self._unwritten:
                self._unwritten += waiting[number + 1 :]
                break
        return actions

    def _unwritten_blobs(self) -> set[str]:
        return {r.blob_id for r in self._unwritten if isinstance(r, Contribution)}

    async def _note(self, kind: str, payload: str) -> None:
        """Keep a fact for the next start; on a full disk that start has to find it out again."""
        try:
            await trio.to_thread.run_sync(self._log.note, kind, payload)
        except StorageFullError as error:
            self.storage_problem = str(error)
            log.warning("%s=%s not noted: %s", kind, payload[:12], error)

    # ----------------------------------------------------------------------------- actions

    async def _dispatch(self, action: ev.Action) -> None:
        match action:
            case ev.Encode(base, round_index):
                self._encoding = base
                self.files.forget_settled(self.machine)
                if not self.trainer.send(Contribute(base=base, round_index=round_index)):
                    self._encoding_failed()
            case ev.MoveTo():
                self._move(action)
            case ev.DropWork(contribution_ids, reason):
                for contribution_id in contribution_ids:
                    await self._note("dropped", contribution_id)
                log.warning("work=%d contributions dropped: %s", len(contribution_ids), reason)
                self._keeper.note_move(reason)
            case ev.Finalise(_, _, own_listed):
                self._keeper.note_final(own_listed, now_s() if self._moved_to else None)
            case ev.FetchRecord(record_id):
                self.exchange.want(record_id)
            case ev.RaiseAlarm(final_commit, other_tip):
                log.error("ALARM final=%s contradicted by tip=%s", final_commit, other_tip)
            case _:
                self.files.start(action, self.machine)

    def _move(self, action: ev.MoveTo) -> None:
        facts = self.machine.known.facts[action.commit_id]
        state_hash = self.files.state_hash_of(self.machine, action.commit_id)
        self._send_rebase()
        self._keeper.note_move()
        if action.commit_id == self._moved_to:
            return  # only what is carried has changed
        self._moved_to = action.commit_id
        self._keeper.note_round(action.commit_id, state_hash)
        self.files.start_evaluation(action.commit_id, state_hash, self._take_loss)
        if self._is_snapshot_known:
            self.files.prune(self.machine, keep=self._unwritten_blobs())
        log.info(
            "run=%s round=%d peer=%s commit=%s state=%s listed=%d final=%d carried=%d",
            self.machine.rules.run_id[:12],
            facts.height,
            facts.proposer or "none",
            action.commit_id[:12],
            state_hash[:12],
            len(facts.listed),
            facts.final_height,
            len(action.pending),
        )

    def _take_loss(self, commit_id: str, found: StateEvaluated) -> None:
        if commit_id == self.machine.tip:
            self.held_out = found
        self._keeper.note_loss(commit_id, found)

    # ----------------------------------------------------------------------------- trainer

    def _send_rebase(self) -> None:
        """Tell the trainer where to stand and what to carry, as things are now."""
        machine = self.machine
        # Steps on a state that the swarm left long ago help nobody: a fresh trainer waits.
        self._is_rebase_due = machine.is_on_its_way and not self.trainer.is_placed
        if machine.tip is None or self._is_rebase_due:
            return
        new = new_tokens(machine.own)
        newest = list(machine.own)[-KNOWN_CONTRIBUTIONS:]
        # What is carried now, or may have to be, is among the unsettled and the newest.
        needed = dict.fromkeys([*machine.work.unsettled(), *newest])
        carried = [k for i in needed for k in machine.own[i].carries if k in machine.own]
        works = tuple(
            OwnWork(
                contribution_id=i,
                blob_id=machine.own[i].blob_id,
                carries=machine.own[i].carries,
                new_tokens=new[i],
            )
            for i in dict.fromkeys([*carried, *needed])
        )
        here = self.files.works_on_disk(works)
        pending = self._without_lost(tuple(machine.work.pending()), here)
        self.trainer.send(
            Rebase(
                commit_id=machine.tip,
                round_index=machine.known.facts[machine.tip].height,
                state_hash=self.files.state_hash_of(machine, machine.tip),
                pending=pending,
                works=here,
                known_contributions=tuple(machine.own[i].blob_id for i in newest),
            )
        )

    def _without_lost(self, pending: tuple[str, ...], here: tuple[OwnWork, ...]) -> tuple[str, ...]:
        """Return what can be carried; work whose blob is gone is given up, with that reason."""
        own = self.machine.own
        blobs = {work.blob_id for work in here}
        lost = tuple(
            i
            for i in pending
            if any(own[k].blob_id not in blobs for k in (i, *own[i].carries) if k in own)
        )
        if lost:
            self.post(ev.WorkDropped(lost))
            self._send.send_nowait(functools.partial(self._note_lost, lost))
        return tuple(i for i in pending if i not in lost)

    def _note_lost(self, lost: tuple[str, ...]) -> None:
        reason = "its blob is no longer on this disk"
        log.error("work=%d contributions dropped: %s", len(lost), reason)
        self._keeper.note_move(reason)
        assert self.files.nursery is not None
        for contribution_id in lost:
            self.files.nursery.start_soon(self._note, "dropped", contribution_id)

    async def on_trainer_event(self, event: TrainerEvent) -> None:
        """Turn what the trainer says into events."""
        match event:
            case TrainerStarted(last_contribution=last):
                if last is not None:
                    self.post(await encoded_event(last, self.files.own_content_hash))
                # Only after what the snapshot holds is in the books.
                self.post(ev.TrainerReady())
            case Stepped(tokens_since_contribution=tokens):
                self.post(ev.WorkReported(tokens))
            case Encoded():
                self._encoding = None
                self.post(await encoded_event(event, self.files.own_content_hash))
            case NothingToContribute():
                self._encoding_failed()
            case SnapshotSaved():
                self._keeper.note_totals(event.tokens_total, event.inner_step)
                self.post(ev.WorkReported(event.tokens_since_contribution))
            case Rebased(discarded_tokens=discarded) if discarded:
                reason = "the snapshot was older than what was sent"
                log.warning("tokens=%d given up: %s", discarded, reason)
                self._keeper.note_discarded(discarded, reason)
            case _:
                pass

    def on_trainer_end(self) -> None:
        """The trainer has ended: it has no work to report until it is back."""
        self.post(ev.WorkReported(0))
        if self._encoding is not None:
            self._encoding_failed()

    def _encoding_failed(self) -> None:
        base, self._encoding = self._encoding, None
        self.post(ev.WorkReported(0))
        if base is not None:
            self.post(ev.RequestFailed(base))
