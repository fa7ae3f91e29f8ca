"""Starts and stops trainer and aggregator as the policy decides.

Runs in: agent. The decision itself is pure (policy/idle.py); here are its clock, its sensors and
its hands. The sensors run in threads of their own and wake this task when something has changed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import trio

from volunteer.agent.aggregator_service import AggregatorService
from volunteer.agent.bookkeeper import Bookkeeper
from volunteer.agent.bulk_gate import BulkGate
from volunteer.agent.clock import now_s
from volunteer.agent.driver import RoundDriver
from volunteer.agent.kept_pause import keep_pause, read_pause
from volunteer.agent.trainer_service import TrainerService
from volunteer.config import Config
from volunteer.locations import Locations
from volunteer.policy.idle import LOOKING, Decision, IdleState, decide
from volunteer.policy.sensors.machine import MachineSensors
from volunteer.policy.signals import IdleConfig, OwnerPause, Signals
from volunteer.policy.veto import Cause
from volunteer.policy.wishes import idle_config
from volunteer.rounds import events as ev

log = logging.getLogger(__name__)
LOOK_EVERY_S = 0.5
TELL_DEADLINE_S = 2.5
"""For the first reading of every sensor; who has not told by then is unknown."""
COUNT_EVERY_S = 30.0
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
    gate: BulkGate = field(default_factory=BulkGate)
    """What the network's hours and a metered connection hold shut."""
    make_sensors: Callable[[Config, Locations, Callable[[], None]], Sensors] = MachineSensors
    """Makes what reads this machine: (config, folders, what to call when something changes)."""
    decision: Decision = field(init=False)
    wishes: IdleConfig = field(init=False)
    _sensors: Sensors = field(init=False)
    _owner_pause: OwnerPause | None = None
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
        self._owner_pause = read_pause(self._pause_file, now_s())
        self._sensors = self.make_sensors(self.config, self.locations, self._note_news)
        self._decide()

    @property
    def is_paused_by_owner(self) -> bool:
        """Whether it is the owner's own command that keeps it from contributing."""
        return self.decision.cause is Cause.OWNER

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
        until_s = None if for_s is None else now_s() + for_s
        self._owner_pause = OwnerPause(until_s=until_s)
        await self._look()
        await self._keep_pause()

    async def finish(self) -> None:
        """Stop when the round that is trained now has closed; `resume` takes it back."""
        self._owner_pause = OwnerPause(after_round=self._round_index() + 1)
        await self._look()

    async def resume(self) -> None:
        """End the owner's pause, and try again what was given up; other reasons still count."""
        self._owner_pause = None
        self.aggregator.forgive()
        self.trainer.forgive()
        await self._keep_pause()
        await self._look()

    @property
    def _pause_file(self) -> Path:
        return self.locations.data_dir / "pause.json"

    async def _keep_pause(self) -> None:
        pause = self._owner_pause
        await trio.to_thread.run_sync(keep_pause, self._pause_file, pause, now_s())

    async def shut_down(self) -> None:
        """Stop for good, at the agent's end."""
        async with self._lock:
            self._is_shut = True
            await self._stop("the agent ends")

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
            await self._keep_finish()
            self._count()
            if self._uncounted_s >= COUNT_EVERY_S:
                self.flush()

    async def _keep_finish(self) -> None:
        """Make the owner's `finish` a pause that outlives a restart, once it has come to pass."""
        pause = self._owner_pause
        if pause is None or pause.after_round is None or not self.is_paused_by_owner:
            return
        if self._round_index() >= pause.after_round and not self._pause_file.exists():
            await trio.to_thread.run_sync(keep_pause, self._pause_file, OwnerPause(), now_s())

    def _round_index(self) -> int:
        machine = self.driver.machine
        return machine.known.facts[machine.tip or machine.rules.genesis_id].height

    def _decide(self) -> None:
        self._ask_policy()
        self.gate.hold("the policy", self.decision.network_reason)

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

    def _decide_blindly(self) -> Decision:
        """Return what can be said before any sensor has told."""
        signals = self._with_owner(Signals(disk_free_bytes=self.wishes.disk_min_free_bytes))
        _, decision = decide(IdleState(), signals, self.wishes, now_s())
        if decision.cause is not Cause.OWNER:
            return LOOKING
        return replace(decision, network_reason=LOOKING.network_reason)

    def _with_owner(self, signals: Signals) -> Signals:
        pause = self._owner_pause
        height = self._round_index() if pause is not None and pause.after_round is not None else 0
        return replace(signals, owner_pause=pause, round_index=height)

    def _start(self) -> None:
        log.info("contributing: %s", self.decision.reason)
        self._is_running = True
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
