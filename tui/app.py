"""The live view.

Runs in: tui. It shows what tui.feed learns, at most once a second, and sends the owner's commands.
Closing it changes nothing for the agent, and it says so.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import ClassVar

from textual import events, work
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen

from tui import launch, pause_words, view_state
from tui.feed import AgentFeed
from tui.screens.dialogs import PAUSES, HelpDialog, PauseDialog, StopDialog
from tui.screens.first_run import NOTHING_STARTED, FirstRunScreen
from tui.screens.main import MainScreen
from tui.view_state import Link, Snapshot
from tui.wording import clean
from volunteer.errors import ConfigError, ControlError
from volunteer.first_run import Plan, has_answered, keep_answers, make_plan
from volunteer.locations import Locations

DRAW_EVERY_S = 0.9
# The agent's statuses come every second, give or take the scheduling.
DRAW_UNFOCUSED_EVERY_S = 10.0
# Nobody looks closely; what is drawn still does not become wrong.
STOP_DEADLINE_S = 60.0
_CHANGING_ACTIONS = ("start_agent", "stop_agent", "pause", "resume")
_STOPPED = "The agent has stopped; its work is saved. `allmende start` starts it again."


def local_now() -> datetime:
    """Return the wall-clock time with the local time zone."""
    return datetime.now().astimezone()


class AllmendeApp(App[None]):
    """Dashboard, peers and stats of one agent."""

    TITLE = "Allmende"
    CSS_PATH = "app.tcss"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause", "Pause"),
        Binding("p", "resume", "Resume"),
        Binding("f,z", "pause", "Finish or snooze", show=False),
        Binding("s", "start_agent", "Start"),
        Binding("q", "close_view", "Close view"),
        Binding("Q", "stop_agent", "Stop"),
        Binding("question_mark,f1", "help", "Help", key_display="?"),
        Binding("ctrl+q,ctrl+c", "close_view", "Close view", show=False, priority=True),
    ]

    def __init__(
        self,
        locations: Locations,
        *,
        start_if_none: bool = True,
        plan: Plan | None = None,
        clock: Callable[[], datetime] = local_now,
        make_feed: type[AgentFeed] | Callable[..., AgentFeed] = AgentFeed,
    ) -> None:
        """Show nothing yet.

        Args:
            locations: where the agent's socket is.
            start_if_none: start an agent if none runs.
            plan: what to ask about before anything is started; None: it was answered.
            clock: wall clock with a time zone.
            make_feed: called as AgentFeed is.
        """
        super().__init__()
        self.animation_level = "none"
        self._locations = locations
        self._plan = plan
        self._clock = clock
        self._start_if_none = start_if_none
        self._main = MainScreen(clock)
        self._feed = make_feed(locations, self._on_change, clock=clock)
        self._drawn_at = float("-inf")
        self._offered: tuple[bool | None, ...] = ()
        self._draw_every_s = DRAW_EVERY_S

    def on_mount(self) -> None:
        """Begin to follow the agent."""
        self.push_screen(self._main)
        if self._plan is None:
            self._follow()
        else:
            self._ask_first(self._plan)

    def _follow(self) -> None:
        self.run_worker(self._feed.run(start_if_none=self._start_if_none), exit_on_error=True)

    @work(exclusive=True, group="first run")
    async def _ask_first(self, plan: Plan) -> None:
        """Start nothing before the owner agrees."""
        when = await self.push_screen_wait(FirstRunScreen(plan))
        if when is None:
            self.exit(message=NOTHING_STARTED)
            return
        try:
            keep_answers(self._locations, when)
        except ConfigError as error:
            self.exit(return_code=error.exit_code, message=f"{error}\n  hint: {error.hint}")
            return
        self._plan = None
        self._follow()

    def on_app_focus(self, event: events.AppFocus) -> None:
        """Go on at full pace: somebody looks."""
        del event
        self._draw_every_s = DRAW_EVERY_S
        self._feed.set_visible(True)
        self._draw(self._feed.snapshot)

    def on_app_blur(self, event: events.AppBlur) -> None:
        """Ask for nothing and draw rarely while the terminal is not the focused window."""
        del event
        self._draw_every_s = DRAW_UNFOCUSED_EVERY_S
        self._feed.set_visible(False)

    def _on_change(self, snapshot: Snapshot, is_urgent: bool) -> None:
        if is_urgent or time.monotonic() - self._drawn_at >= self._draw_every_s:
            self._draw(snapshot)

    def _draw(self, snapshot: Snapshot) -> None:
        self._drawn_at = time.monotonic()
        self._main.show(snapshot)
        offered = tuple(self.check_action(action, ()) for action in _CHANGING_ACTIONS)
        if offered != self._offered:
            self._offered = offered
            self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer only what can be done now."""
        del parameters
        snapshot = self._feed.snapshot
        is_there = snapshot.link in (Link.LIVE, Link.SILENT)
        is_paused = snapshot.status is not None and snapshot.status.state == "paused"
        offered = {
            "start_agent": snapshot.link is Link.GONE,
            "stop_agent": is_there or snapshot.link is Link.FAULTY,
            # Also before the first status: the owner's word does not wait for an answer.
            "pause": (is_there or snapshot.link is Link.CONNECTING) and not is_paused,
            "resume": is_there and is_paused,
        }
        if self._plan is not None:
            return action not in _CHANGING_ACTIONS  # not before the owner has agreed
        return offered.get(action, True)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Offer in the palette what can be done now; nothing there stops the agent by accident."""
        del screen
        commands = (
            ("Pause", "Free the device; says first what that costs", "pause"),
            ("Resume", "End the pause", "resume"),
            ("Start the agent", "It runs in the background", "start_agent"),
            ("Stop the agent", "This machine stops contributing; asks first", "stop_agent"),
            ("Close the view", "The agent goes on in the background", "close_view"),
            ("Help", "Keys and words", "help"),
            ("Theme", "Change the colours", "change_theme"),
        )
        for title, text, action in commands:
            if self.check_action(action, ()):
                yield SystemCommand(title, text, getattr(self, f"action_{action}"))

    def action_help(self) -> None:
        """Explain keys and words."""
        self.push_screen(HelpDialog())

    def action_close_view(self) -> None:
        """Close the view only, and say what goes on."""
        if self._plan is not None:
            self.exit(message=NOTHING_STARTED)
            return
        self.exit(message=view_state.closing_note(self._feed.snapshot))

    @work(exclusive=True, group="command")
    async def action_resume(self) -> None:
        """Resume at once."""
        await self._command("resume", {})

    @work(exclusive=True, group="command")
    async def action_pause(self) -> None:
        """Say what a pause costs, then pause."""
        answer = await self.push_screen_wait(PauseDialog(self._feed.snapshot.status))
        if answer is not None:
            await self._command(*PAUSES[answer])

    @work(exclusive=True, group="command")
    async def action_stop_agent(self) -> None:
        """Ask once, stop the agent, close the view."""
        answer = await self.push_screen_wait(StopDialog(self._feed.snapshot.status))
        if answer is None:
            return
        status = self._feed.snapshot.status
        # Where nothing is trained there is no round to finish.
        if answer == "finish" and (status is None or pause_words.is_training(status)):
            self.notify("The agent ends when this round has closed.", title="Finishing")
            await self._command("stop", {"finish": True})
            return
        self.notify("The agent saves its work and ends.", title="Stopping")
        try:
            await self._feed.stop_agent(STOP_DEADLINE_S)
        except ControlError as error:
            self._say(error)
            return
        self.exit(message=_STOPPED)

    @work(exclusive=True, group="command")
    async def action_start_agent(self) -> None:
        """Start the agent again."""
        await self._feed.start_agent()

    async def _command(self, verb: str, args: dict[str, float]) -> None:
        try:
            await self._feed.request(verb, args)
        except ControlError as error:
            self._say(error)

    def _say(self, error: ControlError) -> None:
        text = clean(f"{error}. {error.hint}" if error.hint else str(error))
        self.notify(text, title="Not done", severity="error", markup=False)


def run_app(locations: Locations) -> None:
    """Run the view in this terminal until it is closed.

    Raises:
        ConfigError: the settings are not valid, and nothing may be started by them.
    """
    is_asked = has_answered(locations) or launch.is_agent_there(locations)
    app = AllmendeApp(locations, plan=None if is_asked else make_plan(locations))
    app.run()
    if app.return_code:
        sys.exit(app.return_code)
