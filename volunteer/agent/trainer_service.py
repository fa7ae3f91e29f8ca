"""Keeps the trainer running while it is wanted, and gives the device back when it is not.

Runs in: agent.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from volunteer.agent.backoff import Backoff
from volunteer.agent.child import Child
from volunteer.messages import (
    Rebase,
    Rebased,
    SnapshotSaved,
    Stepped,
    Stopping,
    StopTrainer,
    TrainerCommand,
    TrainerEvent,
    TrainerFailed,
    TrainerStarted,
    trainer_event_decoder,
)

log = logging.getLogger(__name__)
STOP_DEADLINE_S = 4.0
"""To save a snapshot and end; the owner was promised five seconds."""
SILENCE_DEADLINE_S = 300.0
"""Without a step for so long after it was told where to stand, it hangs and is started again."""


@dataclass(slots=True)
class TrainerView:
    """What the trainer last said."""

    device: str = ""
    device_name: str = ""
    inner_step: int = 0
    tokens_total: int = 0
    tokens_since_contribution: int = 0
    tokens_per_s: float = 0.0
    loss: float | None = None
    problem: str = ""
    """Why it does not run although it is wanted; empty where all is well."""


class TrainerService:
    """One trainer process, started when wanted."""

    def __init__(
        self,
        argv: Sequence[str],
        log_file: Path,
        on_event: Callable[[TrainerEvent], Awaitable[None]],
        on_end: Callable[[], None],
    ) -> None:
        """Serve one module of one run.

        Args:
            argv: arguments of `python -m volunteer.training.trainer`.
            log_file: where its stderr goes.
            on_event: told every event, in order.
            on_end: told that a process has ended, whatever the reason.
        """
        self._argv = [sys.executable, "-P", "-m", "volunteer.training.trainer", *argv]
        self._argv += ["--log-file", str(log_file)]
        self._log_file = log_file
        self._on_event = on_event
        self._on_end = on_end
        self._wanted = trio.Event()
        self._child: Child[TrainerEvent] | None = None
        self._ended = trio.Event()
        self._ended.set()
        self._backoff = Backoff()
        self._step_deadline = trio.CancelScope()
        self._has_stepped = False
        self.is_placed = False
        """Whether the process that runs now has been told where to stand."""
        self._stopping_at_s = math.inf
        self.view = TrainerView()

    @property
    def is_stepping(self) -> bool:
        """Whether the process that runs now has taken an inner step."""
        return self._child is not None and self._has_stepped

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return self._child.pid if self._child is not None else None

    def want(self) -> None:
        """Have it run; forgives earlier crashes."""
        if not self._wanted.is_set():
            self._backoff.note_progress()
            self.view.problem = ""
        self._wanted.set()

    def send(self, command: TrainerCommand) -> bool:
        """Send a command; return whether there is a trainer to send it to."""
        if self._child is None:
            return False
        self._child.send(command)
        if isinstance(command, Rebase) and not self.is_placed:
            self.is_placed = True
            self._note_alive()
        return True

    async def stop(self) -> None:
        """Have it save and end; kill it if it has not ended in time. Returns when it is gone."""
        if self._wanted.is_set():
            self._wanted = trio.Event()
        if self._child is None:
            await self._ended.wait()  # one that is just being started is ended there
            return
        self.view.tokens_per_s = 0.0
        begun_at_s, self._stopping_at_s = trio.current_time(), math.inf
        self._child.send(StopTrainer())
        with trio.move_on_after(STOP_DEADLINE_S) as deadline:
            await self._ended.wait()
        if deadline.cancelled_caught:
            log.warning("trainer did not end within %.0f s: killed", STOP_DEADLINE_S)
            self._child.kill()
            await self._ended.wait()
        log.info(
            "trainer stopped: last_step_after_s=%.3f gone_after_s=%.3f inner_step=%d",
            min(self._stopping_at_s, trio.current_time()) - begun_at_s,
            trio.current_time() - begun_at_s,
            self.view.inner_step,
        )

    async def run(self) -> None:
        """Keep it running while wanted, for ever."""
        while True:
            await self._wanted.wait()
            if not self._wanted.is_set():
                continue  # stopped again before this task had its turn
            status = await self._run_once()
            self.view.tokens_per_s = 0.0
            self._on_end()
            if self._wanted.is_set():
                wait_s = self._backoff.note_crash()
                why = self.view.problem or f"exit status {status}"
                log.warning("trainer ended (%s): next start in %.0f s", why, wait_s)
                if self._backoff.is_broken:
                    self._give_up(why)
                    continue
                await trio.sleep(wait_s)  # noqa: TID251 - a crashed child is given time

    def _give_up(self, why: str) -> None:
        self._wanted = trio.Event()
        self.view.problem = f"the trainer ended {self._backoff.crashes} times in a row ({why})"
        log.error("%s: see %s", self.view.problem, self._log_file)

    async def _run_once(self) -> int:
        self._ended = trio.Event()
        self._has_stepped = self.is_placed = False
        try:
            child = await Child.start(self._argv, self._log_file, trainer_event_decoder, "trainer")
            self._child = child
            if not self._wanted.is_set():
                child.kill()  # stopped while it was being started: it has nothing to save
            with trio.move_on_after(SILENCE_DEADLINE_S) as self._step_deadline:
                return await child.run(self._take_event)
            log.error("trainer has taken no step for %.0f s: killed", SILENCE_DEADLINE_S)
            return -1
        except OSError as error:  # no process, no room for its log: counts as a crash
            self.view.problem = f"the trainer cannot be started: {error}"
            log.error("%s", self.view.problem)
            return -1
        finally:
            self._child = None
            self._ended.set()

    async def _take_event(self, event: TrainerEvent) -> None:
        view = self.view
        match event:
            case TrainerStarted():
                view.device, view.device_name = event.device, event.device_name
                view.inner_step, view.tokens_total = event.inner_step, event.tokens_total
                if not self.is_placed:  # until then it has nothing to do, however long that takes
                    self._step_deadline.deadline = math.inf
            case Stepped():
                self._has_stepped = True
                self._backoff.note_progress()
                self._note_alive()
                view.problem = ""
                view.inner_step, view.tokens_total = event.inner_step, event.tokens_total
                view.tokens_since_contribution = event.tokens_since_contribution
                view.tokens_per_s, view.loss = event.tokens_per_s, event.loss
            case SnapshotSaved():
                view.inner_step, view.tokens_total = event.inner_step, event.tokens_total
                view.tokens_since_contribution = event.tokens_since_contribution
            case Rebased():
                self._note_alive()
            case Stopping():
                self._stopping_at_s = trio.current_time()
            case TrainerFailed():
                view.problem = f"{event.message}; {event.hint}" if event.hint else event.message
                log.error("trainer failed: %s", view.problem)
        await self._on_event(event)

    def _note_alive(self) -> None:
        self._step_deadline.deadline = trio.current_time() + SILENCE_DEADLINE_S
