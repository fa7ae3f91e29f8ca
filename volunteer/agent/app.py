"""The agent put together: one run's module, its members' network, its children, its owner.

Runs in: agent. Stages: policy -> trainer -> rounds -> swarm -> stats, each a source file here.
"""

from __future__ import annotations

import functools
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import trio

from p2p.identity import Identity
from p2p.swarm import Swarm, SwarmConfig, open_swarm
from volunteer.agent.clock import now_s
from volunteer.agent.control import WATCH_EVERY_S, serve_control
from volunteer.agent.data_budget import DataBudget, allowance, month_of, utc_clock
from volunteer.agent.handover import Handover
from volunteer.agent.joined_run import keep_run, verify_hardware
from volunteer.agent.memory_watch import MemoryWatch
from volunteer.agent.network_memory import (
    NetworkFacts,
    bans_of,
    keep_network_facts,
    read_network_facts,
)
from volunteer.agent.parts import Ground, Parts, heartbeat_of, join_network, make_parts
from volunteer.agent.policy_task import PolicyTask
from volunteer.agent.private_folder import PrivateFolder
from volunteer.agent.record_log import RecordLog
from volunteer.agent.run_data import fetch_tokenizer
from volunteer.agent.sampling import Sampler
from volunteer.agent.signed_mark import SignedMark
from volunteer.agent.status import StatusSource
from volunteer.agent.time_watch import TimeWatch
from volunteer.agent.timing import (
    ExchangeClock,
    discover_every_s,
    is_settled,
    ping_every_s,
)
from volunteer.agent.traffic import TrafficMeter
from volunteer.agent.verbs import make_verbs
from volunteer.config import Config
from volunteer.locations import Locations
from volunteer.policy.sensors.disk import read_free_bytes
from volunteer.program import program_name
from volunteer.rounds.records import DENSE_MODULE
from volunteer.rounds.turn import Timing
from volunteer.run import RunSpec
from volunteer.run_limits import verify_limits
from volunteer.stats.ledger import Ledger

log = logging.getLogger(__name__)
TELL_ALL_S = WATCH_EVERY_S + 0.2
"""Before it begins anew: every dashboard that watches has been told why."""
FAREWELL_S = 1.0
"""To tell the others that we leave, before the network is closed."""


@dataclass(slots=True, kw_only=True)
class Agent:
    """Everything that one agent runs."""

    config: Config
    locations: Locations
    identity: Identity
    spec: RunSpec
    is_idle_ignored: bool
    num_cores: int
    is_owners_start: bool = False
    """Whether the owner has just started it; not where the system did, or it begins anew."""
    handover: Handover = field(default_factory=Handover)
    """What the program before has left, and what is left to the next one."""

    async def run(self) -> None:
        """Run until told to stop, by the control socket or a signal.

        Raises:
            P2PError: a listen or bootstrap address is not usable.
            VolunteerError: a folder or file is not usable.
        """
        memory_bytes = psutil.virtual_memory().total
        verify_hardware(self.spec, memory_bytes, read_free_bytes(self.locations.data_dir))
        verify_limits(self.spec, self.config)
        run_dir = keep_run(self.spec, self.locations)
        ledger = await trio.to_thread.run_sync(Ledger, self.locations.stats_file)
        month = month_of(utc_clock())
        used_bytes = await trio.to_thread.run_sync(ledger.bytes_in_month, month)
        left_bytes = allowance(used_bytes, self.config.monthly_data_budget_bytes)
        network = self._network(read_network_facts(self._network_file), left_bytes)
        record_file = self.locations.record_file(self.spec.run_id, DENSE_MODULE)
        record_log = await trio.to_thread.run_sync(RecordLog, record_file)
        async with open_swarm(self.identity, network) as swarm:
            await self._run_with(run_dir, swarm, ledger, record_log)

    async def _run_with(
        self, run_dir: Path, swarm: Swarm, ledger: Ledger, record_log: RecordLog
    ) -> None:
        clock = ExchangeClock(self.spec.rounds)
        ground = Ground(
            spec=self.spec,
            identity=self.identity,
            locations=self.locations,
            run_dir=run_dir,
            swarm=swarm,
            ledger=ledger,
            record_log=record_log,
            mark=await trio.to_thread.run_sync(self._open_mark, record_log),
            clock=clock,
        )
        parts = make_parts(ground, self._timing(clock), self._trainer_argv(run_dir))
        stopping = trio.Event()
        policy = self._policy(parts, stopping)
        traffic = TrafficMeter(swarm, parts.keeper, ledger, parts.machine.known)
        budget = DataBudget(swarm, traffic, parts.keeper, ledger)
        policy.read_data = budget.use
        watch = self._memory_watch(stopping)
        private = PrivateFolder(self.spec, self.config.private_data)
        source = self._status_source(parts, swarm, policy, traffic, watch)
        source.data_note = lambda: private.note
        await parts.driver.load()
        await budget.load()
        await self._load_totals(parts, ledger)
        join_network(parts, swarm, traffic)
        sampler = Sampler(run_dir, DENSE_MODULE, self.locations.log_dir / "sampler.log")
        end = functools.partial(self._end, stopping)
        verbs = make_verbs(source, ledger, policy, traffic, end, sampler)
        async with trio.open_nursery() as nursery:
            await nursery.start(
                serve_control,
                self.locations.control_socket,
                verbs,
                policy.note_client,
                self.handover,
            )
            nursery.start_soon(budget.run, lambda: policy.wishes.monthly_data_budget_bytes)
            for task in (traffic.run, watch.run, policy.run, private.run):
                nursery.start_soon(task)
            self._start_parts(nursery, parts, source, clock)
            nursery.start_soon(_stop_on_signal, end)
            log.info("peer=%s listening on %s", swarm.peer_id, " ".join(swarm.listen_addrs))
            await stopping.wait()
            source.is_stopping = True
            await self._wind_down(parts, policy, traffic)
            nursery.cancel_scope.cancel()
        log.info("ended")

    def _policy(self, parts: Parts, stopping: trio.Event) -> PolicyTask:
        files = parts.files
        return PolicyTask(
            config=self.config,
            locations=self.locations,
            driver=parts.driver,
            trainer=parts.trainer,
            aggregator=parts.aggregator,
            keeper=parts.keeper,
            is_idle_ignored=self.is_idle_ignored,
            is_owners_start=self.is_owners_start,
            gate=files.gate,
            on_finished=functools.partial(self._end, stopping),
            spare_disk=lambda is_short: files.spare_disk(parts.machine, is_short=is_short),
        )

    def _status_source(
        self,
        parts: Parts,
        swarm: Swarm,
        policy: PolicyTask,
        traffic: TrafficMeter,
        watch: MemoryWatch,
    ) -> StatusSource:
        return StatusSource(
            spec=self.spec,
            swarm=swarm,
            driver=parts.driver,
            exchange=parts.exchange,
            trainer=parts.trainer,
            aggregator=parts.aggregator,
            policy=policy,
            keeper=parts.keeper,
            traffic=traffic,
            handover=self.handover,
            memory_note=watch.note,
        )

    async def _load_totals(self, parts: Parts, ledger: Ledger) -> None:
        """Let the counts go on from what was done in this run and in others."""
        done = await trio.to_thread.run_sync(ledger.stats, None)
        totals = await trio.to_thread.run_sync(ledger.totals, self.spec.run_id, DENSE_MODULE)
        parts.trainer.view.tokens_total, parts.trainer.view.inner_step = totals
        parts.keeper.tokens_elsewhere = done.tokens_done - totals[0]
        parts.keeper.steps_elsewhere = done.inner_steps - totals[1]

    def _start_parts(
        self, nursery: trio.Nursery, parts: Parts, source: StatusSource, clock: ExchangeClock
    ) -> None:
        for part in (parts.keeper, parts.aggregator, parts.trainer, parts.driver, parts.memory):
            nursery.start_soon(part.run)
        nursery.start_soon(TimeWatch().run)
        swarm = source.swarm
        gate, forgive = parts.files.gate, parts.trainer.forgive
        nursery.start_soon(fetch_tokenizer, self.spec, parts.store, swarm, gate, forgive)
        nursery.start_soon(
            keep_network_facts,
            self._network_file,
            lambda: swarm.listen_addrs,
            swarm.banned,
            read_network_facts(self._network_file).port,
        )
        nursery.start_soon(
            functools.partial(
                parts.exchange.run,
                clock.sync_s,
                lambda: heartbeat_of(source),
                round_s=self.spec.rounds.round_s,
                is_settled=lambda: is_settled(parts.machine, now_s(), clock.sync_s),
            )
        )

    async def _wind_down(self, parts: Parts, policy: PolicyTask, traffic: TrafficMeter) -> None:
        """End the children, take leave of the others, and write the last figures."""
        await policy.shut_down(is_restart=self.handover.is_wanted)
        with trio.move_on_after(FAREWELL_S):
            await parts.driver.wait_quiet()
        await traffic.flush()
        await parts.keeper.flush()
        if self.handover.is_wanted:
            await trio.sleep(TELL_ALL_S)  # noqa: TID251 - so that every dashboard hears why

    def _end(self, stopping: trio.Event) -> None:
        """End for good, whatever was to follow."""
        self.handover.cancel()
        stopping.set()

    def _memory_watch(self, stopping: trio.Event) -> MemoryWatch:
        def begin_anew(held_bytes: int) -> None:
            if not stopping.is_set():
                self.handover.want(now_s(), held_bytes)
                stopping.set()

        if self.handover.last_restart_at_s is not None:
            log.info("began anew: memory was %d bytes", self.handover.last_rss_bytes)
        limit_bytes = self.config.agent_memory_limit_bytes
        return MemoryWatch(limit_bytes, self.handover.last_restart_at_s, now_s, begin_anew)

    def _open_mark(self, record_log: RecordLog) -> SignedMark:
        """Open the mark of what was signed; an older version has kept none."""
        me, run_id = self.identity.peer_id, self.spec.run_id
        mark = SignedMark(self.locations.signed_dir, me, run_id, DENSE_MODULE)
        highest_own = record_log.highest_own()
        if mark.has_lost(highest_own):
            log.error(
                "run=%s: what was signed in it is no longer on this disk: nothing is signed until "
                "it cannot be signed twice (if nobody else ever took part, remove %s and restart)",
                run_id[:12],
                mark.file,
            )
        elif highest_own is not None:
            mark.note(highest_own)
        return mark

    @property
    def _network_file(self) -> Path:
        return self.locations.data_dir / "network.json"

    def _network(self, facts: NetworkFacts, allowance_bytes: int | None) -> SwarmConfig:
        return SwarmConfig(
            listen=self.config.listen,
            preferred_port=facts.port,
            bootstrap=self.config.bootstrap,
            namespace=self.spec.run_id,
            program=program_name(),
            mdns=self.config.mdns,
            dht=self.config.dht,
            upload_bytes_per_s=self.config.upload_bytes_per_s,
            download_bytes_per_s=self.config.download_bytes_per_s,
            allowance_bytes=allowance_bytes,
            banned=bans_of(facts),
            ping_every_s=ping_every_s(self.spec.rounds.round_s),
            discover_every_s=discover_every_s(self.spec.rounds.round_s),
        )

    def _timing(self, clock: ExchangeClock) -> Timing:
        rounds = self.spec.rounds
        return Timing(
            round_s=rounds.round_s,
            grace_s=clock.grace_s,
            failover_s=clock.failover_s,
            target_tokens=rounds.target_tokens,
        )

    def _trainer_argv(self, run_dir: Path) -> list[str]:
        return [
            *("--run-dir", str(run_dir)),
            *("--module", DENSE_MODULE),
            *("--device", self.config.device),
            *("--threads", str(self.config.num_threads(self.num_cores))),
            *("--author", self.identity.peer_id),
            *("--duty-fraction", f"{self.config.duty_fraction:g}"),
            *(["--compile"] if self.config.compile else []),
            *("--activation-checkpointing", self.config.activation_checkpointing),
            *("--gpu-max-bytes", str(self.config.gpu_max_bytes)),
            *("--checkpoint-every-s", f"{self.config.checkpoint_every_s:g}"),
        ]


async def _stop_on_signal(stop: Callable[[], None]) -> None:
    wanted = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP"):
        wanted.append(signal.SIGHUP)
    with trio.open_signal_receiver(*wanted) as signals:
        async for number in signals:
            log.info("signal=%s: ending", signal.Signals(number).name)
            stop()
