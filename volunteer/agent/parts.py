"""The parts of an agent that follow one run's module, and how they hang together.

Runs in: agent. Nothing here starts or waits; app.py does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from p2p.blobstore import BlobStore
from p2p.identity import Identity
from p2p.swarm import Swarm
from volunteer.agent.aggregator_service import AggregatorService
from volunteer.agent.bookkeeper import Bookkeeper
from volunteer.agent.driver import RoundDriver
from volunteer.agent.exchange import Exchange
from volunteer.agent.joined_run import chain_rules
from volunteer.agent.module_files import ModuleFiles
from volunteer.agent.peer_memory import PeerMemory
from volunteer.agent.priority import priority_of
from volunteer.agent.record_book import RecordBook
from volunteer.agent.record_log import RecordLog
from volunteer.agent.signed_mark import SignedMark
from volunteer.agent.status import StatusSource
from volunteer.agent.sync_pages import SyncPages
from volunteer.agent.timing import ExchangeClock
from volunteer.agent.traffic import TrafficMeter
from volunteer.agent.trainer_service import TrainerService
from volunteer.agent.wire import Heartbeat
from volunteer.data.sources import parse_source
from volunteer.locations import Locations
from volunteer.rounds.machine import Machine
from volunteer.rounds.records import DENSE_MODULE
from volunteer.rounds.turn import Timing
from volunteer.run import RunSpec
from volunteer.stats.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What the parts stand on: who we are, what is trained, what is open."""

    spec: RunSpec
    identity: Identity
    locations: Locations
    run_dir: Path
    swarm: Swarm
    ledger: Ledger
    record_log: RecordLog
    mark: SignedMark
    clock: ExchangeClock


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """One module's machine, and what carries out its wishes."""

    store: BlobStore
    machine: Machine
    files: ModuleFiles
    keeper: Bookkeeper
    driver: RoundDriver
    exchange: Exchange
    aggregator: AggregatorService
    trainer: TrainerService
    memory: PeerMemory


def make_parts(ground: Ground, timing: Timing, trainer_argv: Sequence[str]) -> Parts:
    """Put the parts together; nothing runs yet.

    Args:
        ground: what they stand on.
        timing: of the rounds.
        trainer_argv: the trainer's flags.
    """
    spec, me, log_dir = ground.spec, ground.identity.peer_id, ground.locations.log_dir
    store = BlobStore(ground.locations.blobs_dir(spec.run_id, DENSE_MODULE))
    has_lost = ground.mark.has_lost(ground.record_log.highest_own())
    machine = Machine(chain_rules(spec), timing, me, has_lost_records=has_lost)
    book = RecordBook(ground.record_log, ground.identity, machine.known, ground.mark)
    aggregator = AggregatorService(ground.run_dir, DENSE_MODULE, log_dir / "aggregator.log")
    keeper = Bookkeeper(ground.ledger, machine)
    files = ModuleFiles(spec, me, store, ground.swarm, aggregator, ground.record_log)
    files.on_refused = keeper.refused.__setitem__
    driver = RoundDriver(machine, book, ground.record_log, files, keeper, ground.clock)
    memory = PeerMemory(ground.locations.data_dir / "peers.json")
    exchange = Exchange(
        ground.swarm,
        book,
        SyncPages(machine, book),
        driver.take_record,
        driver.take_closed,
        memory,
    )
    trainer = TrainerService(
        list(trainer_argv),
        log_dir / "trainer.log",
        driver.on_trainer_event,
        driver.on_trainer_end,
    )
    driver.exchange, driver.trainer = exchange, trainer
    return Parts(
        store=store,
        machine=machine,
        files=files,
        keeper=keeper,
        driver=driver,
        exchange=exchange,
        aggregator=aggregator,
        trainer=trainer,
        memory=memory,
    )


def join_network(parts: Parts, swarm: Swarm, traffic: TrafficMeter) -> None:
    """Tell the network whom we know, whom we shun, and what we serve."""
    for peer_id in parts.machine.banned:
        swarm.ban(peer_id, "it signed two things of which only one may be")
    for peer_id, addrs in parts.memory.load().items():
        swarm.remember(peer_id, addrs)
    swarm.serve_blobs(
        parts.store,
        lambda blob_id: parts.files.gate.may_serve,
        traffic.purpose_of,
        lambda blob_id: priority_of(parts.machine, blob_id),
    )
    swarm.on_peer_connected(lambda peer: parts.exchange.note_neighbour())


def heartbeat_of(source: StatusSource) -> Heartbeat | None:
    """Return what we say of ourselves; None before the run has begun here."""
    machine = source.driver.machine
    if machine.tip is None:
        return None
    view = source.trainer.view
    has_private = any(not parse_source(text).is_public for text in source.spec.data.sources)
    return Heartbeat(
        run_id=machine.rules.run_id,
        module_id=machine.rules.module_id,
        tip=machine.tip,
        round_index=machine.known.facts[machine.tip].height,
        state_hash=source.driver.state_hash,
        is_contributing=source.policy.is_training,
        tokens_per_s=view.tokens_per_s,
        loss=None if has_private else view.loss,  # of private text nothing leaves but weights
        addrs=_told_addrs(source.swarm.listen_addrs),
    )


def _told_addrs(listen_addrs: tuple[str, ...]) -> tuple[str, ...]:
    """Return the addresses that others can use; those of this machine alone if there are no others.

    Each is 90 bytes in every heartbeat, three or four copies of which reach everybody.
    """
    outside = tuple(a for a in listen_addrs if not a.startswith(("/ip4/127.", "/ip6/::1/")))
    return (outside or listen_addrs)[:8]
