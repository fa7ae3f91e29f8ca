"""Keeps the aggregator running while it is wanted, and asks it things.

Runs in: agent.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path

import trio

from volunteer.agent.backoff import Backoff
from volunteer.agent.child import Child
from volunteer.errors import VolunteerError
from volunteer.messages import (
    AggregatorCommand,
    AggregatorEvent,
    AggregatorFailed,
    AggregatorStarted,
    aggregator_event_decoder,
)

log = logging.getLogger(__name__)
SILENCE_DEADLINE_S = 900.0
"""Longer than a commit of a billion parameters takes on a slow disk."""


class AggregatorLostError(VolunteerError):
    """The aggregator ended before it answered."""


class AggregatorRefusedError(VolunteerError):
    """The aggregator could not do what was asked."""


class AggregatorService:
    """One aggregator process, started when wanted."""

    def __init__(self, run_dir: Path, module_id: str, log_file: Path) -> None:
        """Serve one module of one run."""
        self._argv = [sys.executable, "-P", "-m", "volunteer.training.aggregator"]
        self._argv += ["--run-dir", str(run_dir), "--module", module_id, "--threads", "1"]
        self._argv += ["--log-file", str(log_file)]
        self._log_file = log_file
        self._wanted = trio.Event()
        self._child: Child[AggregatorEvent] | None = None
        self._started = trio.Event()
        self._ids = itertools.count(1)
        self._answers: dict[int, trio.Event] = {}
        self._replies: dict[int, AggregatorEvent] = {}
        self._backoff = Backoff()
        self._try_now = trio.Event()
        self._tries_at_s: float | None = None
        self._answered_at_s = -math.inf
        self._scope = trio.CancelScope()
        self._gone = trio.Event()
        self._gone.set()

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return self._child.pid if self._child is not None else None

    @property
    def is_broken(self) -> bool:
        """Whether it crashed too often, and rests for long."""
        return self._backoff.is_broken

    @property
    def is_frozen(self) -> bool:
        """Whether a signal from outside has stopped it; it is woken soon."""
        return self._child is not None and self._child.is_frozen

    @property
    def tried_in_s(self) -> float | None:
        """Seconds until it is started again, while it rests."""
        if self._tries_at_s is None:
            return None
        return max(0.0, self._tries_at_s - trio.current_time())

    def want(self) -> None:
        """Have it run; what it rests from goes on."""
        self._wanted.set()

    def forgive(self) -> None:
        """Try at once, whatever happened before: the owner wants it."""
        self._backoff.forgive()
        self._try_now.set()

    def stop(self) -> None:
        """End it at once: it keeps nothing in memory that matters."""
        if self._wanted.is_set():
            self._wanted = trio.Event()
        self._scope.cancel()

    async def wait_gone(self) -> None:
        """Wait until the process that was stopped has ended; at once where there is none."""
        await self._gone.wait()

    async def run(self) -> None:
        """Keep it running while wanted, for ever."""
        while True:
            await self._wanted.wait()
            if not self._wanted.is_set():
                continue  # stopped again before this task had its turn
            self._gone = trio.Event()
            try:
                with trio.CancelScope() as self._scope:
                    await self._run_once()
            finally:
                self._child = None
                self._gone.set()
            if self._started.is_set():  # otherwise questions still wait on it
                self._started = trio.Event()
            for answer in self._answers.values():
                answer.set()
            if self._wanted.is_set():
                await self._rest(self._backoff.note_crash(trio.current_time()))

    async def _rest(self, wait_s: float) -> None:
        """Wait before the next start; who waits for a broken one is told that it is lost."""
        log.warning("aggregator ended: next start in %.0f s", wait_s)
        if self._backoff.is_broken:
            log.error("aggregator in quarantine: it ended too often (see %s)", self._log_file)
            self._started.set()
            self._started = trio.Event()
        self._try_now = trio.Event()
        self._tries_at_s = trio.current_time() + wait_s
        with trio.move_on_after(wait_s):
            await self._try_now.wait()
        self._tries_at_s = None
        if self._backoff.is_broken:
            self._backoff.begin_trial()

    async def _run_once(self) -> None:
        try:
            child = await Child.start(
                self._argv, self._log_file, aggregator_event_decoder, "aggregator"
            )
        except OSError as error:  # no process, no room for its log: counts as a crash
            log.error("aggregator not started: %s", error)
            return
        self._child = child
        await child.run(self._on_event)

    async def _on_event(self, event: AggregatorEvent) -> None:
        if isinstance(event, AggregatorStarted):
            self._started.set()
            return
        answer = self._answers.get(event.request_id)
        if answer is None:
            if isinstance(event, AggregatorFailed):  # of no request: it cannot even start
                log.error("aggregator: %s (%s)", event.message, event.hint)
            return
        self._backoff.note_progress()
        self._answered_at_s = trio.current_time()
        self._replies[event.request_id] = event
        answer.set()

    async def _wait_for(self, answer: trio.Event, child: Child[AggregatorEvent]) -> None:
        """Wait for an answer; a process that answers nobody for too long hangs, and is killed."""
        asked_at_s = trio.current_time()
        while not answer.is_set():
            with trio.move_on_after(SILENCE_DEADLINE_S):
                await answer.wait()
            silent_s = trio.current_time() - max(asked_at_s, self._answered_at_s)
            if not answer.is_set() and silent_s >= SILENCE_DEADLINE_S:
                log.error("aggregator has not answered for %.0f s: killed", silent_s)
                child.kill()
                await answer.wait()

    async def ask(self, make: Callable[[int], AggregatorCommand]) -> AggregatorEvent:
        """Wait until it runs, ask, and return its answer.

        Args:
            make: makes the command from a request id.

        Raises:
            AggregatorLostError: it ended first.
            AggregatorRefusedError: it answered that it cannot.
        """
        await self._started.wait()
        request_id = next(self._ids)
        answer = self._answers[request_id] = trio.Event()
        try:
            if self._child is None:
                raise AggregatorLostError
            self._child.send(make(request_id))
            await self._wait_for(answer, self._child)
            reply = self._replies.pop(request_id, None)
        finally:
            del self._answers[request_id]
        if reply is None:
            raise AggregatorLostError
        if isinstance(reply, AggregatorFailed):
            raise AggregatorRefusedError(reply.message, hint=reply.hint)
        return reply
