"""The one screen behind all: title, headline, the chosen tab, keys.

Runs in: tui.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import Screen
from textual.widgets import ContentSwitcher, Footer

from tui import pause_words, view_state
from tui.view_state import Snapshot
from tui.widgets.panes import DashboardPane, PeersPane, StatsPane
from tui.widgets.rows import HeadlineBox, Text
from tui.wording import clean
from volunteer.answers import Status

TABS = ("dashboard", "peers", "stats")
MIN_WIDTH, MIN_HEIGHT = 40, 8
FULL_FOOTER_WIDTH = 60
# Cells: below, the keys stand closer together, so that none is cut off.


class MainScreen(Screen[None]):
    """Shows a Snapshot."""

    # Textual declares both as instance variables, and reads them only.
    HORIZONTAL_BREAKPOINTS: list[tuple[int, str]] | None = [  # noqa: RUF012
        (0, "-unusable-width"),
        (MIN_WIDTH, "-narrow"),
        (76, "-standard"),
        (110, "-wide"),
    ]
    VERTICAL_BREAKPOINTS: list[tuple[int, str]] | None = [  # noqa: RUF012
        (0, "-unusable-height"),
        (MIN_HEIGHT, "-short"),
        (20, "-medium"),
        (32, "-tall"),
    ]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "tab('dashboard')", "Dashboard", show=False),
        Binding("2", "tab('peers')", "Peers", show=False),
        Binding("3", "tab('stats')", "Stats", show=False),
        Binding("tab", "next_tab(1)", "Next tab", show=False),
        Binding("shift+tab", "next_tab(-1)", "Last tab", show=False),
    ]

    def __init__(self, clock: Callable[[], datetime]) -> None:
        """Show nothing yet; `clock` is the wall clock that times are told by."""
        super().__init__()
        self._clock = clock
        self._snapshot = Snapshot()

    def compose(self) -> ComposeResult:
        """Lay out the widgets."""
        yield Text(id="title")
        yield HeadlineBox(id="headline")
        with ContentSwitcher(initial=TABS[0], id="tabs"):
            yield DashboardPane(id="dashboard")
            yield PeersPane(id="peers")
            yield StatsPane(id="stats")
        yield Text(id="too-small")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Show what is known, which may be nothing but that we are connecting."""
        self._draw()

    def show(self, snapshot: Snapshot) -> None:
        """Show `snapshot`."""
        self._snapshot = snapshot
        if self.is_mounted:
            self._draw()

    def on_resize(self, event: events.Resize) -> None:
        """Lay the text out for the new width, once the widgets have theirs."""
        self.query_one(Footer).compact = event.size.width < FULL_FOOTER_WIDTH
        self.call_after_refresh(self._draw)

    def action_tab(self, tab: str) -> None:
        """Show another tab."""
        self.query_one("#tabs", ContentSwitcher).current = tab
        self.query_one(f"#{tab}").focus()
        self.call_after_refresh(self._draw)

    def action_next_tab(self, step: int) -> None:
        """Go to the next tab, or the one before."""
        current = self.query_one("#tabs", ContentSwitcher).current or TABS[0]
        self.action_tab(TABS[(TABS.index(current) + step) % len(TABS)])

    def _draw(self) -> None:
        snapshot, now = self._snapshot, self._clock()
        head = view_state.headline(snapshot)
        is_current = snapshot.is_current and snapshot.status is not None
        now_text = self._now_text(snapshot.status, now) if is_current and snapshot.status else ""
        self.query_one("#headline", HeadlineBox).show(head, now_text)
        needed = f"The window is too small: {MIN_WIDTH} x {MIN_HEIGHT} needed."
        self.query_one("#too-small", Text).set_text(Content(f"{head.mark} {head.title}. {needed}"))
        switcher = self.query_one("#tabs", ContentSwitcher)
        switcher.set_class(not is_current, "-old")
        self.query_one("#title", Text).set_text(self._title(switcher.current or TABS[0], now))
        for pane in self.query("#tabs > *"):
            if pane.id == switcher.current and isinstance(
                pane, DashboardPane | PeersPane | StatsPane
            ):
                pane.show(snapshot, now)

    def _now_text(self, status: Status, now: datetime) -> str:
        start = pause_words.next_start(status, now)
        said = f"Next possible start: {start}." if start else ""
        left_out = clean(status.data_note)
        return " ".join(filter(None, (view_state.activity(status), said, left_out)))

    def _title(self, current: str, now: datetime) -> Content:
        """Return the first line: name, run, tabs, and the age of what is shown."""
        tabs = [
            Content.assemble(
                (f" {number} {tab.capitalize()} ", "reverse" if tab == current else "$text-muted")
            )
            for number, tab in enumerate(TABS, 1)
        ]
        status = self._snapshot.status
        name = clean(status.run_name, limit=20) if status else ""
        width = self.app.size.width - 2
        left = Content.assemble(("Allmende", "bold"), f" {name}" if name and width >= 76 else "")
        right = view_state.as_of(self._snapshot, now)
        middle = Content("").join(tabs)
        if len(left) + len(middle) + len(right) + 4 > width:
            left = Content("")
        gap = max(1, width - len(left) - len(middle) - len(right) - 2)
        return Content.assemble(left, "  " if len(left) else "", middle, " " * gap, right)
