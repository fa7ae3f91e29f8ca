"""Small text widgets: label-value rows, the headline, the round's bar.

Runs in: tui. They take the words of tui.view_state and only lay them out. None parses markup: what
they show may come from a peer.
"""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.widgets import Static

from tui.view_state import Headline, RoundProgress, Row

_FULL, _EMPTY = "━", "─"


class Rows(Static):
    """Labels and values in two columns."""

    def show(self, rows: Sequence[Row], *, label_width: int = 15) -> None:
        """Show `rows`, labels dimmed."""
        lines = [
            Content.assemble((f"{label:<{label_width}}", "$text-muted"), value)
            for label, value in rows
        ]
        self.update(Content("\n").join(lines))


class Lines(Static):
    """Plain lines, the first one dimmed as a heading."""

    def show(self, lines: Sequence[str]) -> None:
        """Show `lines`."""
        if not lines:
            self.update(Content(""))
            return
        head, *rest = lines
        body = Content("\n" + "\n".join(rest)) if rest else Content("")
        self.update(Content.assemble((head, "$text-muted"), body))


class HeadlineBox(Static):
    """State, the one reason, what ends it, and what happens now."""

    def show(self, head: Headline, now_text: str) -> None:
        """Show `head`, and `now_text` below it."""
        first = Content.assemble((f"{head.mark} {head.title}", "bold"))
        lines = [first, *(Content(text) for text in (head.reason, _ends(head), now_text) if text)]
        self.update(Content("\n").join(lines))
        self.set_classes(f"-{head.level}")


def _ends(head: Headline) -> str:
    return f"Until: {head.ends}" if head.ends else ""


class RoundBar(Static):
    """How far the round is, drawn without any animation."""

    def show(self, progress: RoundProgress | None) -> None:
        """Show `progress`; nothing before it is known."""
        if progress is None:
            self.update(Content(""))
            return
        # Two blanks on each side of the bar.
        room = self.size.width - len(progress.label) - len(progress.text) - 4
        if progress.fraction is None or room < 4:
            self.update(Content(f"{progress.label}  {progress.text}"))
            return
        num_full = round(room * progress.fraction)
        self.update(
            Content.assemble(
                f"{progress.label}  ",
                (_FULL * num_full, "$primary"),
                (_EMPTY * (room - num_full), "$text-muted"),
                f"  {progress.text}",
            )
        )
