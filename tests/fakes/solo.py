"""One member's real driver, records, blobs and books, with twins of aggregator, trainer and swarm.

What a kill leaves is `Disk`; a `Solo` is one run of the agent on it. States and blobs are small
texts that say what they were made of, so that a wrong one is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import msgspec
import trio

from p2p.blobstore import BlobStore, blob_id_of_bytes
from p2p.identity import Identity
from tests.fakes.members import PEOPLE
from tests.fakes.network import FakeNetwork, FakeSwarm
from volunteer.agent.aggregator_service import (
    AggregatorLostError,
    AggregatorRefusedError,
    AggregatorService,
)
from volunteer.agent.bookkeeper import Bookkeeper
from volunteer.agent.driver import RoundDriver
from volunteer.agent.exchange import Exchange
from volunteer.agent.joined_run import chain_rules
from volunteer.agent.module_files import ModuleFiles
from volunteer.agent.peer_memory import PeerMemory
from volunteer.agent.record_book import RecordBook, SignedRecord, verify_envelope
from volunteer.agent.record_log import RecordLog
from volunteer.agent.signed_mark import SignedMark
from volunteer.agent.sync_pages import SyncPages
from volunteer.agent.timing import ExchangeClock
from volunteer.agent.trainer_service import TrainerService
from volunteer.data.builtin import load_builtin_run
from volunteer.messages import (
    AggregatorCommand,
    AggregatorEvent,
    ApplyCommit,
    BlobValidated,
    BuildGenesis,
    Contribute,
    ContributionsScored,
    Encoded,
    EvaluateState,
    NothingToContribute,
    Outcome,
    Rebase,
    Rebased,
    Score,
    ScoreContributions,
    StateBuilt,
    StateEvaluated,
    StateVerified,
    Stepped,
    TrainerCommand,
    TrainerStarted,
    ValidateBlob,
    VerifyState,
)
from volunteer.rounds import events as ev
from volunteer.rounds.machine import Machine
from volunteer.rounds.records import DENSE_MODULE, Record
from volunteer.rounds.turn import Timing
from volunteer.run import RunSpec
from volunteer.stats.ledger import Ledger

GENESIS_STATE = b"genesis"
TOKENS = 100
ROUND_S = 8.0


def solo_spec(*, is_given: bool = False) -> RunSpec:
    """Return an open run whose genesis state is a text: a given one, or one that is made."""
    spec = load_builtin_run("demo")
    genesis = msgspec.structs.replace(spec.genesis, state_hash=blob_id_of_bytes(GENESIS_STATE))
    if is_given:
        genesis = msgspec.structs.replace(genesis, source="weights", seed=0)
    return msgspec.structs.replace(spec, genesis=genesis)


def applied(parent_state: str, blob_ids: list[str]) -> bytes:
    """Return the state that listing these blobs makes."""
    return f"{parent_state} {' '.join(blob_ids)}".encode()


@dataclass
class FakeAggregator:
    """Applies texts; what it shall do wrong is set by the test."""

    store: BlobStore
    is_lost: bool = False
    refusal: str = ""
    bad_blobs: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Contribution -> why it gets weight 0."""
    marked: set[str] = field(default_factory=set)
    """Contributions that a commit has to mark as bad work."""
    harmful: set[str] = field(default_factory=set)
    """Contributions that raise the loss."""
    num_scored: int = 4
    """What there is time to score in one go."""
    is_against: Callable[[str], bool] = lambda contribution_id: False
    """Whether a contribution gets weight 0, if `refused` does not say so."""
    asked: list[AggregatorCommand] = field(default_factory=list)

    async def ask(self, make: Callable[[int], AggregatorCommand]) -> AggregatorEvent:
        await trio.lowlevel.checkpoint()
        command = make(1)
        self.asked.append(command)
        if self.is_lost:
            raise AggregatorLostError
        if self.refusal:
            raise AggregatorRefusedError(self.refusal)
        match command:
            case BuildGenesis():
                return self._built(GENESIS_STATE, ())
            case ValidateBlob(blob_id=blob_id):
                reason = self.bad_blobs.get(blob_id, "")
                return BlobValidated(request_id=1, blob_id=blob_id, reason=reason)
            case ApplyCommit(parent_state=parent, listed=listed):
                missing = [w.blob_id for w in listed if not self.store.has(w.blob_id)]
                if missing or not self.store.has(parent):
                    raise AggregatorRefusedError("a file is missing")
                outcomes = tuple(
                    Outcome(
                        contribution_id=work.contribution_id,
                        weight=1.0,
                        norm=1.0,
                        clip_scale=1.0,
                        refused_reason=self._verdict(work.contribution_id),
                        is_marked=work.contribution_id in self.marked,
                    )
                    for work in listed
                )
                return self._built(applied(parent, [w.blob_id for w in listed]), outcomes)
            case EvaluateState(state_hash=state_hash):
                return StateEvaluated(
                    request_id=1,
                    state_hash=state_hash,
                    held_out_loss=2.0,
                    loss_stderr=0.1,
                    num_windows=64,
                )
            case VerifyState(state_hash=state_hash):
                return StateVerified(request_id=1, state_hash=state_hash)
            case ScoreContributions(works=works):
                scores = tuple(
                    Score(
                        contribution_id=work.contribution_id,
                        change=0.1 if work.contribution_id in self.harmful else -0.1,
                        stderr=0.01,
                        loss=2.0,
                    )
                    for work in works[: self.num_scored]
                )
                return ContributionsScored(request_id=1, scores=scores)

    def _verdict(self, contribution_id: str) -> str:
        default = "against all others" if self.is_against(contribution_id) else ""
        return self.refused.get(contribution_id, default)

    def _built(self, state: bytes, outcomes: tuple[Outcome, ...]) -> StateBuilt:
        return StateBuilt(request_id=1, state_hash=self.store.add_bytes(state), outcomes=outcomes)


@dataclass
class Disk:
    """What a kill leaves."""

    folder: Path
    who: Identity = PEOPLE[0]
    last: Encoded | None = None
    """What the trainer's snapshot was last encoded as."""
    num_encoded: int = 0
    sent: list[bytes] = field(default_factory=list)
    """Every envelope that ever left, over all runs."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.store = BlobStore(self.folder / "blobs")


@dataclass
class FakeTrainer:
    """Has always trained something, and encodes at once."""

    disk: Disk
    driver: RoundDriver
    nursery: trio.Nursery
    is_up: bool = True
    is_deaf: bool = False
    """Takes commands and never answers."""
    has_work: bool = True
    is_placed: bool = False
    commands: list[TrainerCommand] = field(default_factory=list)

    def send(self, command: TrainerCommand) -> bool:
        if self.is_up:
            self.commands.append(command)
            self.is_placed |= isinstance(command, Rebase)
            if not self.is_deaf:
                self.nursery.start_soon(self._obey, command)
        return self.is_up

    async def start(self) -> None:
        self.is_up, self.is_placed = True, False
        await self.driver.on_trainer_event(
            TrainerStarted(
                device="cpu",
                device_name="a fake",
                inner_step=0,
                tokens_total=0,
                last_contribution=self.disk.last,
            )
        )
        await self.step()

    async def step(self) -> None:
        await self.driver.on_trainer_event(
            Stepped(
                inner_step=1,
                tokens_total=TOKENS,
                tokens_since_contribution=TOKENS,
                tokens_per_s=1.0,
                loss=1.0,
                lr=0.1,
            )
        )

    def crash(self) -> None:
        self.is_up = False
        self.driver.on_trainer_end()

    @property
    def rebases(self) -> list[Rebase]:
        return [c for c in self.commands if isinstance(c, Rebase)]

    @property
    def num_asked_to_contribute(self) -> int:
        return sum(isinstance(c, Contribute) for c in self.commands)

    async def _obey(self, command: TrainerCommand) -> None:
        await trio.lowlevel.checkpoint()
        match command:
            case Contribute(base=base) if not self.has_work:
                await self.driver.on_trainer_event(NothingToContribute(base=base))
            case Contribute(base=base, round_index=round_index):
                self.disk.num_encoded += 1
                blob_id = self.disk.store.add_bytes(f"work {self.disk.num_encoded}".encode())
                self.disk.last = Encoded(
                    base=base,
                    round_index=round_index,
                    blob_id=blob_id,
                    blob_bytes=10,
                    codec="int4",
                    codec_version=1,
                    tokens=TOKENS,
                    carries=(),
                )
                await trio.lowlevel.checkpoint()  # a kill may come here
                await self.driver.on_trainer_event(self.disk.last)
                await self.step()
            case Rebase(commit_id=commit_id):
                await self.driver.on_trainer_event(
                    Rebased(commit_id=commit_id, carried=command.pending, discarded_tokens=0)
                )


class Solo:
    """One run of an agent's driver on a disk."""

    def __init__(
        self,
        disk: Disk,
        nursery: trio.Nursery,
        network: FakeNetwork | None = None,
        spec: RunSpec | None = None,
    ) -> None:
        self.disk = disk
        self.spec = spec or solo_spec()
        self.record_log = RecordLog(disk.folder / "records.sqlite")
        self.ledger = Ledger(disk.folder / "stats.sqlite")
        rules = chain_rules(self.spec)
        self.network = network or FakeNetwork()
        self.swarm: FakeSwarm = self.network.join(disk.who.peer_id)
        self.swarm.on_publish = self._on_publish
        self.swarm.store = disk.store
        timing = Timing(round_s=ROUND_S, grace_s=1.0, failover_s=1.0)
        self.machine = Machine(rules, timing, disk.who.peer_id)
        self.book = self._book_of(disk.who)
        self.aggregator = FakeAggregator(disk.store)
        self.keeper = Bookkeeper(self.ledger, self.machine)
        self.files = ModuleFiles(
            self.spec,
            disk.who.peer_id,
            disk.store,
            self.swarm.as_swarm,
            cast("AggregatorService", self.aggregator),
            self.record_log,
        )
        self.files.on_refused = self.keeper.refused.__setitem__
        self.driver = RoundDriver(
            self.machine,
            self.book,
            self.record_log,
            self.files,
            self.keeper,
            ExchangeClock(self.spec.rounds),
        )
        self.exchange = Exchange(
            self.swarm.as_swarm,
            self.book,
            SyncPages(self.machine, self.book),
            self.driver.take_record,
            self.driver.take_closed,
            PeerMemory(disk.folder / "peers.json"),
        )
        self.trainer = FakeTrainer(disk, self.driver, nursery)
        self.driver.exchange = self.exchange
        self.driver.trainer = cast("TrainerService", self.trainer)
        self.sent_before_kept: list[str] = []
        self._nursery = nursery

    def _on_publish(self, topic: str, payload: bytes) -> None:
        signed = verify_envelope(payload, self.spec.run_id, DENSE_MODULE)
        if signed.record.__struct_config__.tag != "close":
            try:
                self.record_log.get(signed.record_id)
            except KeyError:
                self.sent_before_kept.append(signed.record_id)
        self.disk.sent.append(payload)

    async def start(self, *, is_contributing: bool = True) -> None:
        """Load from disk and begin."""
        await self.driver.load()
        self._nursery.start_soon(self.driver.run)
        self._nursery.start_soon(self.keeper.run)
        if is_contributing:
            await self.trainer.start()
            self.driver.post(ev.ContributingChanged(True))

    def close(self) -> None:
        self.record_log.close()
        self.ledger.close()

    @property
    def height(self) -> int:
        tip = self.machine.tip
        return self.machine.known.facts[tip].height if tip is not None else -1

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait in virtual time; TooSlowError if a hundred rounds do not bring it."""
        with trio.fail_after(100 * ROUND_S):
            while not condition():  # noqa: ASYNC110 - any state of the machine may be waited for
                await trio.sleep(0.1)  # noqa: TID251 - virtual time

    def sent(self) -> list[Record]:
        """Return every record that ever left this disk."""
        return [
            verify_envelope(data, self.spec.run_id, DENSE_MODULE).record for data in self.disk.sent
        ]

    def sign(self, record: Record, who: Identity) -> SignedRecord:
        return self._book_of(who).sign(record)

    def _book_of(self, who: Identity) -> RecordBook:
        signed_dir = self.disk.folder / "signed"
        mark = SignedMark(signed_dir, who.peer_id, self.spec.run_id, DENSE_MODULE)
        return RecordBook(self.record_log, who, self.machine.known, mark)
