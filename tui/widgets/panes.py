"""The three tabs' contents.

Runs in: tui. Each shows a Snapshot; only the visible one is brought up to date.
"""

from __future__ import annotations

from datetime import datetime

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content

from tui import view_state
from tui.peers_answer import protocol_note
from tui.view_state import Snapshot
from tui.widgets.loss_chart import LossChart
from tui.widgets.rows import Lines, RoundBar, Rows, Text
from tui.wording import NOT_YET, clean

_PEERS_SHOWN = 6
_BRIEF_BELOW = 60
# Cells: below, the long form of the totals would wrap.


class DashboardPane(Vertical):
    """Round, curve, figures, the first peers."""

    def compose(self) -> ComposeResult:
        """Lay out the widgets."""
        yield RoundBar(id="round")
        yield LossChart(id="loss")
        with Vertical(id="figures"):
            with Vertical(id="own"):
                yield Rows(id="totals")
                yield Rows(id="speed")
            yield Lines(id="some-peers")

    def show(self, snapshot: Snapshot, now: datetime) -> None:
        """Show `snapshot`."""
        status = snapshot.status
        progress = None if status is None else view_state.round_progress(status)
        self.query_one(RoundBar).show(progress)
        chart = self.query_one(LossChart)
        chart.border_title = "Held-out loss, nats per byte (lower is better)"
        if snapshot.history is not None:
            chart.show(view_state.loss_points(snapshot.history))
        rows = () if status is None else view_state.speed_rows(status)
        self.query_one("#speed", Rows).show(rows)
        totals = view_state.total_rows(snapshot, now, is_brief=self.size.width < _BRIEF_BELOW)
        self.query_one("#totals", Rows).show(totals)
        self.query_one("#some-peers", Lines).show(self._peer_lines(snapshot))

    def _peer_lines(self, snapshot: Snapshot) -> tuple[str, ...]:
        lines = peer_lines(snapshot, max(20, self.query_one("#some-peers").size.width))
        if len(lines) - 1 > _PEERS_SHOWN:
            num_hidden = len(lines) - _PEERS_SHOWN
            return (*lines[:_PEERS_SHOWN], f"and {num_hidden} more: press 2")
        return lines


class PeersPane(VerticalScroll):
    """All peers."""

    def compose(self) -> ComposeResult:
        """Lay out the widgets."""
        yield Text(id="protocol-note")
        yield Lines(id="all-peers")

    def show(self, snapshot: Snapshot, now: datetime) -> None:
        """Show `snapshot`."""
        del now
        # Without any peer, the lines below say it.
        note = protocol_note(snapshot.status) if snapshot.peers and snapshot.status else ""
        words = self.query_one("#protocol-note", Text)
        words.display = bool(note)
        words.set_text(Content(f"{note}\n"))
        self.query_one(Lines).show(peer_lines(snapshot, max(20, self.size.width - 2)))


class StatsPane(VerticalScroll):
    """Everything this machine has given and sent."""

    def compose(self) -> ComposeResult:
        """Lay out the widgets."""
        yield Rows(id="gift")
        yield Lines(id="traffic")

    def show(self, snapshot: Snapshot, now: datetime) -> None:
        """Show `snapshot`."""
        stats = snapshot.stats
        if stats is None:
            self.query_one(Lines).show((clean(snapshot.problem) or NOT_YET,))
            return
        self.query_one(Rows).show(view_state.stats_rows(stats, now), label_width=24)
        table = view_state.traffic_table(stats)
        lines = view_state.align(table, max(20, self.size.width - 2)) if len(table) > 1 else ()
        self.query_one(Lines).show(lines)


def peer_lines(snapshot: Snapshot, width: int) -> tuple[str, ...]:
    """Return the table of peers, or why there is none."""
    if snapshot.peers is None:
        return (f"Peers: {clean(snapshot.problem) or NOT_YET}",)
    if not snapshot.peers and snapshot.status is not None and snapshot.status.differing_peers:
        return (protocol_note(snapshot.status),)
    if not snapshot.peers:
        return ("No peers yet: a swarm of one, whose work counts all the same.",)
    own_state = snapshot.status.state_hash if snapshot.status else ""
    return view_state.align(view_state.peer_table(snapshot.peers, own_state=own_state), width)
