"""Keeps the trainer running while it is wanted, and gives the device back when it is not.

Runs in: agent. What goes wrong with it is told by `view.problem`, with what ends it and when:

- it ended: started again after 1, 2, 4, 8 s; put into quarantine after five times (backoff.py);
- others hold the memory: they are named, and it is tried again in a minute, then more seldom; as
  it is where its data cannot be had, and, sooner, where the disk cannot be written: none of them is
  the trainer's fault;
- it hangs: killed by the watch on its inner steps (step_watch.py); its last snapshot stands;
- a signal from outside has stopped it: woken (child.py);
- one has stopped this agent: the trainer has saved and ended (parent_watch.py), and starts again.
"""

from __future__ import annotations

import logging
import math
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import trio

from volunteer.agent.backoff import CRASH_WINDOW_S, MAX_CRASHES, Backoff
from volunteer.agent.child import Child
from volunteer.agent.memory_holders import count_oom_kills, name_holders
from volunteer.agent.step_watch import WATCH_EVERY_S, StepWatch
from volunteer.errors import (
    DataUnavailableError,
    OutOfGpuMemoryError,
    StorageFullError,
    StorageReadOnlyError,
)
from volunteer.messages import (
    AGENT_STOOD_STILL_STATUS,
    Preparing,
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
from volunteer.micro_batch import MicroBatch, MicroBatchChosen

log = logging.getLogger(__name__)
STOP_DEADLINE_S = 3.0
"""To save a snapshot and end; the owner was promised five seconds in all."""
MEMORY_WAIT_S, DISK_WAIT_S, DATA_WAIT_S = 60.0, 5.0, 30.0
"""Other programs do not let go of their memory for being asked often."""
LONGER_TIMES = 16
"""At most: 1, 2, 4, 8, 16 min for memory."""
STARTED_AGAIN = "it is started again"
TRIED_AGAIN = "`allmende resume` tries again at once; else it is tried"
LET_GO = "they have let go of it: it is tried again"
WRITABLE = "it can be written again: it is tried"
REACHABLE = "its data can be had: it is tried"


class Lack(Enum):
    """What a trainer could not get, through no fault of its own."""

    MEMORY = "memory"
    DISK = "disk"
    DATA = "data"


_LACKS = {
    OutOfGpuMemoryError.__name__: Lack.MEMORY,
    StorageFullError.__name__: Lack.DISK,
    StorageReadOnlyError.__name__: Lack.DISK,
    DataUnavailableError.__name__: Lack.DATA,
}


@dataclass(slots=True)
class TrainerView:
    """What the trainer last said."""

    device: str = ""
    device_name: str = ""
    inner_step: int = 0
    tokens_total: int = 0
    tokens_since_contribution: int = 0
    tokens_per_s: float = 0.0
    micro_batch: MicroBatch | None = None
    loss: float | None = None
    problem: str = ""
    """Why it does not run although it is wanted; empty where all is well."""
    resumes_when: str = ""
    """What ends that."""


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
        self._watch = StepWatch()
        self._has_started = self._has_stepped = False
        self._lack: Lack | None = None
        self._agent_stood_still = False
        """Whether the last process has ended for no other reason."""
        self._num_lacks = 0
        self._try_now = trio.Event()
        self._tries_at_s: float | None = None
        self.is_placed = False
        """Whether the process that runs now has been told where to stand."""
        self._stopping_at_s = math.inf
        self.view = TrainerView()

    @property
    def is_stepping(self) -> bool:
        """Whether the process that runs now has taken an inner step."""
        return self._child is not None and self._has_stepped and not self.is_stuck

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return self._child.pid if self._child is not None else None

    @property
    def is_preparing(self) -> bool:
        """Whether the process makes tokens of the run's texts, which it does once."""
        return self._watch.is_preparing

    @property
    def is_stuck(self) -> bool:
        """Whether it was killed and has not ended: the system holds it, as where a driver hangs."""
        return self._child is not None and self._child.was_killed

    @property
    def is_frozen(self) -> bool:
        """Whether a signal from outside has stopped it; it is woken soon."""
        return self._child is not None and self._child.is_frozen

    @property
    def tried_in_s(self) -> float | None:
        """Seconds until it is started again, while it rests from what went wrong."""
        if self._tries_at_s is None:
            return None
        return max(0.0, self._tries_at_s - trio.current_time())

    def want(self) -> None:
        """Have it run; what it rests from goes on."""
        self._wanted.set()

    def forgive(self) -> None:
        """Try at once, whatever happened before: the owner wants it."""
        self._backoff.forgive()
        self._num_lacks = 0
        self._try_now.set()

    def send(self, command: TrainerCommand) -> bool:
        """Send a command; return whether there is a trainer to send it to."""
        if self._child is None:
            return False
        self._child.send(command)
        if isinstance(command, Rebase) and not self.is_placed:
            self.is_placed = True
            self._watch.note_placed()
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
        if not self._has_started:
            self._child.kill()  # it is loading: there is nothing to save
        self._child.send(StopTrainer())
        self._child.wake()  # who was stopped by a signal has its steps still to save
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
            end = await self._run_once()
            self.view.tokens_per_s = 0.0
            self._on_end()
            if self._wanted.is_set():
                await self._rest(await self._judge(end))

    async def _judge(self, end: str) -> float:
        """Say what is wrong, after an end that nobody wanted; return the seconds to wait."""
        view = self.view
        if self._agent_stood_still:
            log.warning("trainer had saved and ended, as this agent stood still: starting it again")
            return 0.0
        if self._lack is not None:
            return await self._wait_for(self._lack, end)
        wait_s = self._backoff.note_crash(trio.current_time())
        if not self._backoff.is_broken:
            view.problem, view.resumes_when = f"the trainer has ended: {end}", STARTED_AGAIN
            log.warning("trainer ended (%s): next start in %.0f s", end, wait_s)
            return wait_s
        often = f"{MAX_CRASHES} times in a row"
        if self._backoff.crashes < MAX_CRASHES:
            often = f"{MAX_CRASHES} times within {CRASH_WINDOW_S / 60:.0f} minutes"
        view.problem = f"the trainer ended {often} and is in quarantine: {end}"
        view.resumes_when = TRIED_AGAIN
        log.error("%s; %s (see %s)", view.problem, view.resumes_when, self._log_file)
        return wait_s

    async def _wait_for(self, lack: Lack, end: str) -> float:
        """Say what others have to give it; return the seconds until it is looked for again."""
        view = self.view
        if lack is Lack.MEMORY:
            holders = await trio.to_thread.run_sync(name_holders, view.device)
            named = f"; most of it is held by {', '.join(holders)}" if holders else ""
            view.problem = f"there is too little memory to train{named}"
            view.resumes_when, wait_s = LET_GO, MEMORY_WAIT_S
        elif lack is Lack.DATA:
            view.problem, view.resumes_when, wait_s = end, REACHABLE, DATA_WAIT_S
        else:
            view.problem, view.resumes_when, wait_s = end, WRITABLE, DISK_WAIT_S
        log.error("trainer paused: %s (%s)", view.problem, end)
        wait_s *= float(min(LONGER_TIMES, 2**self._num_lacks))
        self._num_lacks += 1
        return wait_s

    async def _rest(self, wait_s: float) -> None:
        """Wait before the next start, or until the owner wants it tried at once."""
        self._try_now = trio.Event()
        self._tries_at_s = trio.current_time() + wait_s
        with trio.move_on_after(wait_s):
            await self._try_now.wait()
        self._tries_at_s = None
        if self._backoff.is_broken:
            self._backoff.begin_trial()

    async def _run_once(self) -> str:
        """Run one process; return how it ended, for people."""
        self._ended = trio.Event()
        self._has_started = self._has_stepped = self.is_placed = False
        self._lack, self._agent_stood_still = None, False
        self._watch = StepWatch()
        self.view.problem = ""
        num_oom_kills = count_oom_kills()
        try:
            child = await Child.start(self._argv, self._log_file, trainer_event_decoder, "trainer")
            self._child = child
            if not self._wanted.is_set():
                child.kill()  # stopped while it was being started: it has nothing to save
            return await self._follow(child, num_oom_kills)
        except OSError as error:  # no process, no room for its log: counts as a crash
            log.error("the trainer cannot be started: %s", error)
            return f"it cannot be started: {error}"
        finally:
            self._child = None
            self._ended.set()

    async def _follow(self, child: Child[TrainerEvent], num_oom_kills: int) -> str:
        """Follow a process to its end, and kill it if it hangs; return how it ended."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_if_hung, child)
            status = await child.run(self._take_event)
            nursery.cancel_scope.cancel()
        self._agent_stood_still = status == AGENT_STOOD_STILL_STATUS
        if self.view.problem:
            return self.view.problem
        if status == -signal.SIGKILL and not child.was_killed and count_oom_kills() > num_oom_kills:
            self._lack = Lack.MEMORY
            return "the system killed it, since memory ran out"
        return f"it was killed by signal {-status}" if status < 0 else f"exit status {status}"

    async def _end_if_hung(self, child: Child[TrainerEvent]) -> None:
        """Kill it once it has taken no inner step for too long."""
        while True:
            begun_at_s = trio.current_time()
            await trio.sleep(WATCH_EVERY_S)  # noqa: TID251 - a period
            if self._watch.is_hung(trio.current_time() - begun_at_s):
                self.view.problem = f"it has taken no step for {self._watch.deadline_s:.0f} s"
                self.view.resumes_when = STARTED_AGAIN
                log.error("trainer killed: %s", self.view.problem)
                child.kill()
                return

    async def _take_event(self, event: TrainerEvent) -> None:
        view = self.view
        match event:
            case TrainerStarted():
                self._has_started = True
                self._watch.note_prepared()
                view.device, view.device_name = event.device, event.device_name
                view.inner_step, view.tokens_total = event.inner_step, event.tokens_total
                if not self.is_placed:
                    self._watch.note_started()
            case Stepped():
                self._has_stepped = True
                self._backoff.note_progress()
                self._watch.note_step()
                self._num_lacks = 0
                view.inner_step, view.tokens_total = event.inner_step, event.tokens_total
                view.tokens_since_contribution = event.tokens_since_contribution
                view.tokens_per_s, view.loss = event.tokens_per_s, event.loss
            case SnapshotSaved():
                view.inner_step, view.tokens_total = event.inner_step, event.tokens_total
                view.tokens_since_contribution = event.tokens_since_contribution
            case MicroBatchChosen(micro_batch=micro_batch):
                view.micro_batch = micro_batch
            case Rebased():
                self._watch.note_rebased()
            case Preparing():
                self._watch.note_preparing()
            case Stopping():
                self._stopping_at_s = trio.current_time()
            case TrainerFailed():
                view.problem = f"{event.message}; {event.hint}" if event.hint else event.message
                view.resumes_when = STARTED_AGAIN
                self._lack = _LACKS.get(event.error)
                log.error("trainer failed: %s", view.problem)
        await self._on_event(event)
