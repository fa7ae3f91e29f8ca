"""The first run's question, in front of a dashboard that shows nothing yet.

Runs in: tui. Nothing is started before it is answered; Escape leaves, and starts nothing.
"""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from tui import first_run_text
from volunteer.first_run import Plan, When, when_of

NOTHING_STARTED = (
    "Nothing was started, and nothing contributes.\n"
    "  be asked again: allmende    start without: allmende start    check: allmende doctor"
)
MAX_WIDTH = 110
"""As in app.tcss."""
_FRAME_WIDTH = 6
"""Border, padding, and the scroll bar, whether it is there or not."""
_KEYS = "Enter: go  1/2: when  Esc: leave"


class FirstRunScreen(ModalScreen[When]):
    """Says what would be used, sent and stored, and asks when; answers a When, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,y", "accept", "Start"),
        Binding("1", "choose('idle')", "When nobody uses it"),
        Binding("2", "choose('always')", "Always"),
        Binding("escape,q,n", "leave", "Leave"),
    ]

    def __init__(self, plan: Plan) -> None:
        """Ask about `plan`."""
        super().__init__()
        self._plan = plan
        self._when: When = when_of(plan.config)

    def compose(self) -> ComposeResult:
        """Lay out the widgets."""
        with VerticalScroll(id="first-run") as box:
            box.border_title = first_run_text.TITLE
            box.border_subtitle = _KEYS
            yield Static(id="told", markup=False)
            yield Static(id="choices", markup=False)
            yield Static(id="later", markup=False)

    def on_mount(self) -> None:
        """Let the arrow keys scroll."""
        self.query_one("#first-run").focus()

    def on_resize(self, event: events.Resize) -> None:
        """Fold the words anew."""
        self._draw(event.size.width)

    def _draw(self, screen_width: int) -> None:
        width = min(screen_width, MAX_WIDTH) - _FRAME_WIDTH
        text = {
            "#told": first_run_text.told(self._plan, width),
            "#choices": ["", *first_run_text.choices(self._when, width), ""],
            "#later": first_run_text.later(width),
        }
        for selector, lines in text.items():
            self.query_one(selector, Static).update("\n".join(lines))

    def action_choose(self, when: When) -> None:
        """Choose when it runs; Enter says go."""
        self._when = when
        self._draw(self.size.width)
        self.query_one("#choices").scroll_visible(animate=False)

    def action_accept(self) -> None:
        """Take what is chosen."""
        self.dismiss(self._when)

    def action_leave(self) -> None:
        """Start nothing."""
        self.dismiss(None)
