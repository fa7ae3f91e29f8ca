"""Starts and stops trainer and aggregator as the policy decides.

Runs in: agent. The decision itself is pure (policy/idle.py); here are its clock, its sensors and
its hands. The sensors run in threads of their own and wake this task when something has changed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import trio

from volunteer.agent.aggregator_service import AggregatorService
from volunteer.agent.bookkeeper import Bookkeeper
from volunteer.agent.bulk_gate import BulkGate
from volunteer.agent.clock import now_s
from volunteer.agent.data_budget import DataUse
from volunteer.agent.driver import RoundDriver
from volunteer.agent.owners_word import OwnersWord
from volunteer.agent.release import Releaser
from volunteer.agent.trainer_service import TrainerService
from volunteer.answers import Release
from volunteer.config import Config
from volunteer.locations import Locations
from volunteer.policy.idle import LOOKING, Decision, IdleState, decide
from volunteer.policy.report import SourceReport
from volunteer.policy.sensors.load import own_processes
from volunteer.policy.sensors.machine import MachineSensors
from volunteer.policy.sensors.nvidia import GpuMemory, NvidiaSource, has_library
from volunteer.policy.signals import IdleConfig, Signals
from volunteer.policy.veto import Cause
from volunteer.policy.wishes import idle_config
from volunteer.rounds import events as ev

log = logging.getLogger(__name__)
LOOK_EVERY_S = 0.5
TELL_DEADLINE_S = 2.5
"""For the first reading of every sensor; who has not told by then is unknown."""
COUNT_EVERY_S = 30.0
SPARE_DISK_AT = 0.8
"""Of the owner's limit: from here on old states go sooner, so that it is not reached."""
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""What tells the trainer's libraries which GPUs there are."""


class Sensors(Protocol):
    """What the task needs of policy.sensors.machine.MachineSensors."""

    def start(self) -> None:
        """Begin to watch."""

    def stop(self) -> None:
        """End."""

    def wait_told(self, deadline_s: float) -> None:
        """Wait, in a thread, for everybody's first reading."""

    def config(self) -> Config:
        """Return the owner's wishes, which may have changed."""

    def read(self, now_s: float) -> Signals:
        """Return all readings; never waits."""

    def note_client(self, pid: int) -> None:
        """Say that a process talks to this program."""

    def allow_sleep(self) -> None:
        """Say that nothing is left to save."""

    def reports(self) -> list[SourceReport]:
        """Return what each source says, for `doctor`; never waits."""


@dataclass(slots=True, kw_only=True)
class PolicyTask:
    """Keeps asking the policy, and does what it says."""

    config: Config
    locations: Locations
    driver: RoundDriver
    trainer: TrainerService
    aggregator: AggregatorService
    keeper: Bookkeeper
    is_idle_ignored: bool
    is_owners_start: bool = False
    """Whether it was the owner who started this agent, and not the system."""
    gate: BulkGate = field(default_factory=BulkGate)
    """What the network's hours and a metered connection hold shut."""
    make_sensors: Callable[[Config, Locations, Callable[[], None]], Sensors] = MachineSensors
    """Makes what reads this machine: (config, folders, what to call when something changes)."""
    read_data: Callable[[], DataUse] = DataUse
    """Says what the network has carried in this month."""
    on_finished: Callable[[], None] = lambda: None
    """Called when the round is finished after which the owner wants the agent to end."""
    spare_disk: Callable[[bool], None] = lambda is_short: None
    """Told at each look whether our own data is near the owner's limit."""
    decision: Decision = field(init=False)
    release: Release | None = None
    """What the last stop gave back; None while contributing."""
    word: OwnersWord = field(init=False)
    wishes: IdleConfig = field(init=False)
    _sensors: Sensors = field(init=False)
    _releaser: Releaser = field(init=False)
    _followed: Config | None = None
    """The settings that `wishes` are of, if they are not those of the start."""
    _have_told: bool = False
    _state: IdleState = field(default_factory=IdleState)
    _is_running: bool = False
    _is_shut: bool = False
    _counted_at_s: float = 0.0
    _uncounted_s: float = 0.0
    _lock: trio.Lock = field(default_factory=trio.Lock)
    _news: trio.Event = field(default_factory=trio.Event)
    _token: trio.lowlevel.TrioToken | None = None

    def __post_init__(self) -> None:
        """Take the owner's word from the disk; nothing runs yet."""
        self.wishes = idle_config(self.config, is_idle_ignored=self.is_idle_ignored)
        self._counted_at_s = now_s()
        file = self.locations.data_dir / "pause.json"
        self.word = OwnersWord(file, now_s(), is_owners_start=self.is_owners_start)
        self._releaser = Releaser(_memory_reader(self.config))
        self._sensors = self.make_sensors(self.config, self.locations, self._note_news)
        self._decide()

    @property
    def is_paused_by_owner(self) -> bool:
        """Whether it is the owner's own command that keeps it from contributing."""
        return self.decision.cause is Cause.OWNER

    @property
    def is_idle_unknown(self) -> bool:
        """Whether nobody can tell if the machine is in use."""
        return self.decision.cause is Cause.UNKNOWN

    def reports(self) -> list[SourceReport]:
        """Return what each sensor says just now, for `doctor`."""
        return self._sensors.reports()

    @property
    def is_running(self) -> bool:
        """Whether trainer and aggregator are wanted now."""
        return self._is_running

    @property
    def is_training(self) -> bool:
        """Whether inner steps are being taken now."""
        return self._is_running and self.trainer.is_stepping

    async def run(self) -> None:
        """Look whenever a sensor has news, and twice a second, for ever."""
        self._token = trio.lowlevel.current_trio_token()
        self._sensors.start()
        try:
            await trio.to_thread.run_sync(
                self._sensors.wait_told,
                TELL_DEADLINE_S,
                abandon_on_cancel=True,  # type: ignore[call-arg]  # the stubs know an older trio
            )
            self._have_told = True
            while True:
                await self._look()
                with trio.move_on_after(LOOK_EVERY_S):
                    await self._news.wait()
                self._news = trio.Event()
        finally:
            self._sensors.stop()

    def note_client(self, pid: int) -> None:
        """Take note that a process talks to us: what is typed in its terminal is for us."""
        self._sensors.note_client(pid)

    async def pause(self, for_s: float | None) -> None:
        """Stop now, for some seconds or until resumed; returns when both children are gone."""
        # The device first: the disk may take its time.
        self.word.say_pause(now_s(), for_s)
        await self._look()
        await self.word.keep(now_s())

    async def finish(self, *, ends_agent: bool = False) -> None:
        """Stop when the round that is trained now has closed; `resume` takes it back.

        Where nothing is trained there is no round to finish: it stops at once.

        Args:
            ends_agent: whether the agent ends then.
        """
        if not self._is_running:
            if ends_agent:
                self.on_finished()
            else:
                await self.pause(None)
            return
        round_s = self.driver.machine.timing.round_s
        self.word.say_finish(now_s(), self._round_index(), round_s, ends_agent=ends_agent)
        await self.word.keep(now_s())
        await self._look()

    async def resume(self) -> None:
        """End the owner's pause, and try again what was given up; other reasons still count."""
        self.word.say_resume()
        self.aggregator.forgive()
        self.trainer.forgive()
        await self.word.keep(now_s())
        await self._look()

    async def shut_down(self, *, is_restart: bool = False) -> None:
        """Stop for good, at the agent's end.

        Args:
            is_restart: whether the agent begins anew by itself: what is to be finished still is.
        """
        async with self._lock:
            self._is_shut = True
            await self._stop("the agent ends")
            if self.word.ends_agent and not is_restart:
                self.word.say_resume()  # it has been stopped; the next start is none that rests
                await self.word.keep(now_s())

    def _note_news(self) -> None:
        """Have the task look at once; called by the sensors' threads."""
        if self._token is None:
            return
        try:
            self._token.run_sync_soon(self._wake, idempotent=True)
        except trio.RunFinishedError:
            return  # the agent has ended

    def _wake(self) -> None:
        self._news.set()

    async def _look(self) -> None:
        """Ask the policy once, and do what it says; one at a time."""
        async with self._lock:
            if self._is_shut:
                return
            before = self.decision.cause
            self._decide()
            if self.decision.may_contribute and not self._is_running:
                self._start()
            elif not self.decision.may_contribute and self._is_running:
                await self._stop(self.decision.reason)
            elif self.decision.cause is not before:
                log.info("not contributing: %s", self.decision.reason)
            if not self._is_running:
                self._sensors.allow_sleep()
            await self._end_finish()
            self._count()
            if self._uncounted_s >= COUNT_EVERY_S:
                self.flush()

    async def _end_finish(self) -> None:
        """Once the owner's `finish` has come to pass, or cannot, rest or end the agent."""
        if self.word.finishes_round is None or self.decision.may_contribute or not self._have_told:
            return
        if self.word.ends_agent:
            # The next start contributes again: `stop` is not `pause`.
            self._is_shut = True
            self.word.say_resume()
            await self.word.keep(now_s())
            self.on_finished()
        elif not self.is_paused_by_owner:
            self.word.say_pause(now_s(), None)
            await self.word.keep(now_s())
            self._decide()
        else:
            await self.word.keep_as_pause(now_s())

    def _round_index(self) -> int:
        machine = self.driver.machine
        return machine.known.facts[machine.tip or machine.rules.genesis_id].height

    def _decide(self) -> None:
        self._ask_policy()
        self.gate.hold("the policy", self.decision.network_reason)
        is_disk_short = self.decision.cause in (Cause.DISK, Cause.OWN_DISK)
        disk_reason = self.decision.reason if is_disk_short else ""
        self.gate.hold("the disk", disk_reason, is_fetching_only=True)

    def _ask_policy(self) -> None:
        if not self._have_told:
            self.decision = self._decide_blindly()
            return
        config = self._sensors.config()
        if config is not self._followed:
            self._followed = config
            self.wishes = idle_config(config, is_idle_ignored=self.is_idle_ignored)
        signals = self._with_owner(self._sensors.read(now_s()))
        self._state, self.decision = decide(self._state, signals, self.wishes, now_s())
        most = self.wishes.disk_max_bytes
        self.spare_disk(bool(most) and (signals.own_disk_bytes or 0) >= SPARE_DISK_AT * most)

    def _decide_blindly(self) -> Decision:
        """Return what can be said before any sensor has told."""
        signals = self._with_owner(Signals(disk_free_bytes=self.wishes.disk_min_free_bytes))
        _, decision = decide(IdleState(), signals, self.wishes, now_s())
        if decision.cause is not Cause.OWNER:
            return LOOKING
        return replace(decision, network_reason=LOOKING.network_reason)

    def _with_owner(self, signals: Signals) -> Signals:
        pause = self.word.pause
        height = self._round_index() if pause is not None and pause.after_round is not None else 0
        data = self.read_data()
        return replace(
            signals,
            owner_pause=pause,
            round_index=height,
            data_used_bytes=data.used_bytes,
            data_renews_in_s=data.renews_in_s,
        )

    def _start(self) -> None:
        log.info("contributing: %s", self.decision.reason)
        self._is_running, self.release = True, None
        if self.config.gpus:
            os.environ.update(dict.fromkeys(GPU_VARIABLES, ",".join(self.config.gpus)))
        self._counted_at_s = now_s()
        self.aggregator.want()
        self.trainer.want()
        self.driver.post(ev.ContributingChanged(True))

    async def _stop(self, reason: str) -> None:
        if not self._is_running:
            return
        log.info("not contributing: %s", reason)
        self._count()
        self.flush()
        self._is_running = False
        self.driver.post(ev.ContributingChanged(False))
        pids = [pid for pid in (self.trainer.pid, self.aggregator.pid) if pid is not None]
        self.release = await self._releaser.release(
            pids, self._stop_children, is_on_gpu=self.trainer.view.device.startswith("cuda")
        )
        if self.release.problem:
            log.error("not all is free: %s", self.release.problem)
        elif self.release.gpu_freed_bytes:
            log.info("freed gpu_bytes=%d", self.release.gpu_freed_bytes)

    async def _stop_children(self) -> None:
        self.aggregator.stop()
        await self.trainer.stop()
        await self.aggregator.wait_gone()

    def _count(self) -> None:
        """Account the time since the last look, if inner steps were taken in it."""
        seconds = now_s() - self._counted_at_s
        self._counted_at_s = now_s()
        if self.is_training:
            self._uncounted_s += seconds

    def flush(self) -> None:
        """Have the time counted so far written."""
        seconds, self._uncounted_s = self._uncounted_s, 0.0
        if seconds:
            self.keeper.note_contributed(seconds)


def _memory_reader(config: Config) -> Callable[[], Sequence[GpuMemory]] | None:
    """Return what asks the driver for the memory of the GPUs that are trained on, if one can."""
    if config.device in ("cpu", "mps") or not has_library():
        return None
    return NvidiaSource(config.gpus, own_processes).memory
