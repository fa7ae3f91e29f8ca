"""Starts and stops trainer and aggregator as the policy decides.

Runs in: agent. The decision itself is pure (policy/idle.py); here are its clock, its sensors and
its hands.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import trio

from volunteer.agent.aggregator_service import AggregatorService
from volunteer.agent.bookkeeper import Bookkeeper
from volunteer.agent.clock import now_s
from volunteer.agent.driver import RoundDriver
from volunteer.agent.kept_pause import keep_pause, read_pause
from volunteer.agent.trainer_service import TrainerService
from volunteer.config import Config
from volunteer.locations import Locations
from volunteer.policy.idle import Cause, Decision, IdleState, decide
from volunteer.policy.sensors.battery import read_on_battery
from volunteer.policy.sensors.disk import read_free_bytes
from volunteer.policy.signals import IdleConfig, OwnerPause, Signals
from volunteer.rounds import events as ev

log = logging.getLogger(__name__)
LOOK_EVERY_S = 0.5
SENSE_EVERY_S = 5.0
SENSE_DEADLINE_S = 2.0
COUNT_EVERY_S = 30.0


async def _in_thread(read: Callable[[], Signals]) -> Signals:
    # The stubs that libp2p brings know an older trio.
    return await trio.to_thread.run_sync(read, abandon_on_cancel=True)  # type: ignore[call-arg]


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
    in_thread: Callable[[Callable[[], Signals]], Awaitable[Signals]] = _in_thread
    """Runs what may block; a test's virtual clock cannot wait for real threads."""
    decision: Decision = field(init=False)
    _signals: Signals = field(init=False)
    _state: IdleState = field(default_factory=IdleState)
    _is_running: bool = False
    _is_shut: bool = False
    _sensed_at_s: float = 0.0
    _counted_at_s: float = 0.0
    _uncounted_s: float = 0.0
    _lock: trio.Lock = field(default_factory=trio.Lock)

    def __post_init__(self) -> None:
        """Take a first look; nothing runs yet."""
        self._sensed_at_s = self._counted_at_s = now_s()
        self._signals = self._read(read_pause(self._pause_file, now_s()))
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
        """Look twice a second, for ever."""
        while True:
            if now_s() - self._sensed_at_s >= SENSE_EVERY_S:
                await self._sense()
            await self._look()
            await trio.sleep(LOOK_EVERY_S)  # noqa: TID251 - a period

    async def pause(self, for_s: float | None) -> None:
        """Stop now, for some seconds or until resumed; returns when both children are gone."""
        until_s = None if for_s is None else now_s() + for_s
        self._signals = replace(self._signals, owner_pause=OwnerPause(until_s=until_s))
        await self._look()
        await self._keep_pause()

    async def resume(self) -> None:
        """End the owner's pause, and try again what was given up; other reasons still count."""
        self._signals = replace(self._signals, owner_pause=None)
        await self._keep_pause()
        await self._look()
        if self._is_running:
            self.aggregator.want()
            self.trainer.want()

    @property
    def _pause_file(self) -> Path:
        return self.locations.data_dir / "pause.json"

    async def _keep_pause(self) -> None:
        pause = self._signals.owner_pause
        await trio.to_thread.run_sync(keep_pause, self._pause_file, pause, now_s())

    async def shut_down(self) -> None:
        """Stop for good, at the agent's end."""
        async with self._lock:
            self._is_shut = True
            await self._stop("the agent ends")

    async def _look(self) -> None:
        """Ask the policy once, and do what it says; one at a time."""
        async with self._lock:
            if self._is_shut:
                return
            self._decide()
            if self.decision.may_contribute and not self._is_running:
                self._start()
            elif not self.decision.may_contribute and self._is_running:
                await self._stop(self.decision.reason)
            self._count()
            if self._uncounted_s >= COUNT_EVERY_S:
                self.flush()

    async def _sense(self) -> None:
        """Read the sensors; one that hangs (a network home, a driver) must not hold us up."""
        self._sensed_at_s = now_s()
        with trio.move_on_after(SENSE_DEADLINE_S):
            read = await self.in_thread(lambda: self._read(None))
            self._signals = replace(read, owner_pause=self._signals.owner_pause)
            return
        log.warning("the sensors have not answered within %.0f s", SENSE_DEADLINE_S)
        self._signals = replace(self._signals, on_battery=None, disk_free_bytes=None)

    def _read(self, owner_pause: OwnerPause | None) -> Signals:
        return Signals(
            owner_pause=owner_pause,
            on_battery=read_on_battery(),
            disk_free_bytes=read_free_bytes(self.locations.data_dir),
        )

    def _decide(self) -> None:
        wishes = IdleConfig(
            disk_min_free_bytes=self.config.disk_min_free_bytes,
            pause_on_battery=self.config.pause_on_battery,
            ignore_idle=self.is_idle_ignored,
        )
        self._state, self.decision = decide(self._state, self._signals, wishes, now_s())

    def _start(self) -> None:
        log.info("contributing: %s", self.decision.reason)
        self._is_running = True
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
