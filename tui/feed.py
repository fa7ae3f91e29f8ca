"""What keeps the view's snapshot true: one connection that watches, one that asks.

Runs in: tui. No timers while the agent talks: every second it sends a status, and each one drives
what else is asked. Only a silence and the way back to an agent that has gone are timed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shlex
import threading
from collections.abc import Callable
from datetime import datetime

from tui import launch
from tui.client import CHANGE_DEADLINE_S, AsyncControlClient
from tui.view_state import Link, Snapshot
from volunteer.answers import PeerStatus, RoundPoint, Stats, Status
from volunteer.errors import ControlError, NoAgentError, VolunteerError
from volunteer.locations import Locations

SILENT_AFTER_S = 2.5
# A status comes every second; that the agent has gone must be said within 3 s.
RETRY_EVERY_S = 2.0
PEERS_EVERY = 3
STATS_EVERY = 10
# In statuses, so about seconds.
HISTORY_LIMIT = 1000
# More rounds than any terminal has dots across.

OnChange = Callable[[Snapshot, bool], None]
"""Called with the new snapshot, and whether it is urgent (shown at once, not with the next)."""


class AgentFeed:
    """Follows one agent, through its absences."""

    def __init__(
        self,
        locations: Locations,
        on_change: OnChange,
        *,
        clock: Callable[[], datetime],
        silent_after_s: float = SILENT_AFTER_S,
        retry_every_s: float = RETRY_EVERY_S,
        request_deadline_s: float = 5.0,
    ) -> None:
        """Connect to nothing yet.

        Args:
            locations: where the agent's socket is.
            on_change: told of every new snapshot, on the event loop.
            clock: wall clock with a time zone, for the as-of times.
            silent_after_s: without a status for so long, the agent counts as silent.
            retry_every_s: between attempts to reach an agent that is not there.
            request_deadline_s: for the answer to one request.
        """
        self._locations = locations
        self._on_change = on_change
        self._clock = clock
        self._retry_every_s = retry_every_s
        self._watcher = AsyncControlClient(locations.control_socket, deadline_s=silent_after_s)
        self._asker = AsyncControlClient(locations.control_socket, deadline_s=request_deadline_s)
        self._asking = asyncio.Lock()
        self._wake = asyncio.Event()
        self._is_visible = True
        self._num_statuses = 0
        self._flags_of_pid = 0
        self._is_history_due = True
        self._cancelled = threading.Event()
        self.snapshot = Snapshot()

    async def run(self, *, start_if_none: bool) -> None:
        """Follow the agent until cancelled.

        Args:
            start_if_none: start one now if none runs.

        Cancellation: connections are closed; an agent that is being started goes on.
        """
        try:
            if start_if_none:
                await self._start_if_none()
            while True:
                await self._follow_once()
                await self._wait_retry()
        finally:
            self._cancelled.set()
            self._watcher.close()
            self._asker.close()

    def set_visible(self, is_visible: bool) -> None:
        """Stop asking and retrying while nobody looks; go on when somebody does."""
        self._is_visible = is_visible
        if is_visible:
            self._wake.set()

    async def request(self, verb: str, args: dict[str, float] | None = None) -> None:
        """Send a command, and show what it did.

        It has a connection of its own: the owner's word does not wait for an answer to a table.

        Raises:
            ControlError: refused, too late, or no agent.
        """
        with contextlib.closing(self._make_client()) as client:
            await client.request(verb, object, args)
            status = await client.request("status", Status)
        self._take_status(status, is_urgent=True)

    def _make_client(self) -> AsyncControlClient:
        return AsyncControlClient(self._locations.control_socket, deadline_s=CHANGE_DEADLINE_S)

    async def stop_agent(self, deadline_s: float) -> None:
        """Stop the agent and wait until it has ended.

        Raises:
            ControlError: refused, or not ended within `deadline_s`.
        """
        with contextlib.closing(self._make_client()) as client:
            await client.request("stop", object, any_version=True)
            try:
                async with asyncio.timeout(deadline_s):
                    await client.wait_closed()
            except TimeoutError as error:
                raise ControlError("the agent is still ending; it saves its work first") from error

    async def start_agent(self) -> None:
        """Start an agent in the background, as it ran before, and follow it when it answers."""
        if self._is_starting():
            return
        flags = self.snapshot.flags
        note = "It runs in the background, also after this view is closed."
        if flags:
            note += f" Its flags are those that it ran with: {shlex.join(flags)}"
        self._change(is_urgent=True, link=Link.STARTING, note=note)
        try:
            await asyncio.to_thread(self._launch, flags)
        except (VolunteerError, OSError) as error:
            first, *log_tail = str(error).splitlines()
            note = " ".join([first, *log_tail[-1:]])
            self._change(is_urgent=True, link=Link.GONE, note=note)
            return
        if self._is_starting():
            self._change(is_urgent=False, link=Link.CONNECTING, note="", hint="")
        self._wake.set()

    def _launch(self, flags: tuple[str, ...]) -> None:
        if not flags:
            launch.verify_wishes(self._locations, launch.AgentOptions())
        launch.start_agent(self._locations, flags, cancelled=self._cancelled)

    def _is_starting(self) -> bool:
        return self.snapshot.link is Link.STARTING

    async def _start_if_none(self) -> None:
        try:
            status = await self._asker.request("status", Status)
        except NoAgentError:
            await self.start_agent()
        except ControlError as error:
            if isinstance(error.__cause__, TimeoutError):
                self._say_silent()
                return
            self._change(is_urgent=True, link=Link.FAULTY, note=str(error), hint=error.hint)
        else:
            self._take_status(status, is_urgent=True)

    async def _follow_once(self) -> None:
        """Watch until the agent goes or is not understood."""
        refresher: asyncio.Task[None] | None = None
        try:
            async with contextlib.aclosing(self._watcher.watch(Status)) as statuses:
                async for status in statuses:
                    if status is None:
                        self._say_silent()
                        continue
                    self._take_status(status, is_urgent=not self.snapshot.is_current)
                    self._num_statuses += 1
                    if self._is_visible and (refresher is None or refresher.done()):
                        refresher = asyncio.create_task(self._refresh())
        except NoAgentError as error:
            self._say_gone(error)
        except ControlError as error:
            self._change(is_urgent=True, link=Link.FAULTY, note=str(error), hint=error.hint)
        finally:
            if refresher is not None:
                refresher.cancel()
                await asyncio.wait([refresher])

    def _say_silent(self) -> None:
        since = self.snapshot.status_at
        note = f"No status since {since:%H:%M:%S}." if since else "It has not said anything yet."
        self._change(is_urgent=True, link=Link.SILENT, note=self._restart_note() or note)

    def _restart_note(self) -> str:
        """Return what an agent that begins anew has said last; empty for any other."""
        status = self.snapshot.status
        return f"{status.reason} It is on its way." if status and status.is_restarting else ""

    def _say_gone(self, error: NoAgentError) -> None:
        # What went wrong at the start stays on the screen until a start succeeds.
        if self.snapshot.link is Link.STARTING:
            return
        if self.snapshot.link is Link.GONE and self.snapshot.note:
            return
        if self.snapshot.is_current and (restart_note := self._restart_note()):
            self._change(is_urgent=True, link=Link.SILENT, note=restart_note)
            return
        was_known = self.snapshot.status is not None
        note = "The agent has gone: this machine does not contribute." if was_known else ""
        if isinstance(error.__cause__, PermissionError):
            note = str(error)
        self._change(is_urgent=True, link=Link.GONE, note=note)

    def _take_status(self, status: Status, *, is_urgent: bool) -> None:
        last = self.snapshot.status
        if last is None or (last.tip, last.held_out_loss) != (status.tip, status.held_out_loss):
            self._is_history_due = True
        self._change(
            is_urgent=is_urgent or (last is not None and last.state != status.state),
            link=Link.LIVE,
            note="",
            hint="",
            status=status,
            status_at=self._clock(),
        )

    async def _refresh(self) -> None:
        """Bring the tables up to date, as far as they are due."""
        is_first = self.snapshot.stats is None
        await self._learn_flags()
        try:
            async with self._asking:
                if self._is_history_due:
                    self._is_history_due = False
                    args = {"limit": HISTORY_LIMIT}
                    history = await self._asker.request("history", tuple[RoundPoint, ...], args)
                    self._change(is_urgent=False, history=history)
                if is_first or self._num_statuses % PEERS_EVERY == 0:
                    peers = await self._asker.request("peers", tuple[PeerStatus, ...])
                    self._change(is_urgent=False, peers=peers)
                if is_first or self._num_statuses % STATS_EVERY == 0:
                    self._change(
                        is_urgent=is_first, stats=await self._asker.request("stats", Stats)
                    )
            self._change(is_urgent=False, problem="")
        except NoAgentError:
            return
        except ControlError as error:
            self._is_history_due = True
            self._change(is_urgent=False, problem=str(error))

    async def _learn_flags(self) -> None:
        """Note with which flags the agent runs, as long as it does: so it can be started again."""
        agent_pid = self.snapshot.status.agent_pid if self.snapshot.status else 0
        if agent_pid != self._flags_of_pid:
            flags = await asyncio.to_thread(launch.running_options, agent_pid)
            self._flags_of_pid = agent_pid
            self._change(is_urgent=False, flags=flags or ())

    async def _wait_retry(self) -> None:
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._retry_every_s if self._is_visible else None):
                await self._wake.wait()

    def _change(self, *, is_urgent: bool, **changes: object) -> None:
        snapshot = dataclasses.replace(self.snapshot, **changes)  # type: ignore[arg-type]
        if snapshot != self.snapshot:
            self.snapshot = snapshot
            self._on_change(snapshot, is_urgent)
