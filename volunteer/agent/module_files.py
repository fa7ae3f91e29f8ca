"""Blobs and states of one module: fetched, validated, computed, pruned.

Runs in: agent. Each task ends in an event for the round protocol's machine, `RequestFailed` where
it could not be done; the machine asks again if it still wants it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection

import trio

from p2p.blobstore import BlobStore
from p2p.errors import P2PError
from p2p.swarm import Swarm
from volunteer.agent.aggregator_service import (
    AggregatorLostError,
    AggregatorRefusedError,
    AggregatorService,
)
from volunteer.agent.applying import CommitApplier
from volunteer.agent.bulk_gate import BulkGate
from volunteer.agent.cached_files import drop_all, settled_blobs
from volunteer.agent.commit_states import CommitStates
from volunteer.agent.priority import priority_of
from volunteer.agent.record_log import RecordLog
from volunteer.agent.scorer import Scorer
from volunteer.agent.state_fetch import StateFetch
from volunteer.messages import (
    BlobValidated,
    BuildGenesis,
    EvaluateState,
    Outcome,
    OwnWork,
    StateEvaluated,
    ValidateBlob,
)
from volunteer.rounds import events as ev
from volunteer.rounds.credit import WorkState
from volunteer.rounds.machine import Machine
from volunteer.rounds.records import Contribution
from volunteer.run import RunSpec
from volunteer.training.content_hash import content_hash_of
from volunteer.training.layout import num_parameters

log = logging.getLogger(__name__)
BLOB_DEADLINE_S = 900.0
BLOB_STALL_S = 60.0
"""Without a new chunk: nobody has the blob, or nobody has time."""
RETRY_AFTER_S = 2.0
GENESIS_AGAIN_S = 60.0
OWN_BLOB_JOURNALS = 3
"""Our own blobs are kept for so many journals longer than those of others."""
SHORT_JOURNAL = 2
"""Rounds whose states are kept while the disk is short: down to what is final."""
KEEP_UNREFERENCED_S = 60.0
"""And at least two rounds: a file that nothing refers to may be one that is just being made."""
_HEADER_BYTES = 64 * 1024


class ModuleFiles:
    """What the machine's actions need of the disk, the network and the aggregator."""

    def __init__(
        self,
        spec: RunSpec,
        me: str,
        store: BlobStore,
        swarm: Swarm,
        aggregator: AggregatorService,
        record_log: RecordLog,
    ) -> None:
        """Serve one module; `post` and `nursery` are set by the driver."""
        self._spec = spec
        self._store = store
        self._swarm = swarm
        self._aggregator = aggregator
        self.post: Callable[[ev.Event], None]
        self.nursery: trio.Nursery | None = None
        self.on_refused: Callable[[str, str], None] = lambda contribution_id, reason: None
        self._blob_fetches: dict[str, tuple[int, trio.CancelScope]] = {}
        self._failed_states: set[str] = set()
        self._is_disk_short = False
        self.genesis_problem = ""
        """Why round 0 cannot be built or begun from; empty: it can, or need not."""
        self._applier = CommitApplier(store, aggregator, self.state_hash_of)
        self._commits = CommitStates(self._applier, record_log, self)
        self._scorer = Scorer(me, aggregator)
        num = num_parameters(spec.model)
        # fp32 weights and momentum
        self.gate = BulkGate()
        self.states = StateFetch(store, swarm, aggregator, 8 * num + _HEADER_BYTES, self.gate)
        self._max_blob_bytes = int(spec.codec.bytes_per_parameter * num) + _HEADER_BYTES

    # ----------------------------------------------------------------------------- loading

    def state_hash_of(self, machine: Machine, commit_id: str) -> str:
        """Return the state hash of a commit, the genesis included."""
        return machine.state_hash_of(commit_id) or self._spec.genesis.state_hash

    def state_events(self, machine: Machine, verified: list[str]) -> list[ev.Event]:
        """Return the events that say which commits were verified, and whose states are gone."""
        events: list[ev.Event] = []
        for commit_id in verified:
            if commit_id in machine.known.facts:
                events.append(ev.StateHeld(commit_id))
                if not self._store.has(self.state_hash_of(machine, commit_id)):
                    events.append(ev.StateDropped(commit_id))
        return events + self._part_events(machine)

    def _part_events(self, machine: Machine) -> list[ev.Event]:
        """Return the events that say what fetches of states have left on the disk."""
        parts = self._store.partial_bytes()
        return [
            ev.StatePartHeld(commit_id, parts[commit.state_hash])
            for commit_id, commit in (machine.known.commits.items() if parts else ())
            if commit.state_hash in parts
        ]

    async def build_genesis_if_needed(self, machine: Machine) -> None:
        """Make the state of round 0, unless a later one is here, or it is fetched (rule 19)."""
        genesis = machine.rules.genesis_id
        while not machine.known.states and not machine.rules.is_genesis_given:
            try:
                await self._aggregator.ask(lambda i: BuildGenesis(request_id=i))
            except AggregatorLostError:
                continue
            except AggregatorRefusedError as error:
                log.error("genesis refused: %s", error)
                self.genesis_problem = str(error)
                await trio.sleep(GENESIS_AGAIN_S)  # noqa: TID251 - the disk may have room by then
                continue
            self.genesis_problem = ""
            self.post(ev.StateHeld(genesis))
            return

    def works_on_disk(self, works: tuple[OwnWork, ...]) -> tuple[OwnWork, ...]:
        """Return those of our own works whose blobs are here."""
        return tuple(work for work in works if self._store.has(work.blob_id))

    # ------------------------------------------------------------------------------- tasks

    def apply_ahead(self, machine: Machine) -> None:
        """Begin to compute the next commit, once all whom the chain expects are here."""
        if self.nursery is not None:
            self._applier.begin_ahead(machine, self.nursery)

    def forget_settled(self, machine: Machine) -> None:
        """Give back the memory that holds what the last round was made of."""
        if self.nursery is not None:
            settled = settled_blobs(machine)
            self.nursery.start_soon(trio.to_thread.run_sync, drop_all, self._store, settled)

    def start(self, action: ev.Action, machine: Machine) -> None:
        """Begin what `action` says in a task of its own."""
        assert self.nursery is not None
        match action:
            case ev.FetchBlob(contribution_id, contribution):
                self._scorer.note_heard(contribution_id)
                self.nursery.start_soon(
                    self._fetch_while_needed, contribution_id, contribution, machine
                )
            case ev.ComputeState():
                self.nursery.start_soon(self._commits.compute_state, action, machine)
            case ev.ComputeProposal():
                self.nursery.start_soon(self._commits.compute_proposal, action, machine)
            case ev.FetchState():
                if action.commit_id not in self._failed_states:  # else both ways are tried
                    self._leave_blobs_below(machine.known.facts[action.commit_id].height)
                self.nursery.start_soon(self._fetch_state, action, machine)
            case ev.BanPeer(peer, first, second, reason):
                log.error("peer=%s banned: %s (%s, %s)", peer, reason, first, second)
                self._swarm.ban(peer, reason)
            case _:
                raise AssertionError(action)

    def _providers(self, first: str) -> Callable[[], list[str]]:
        def providers() -> list[str]:
            peers = [p.peer_id for p in self._swarm.peers()]
            return sorted(peers, key=lambda peer: peer != first)

        return providers

    def _leave_blobs_below(self, height: int) -> None:
        """Stop fetching what is of no use once the state at `height` is here."""
        for round_index, scope in self._blob_fetches.values():
            if round_index < height - 1:
                scope.cancel()

    async def _fetch_while_needed(
        self, contribution_id: str, contribution: Contribution, machine: Machine
    ) -> None:
        with trio.CancelScope() as scope:
            self._blob_fetches[contribution_id] = (contribution.round_index, scope)
            try:
                await self._fetch_blob(contribution_id, contribution, machine)
            finally:
                del self._blob_fetches[contribution_id]
        if scope.cancelled_caught:
            self.post(ev.RequestFailed(contribution_id))

    async def _fetch_blob(
        self, contribution_id: str, contribution: Contribution, machine: Machine
    ) -> None:
        blob_id = contribution.blob_id
        if contribution.blob_bytes > self._max_blob_bytes:
            self.post(ev.BlobRefused(contribution_id, "it is larger than any contribution can be"))
            return
        try:
            if not self._store.has(blob_id):
                await self.gate.run(
                    lambda: self._swarm.fetch_blob(
                        blob_id,
                        max_bytes=contribution.blob_bytes,
                        providers=self._providers(contribution.author),
                        store=self._store,
                        purpose="contributions",
                        deadline_s=BLOB_DEADLINE_S,
                        stall_s=BLOB_STALL_S,
                        priority=priority_of(machine, blob_id),
                    )
                )
            reply = await self._aggregator.ask(
                lambda i: ValidateBlob(
                    request_id=i,
                    blob_id=blob_id,
                    author=contribution.author,
                    round_index=contribution.round_index,
                    codec=contribution.codec,
                    codec_version=contribution.codec_version,
                    content_hash=contribution.content_hash or "",
                )
            )
        except (P2PError, AggregatorLostError, AggregatorRefusedError) as error:
            await self.fail_later(contribution_id, error)
            return
        assert isinstance(reply, BlobValidated)
        if reply.reason:
            log.warning("blob=%s author=%s: %s", blob_id[:12], contribution.author, reply.reason)
            self.post(ev.BlobRefused(contribution_id, reply.reason))
        else:
            self.post(ev.BlobHeld(contribution_id))

    async def fail_later(self, subject: str, error: Exception) -> None:
        """Have the machine ask again after a while."""
        log.info("subject=%s not done yet: %s", subject[:12], error)
        await trio.sleep(RETRY_AFTER_S)  # noqa: TID251 - asked again at once otherwise
        self.post(ev.RequestFailed(subject))

    def on_outcomes(self, machine: Machine, commit_id: str, outcomes: tuple[Outcome, ...]) -> None:
        """Score what a commit lists that holds, if that is this member's turn."""
        assert self.nursery is not None
        if self._scorer.is_due(machine, commit_id):
            of, post = self.state_hash_of, self.post
            self.nursery.start_soon(self._scorer.score, machine, commit_id, outcomes, of, post)

    async def own_content_hash(self, blob_id: str) -> str:
        """Return what the record of an own contribution says of its content; empty: it is gone."""
        try:
            return await trio.to_thread.run_sync(content_hash_of, self._store.file_of(blob_id))
        except FileNotFoundError:
            return ""

    async def _fetch_state(self, action: ev.FetchState, machine: Machine) -> None:
        commit_id = action.commit_id
        state_hash = self.state_hash_of(machine, commit_id)
        height = machine.known.facts[commit_id].height
        try:
            await self.states.fetch(state_hash, height, self._providers(""))
        except (P2PError, AggregatorLostError, AggregatorRefusedError) as error:
            if isinstance(error, AggregatorRefusedError) and commit_id == machine.rules.genesis_id:
                log.error("genesis refused: %s", error)
                self.genesis_problem = str(error)
            self._failed_states.add(commit_id)
            num_bytes = await trio.to_thread.run_sync(self._what_is_left_of, state_hash)
            self.post(ev.StatePartHeld(commit_id, num_bytes))
            await self.fail_later(commit_id, error)
            return
        self.genesis_problem = ""
        log.info("commit=%s state=%s fetched", commit_id[:12], state_hash[:12])
        self.post(ev.StateHeld(commit_id))

    def _what_is_left_of(self, state_hash: str) -> int:
        """Delete the state's file if the disk has damaged it; return how much of it is here."""
        if not self._store.has(state_hash):
            return self._store.partial_bytes().get(state_hash, 0)
        if self._store.verify(state_hash):
            return self._store.size_bytes(state_hash)
        log.warning("state=%s is damaged on the disk: fetched again", state_hash[:12])
        self._store.delete(state_hash)
        return 0

    def start_evaluation(
        self, commit_id: str, state_hash: str, on_loss: Callable[[str, StateEvaluated], None]
    ) -> None:
        """Measure the held-out loss of a state, and tell `on_loss`."""
        assert self.nursery is not None
        self.nursery.start_soon(self._evaluate, commit_id, state_hash, on_loss)

    async def _evaluate(
        self, commit_id: str, state_hash: str, on_loss: Callable[[str, StateEvaluated], None]
    ) -> None:
        try:
            reply = await self._aggregator.ask(
                lambda i: EvaluateState(request_id=i, state_hash=state_hash)
            )
        except (AggregatorLostError, AggregatorRefusedError) as error:
            log.info("commit=%s not evaluated: %s", commit_id[:12], error)
            return
        assert isinstance(reply, StateEvaluated)
        on_loss(commit_id, reply)

    # ----------------------------------------------------------------------------- pruning

    def spare_disk(self, machine: Machine, *, is_short: bool) -> None:
        """Keep fewer old states while the owner's limit is near; the others go at once.

        A branch that left the chain further below is then switched to with a state of others.
        """
        has_begun = is_short and not self._is_disk_short
        self._is_disk_short = is_short
        if has_begun and machine.tip is not None and self.nursery is not None:
            kept = self._keep_states(machine)
            old = {commit.state_hash for commit in machine.known.commits.values()} - kept
            self.nursery.start_soon(trio.to_thread.run_sync, self._delete_all, old)

    def _keep_states(self, machine: Machine) -> set[str]:
        """Return the hashes of the states that are kept; the machine is told which go."""
        assert machine.tip is not None
        journal = SHORT_JOURNAL if self._is_disk_short else self._spec.rounds.journal_rounds
        oldest = machine.known.facts[machine.tip].height - journal
        # What a fetch of a state has left is gone on with after the next start.
        kept = {
            commit.state_hash
            for commit in machine.known.commits.values()
            if commit.round_index >= machine.known.highest_height - journal
        }
        for commit_id in list(machine.known.states):
            if machine.known.facts[commit_id].height >= oldest:
                kept.add(self.state_hash_of(machine, commit_id))
            else:
                self.post(ev.StateDropped(commit_id))
        return kept

    def _delete_all(self, blob_ids: Collection[str]) -> None:
        for blob_id in blob_ids:
            self._store.delete(blob_id)

    def prune(self, machine: Machine, *, keep: Collection[str] = ()) -> None:
        """Delete blobs and states that nothing can need any more, but for those in `keep`."""
        assert self.nursery is not None
        assert machine.tip is not None
        journal = self._spec.rounds.journal_rounds
        oldest = machine.known.facts[machine.tip].height - journal
        known = machine.known.contributions.values()
        needed = {*keep, *(c.blob_id for c in known if c.round_index >= oldest)}
        needed |= _needed_own_blobs(machine, oldest - OWN_BLOB_JOURNALS * journal)
        needed |= self._keep_states(machine)
        needed.add(self._spec.data.tokenizer_hash)
        self.nursery.start_soon(trio.to_thread.run_sync, self._delete_others, needed)

    def _delete_others(self, keep: set[str]) -> None:
        newest = time.time() - max(KEEP_UNREFERENCED_S, 2 * self._spec.rounds.round_s)
        for blob_id in self._store.list_ids():
            if blob_id in keep:
                continue
            with contextlib.suppress(FileNotFoundError):  # another prune was faster
                if self._store.file_of(blob_id).stat().st_mtime < newest:
                    self._store.delete(blob_id)
        self._store.remove_abandoned(keep, untouched_since=newest)


def _needed_own_blobs(machine: Machine, oldest: int) -> set[str]:
    """Return the blobs of own work that may have to go into the weights or out of them.

    All that is not settled, and whatever was made on a base of height `oldest` or above: a trainer
    may still carry what the chain has come to list.
    """
    needed: set[str] = set()
    states = machine.work_states()
    for contribution_id, contribution in machine.own.items():
        is_open = states[contribution_id] in (WorkState.PENDING, WorkState.IN_FLIGHT)
        if is_open or contribution.round_index >= oldest:
            for i in (contribution_id, *contribution.carries):
                if i in machine.own:
                    needed.add(machine.own[i].blob_id)
    return needed
