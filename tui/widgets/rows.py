"""Small text widgets: label-value rows, the headline, the round's bar.

Runs in: tui. They take the words of tui.view_state and only lay them out.
"""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.widgets import Static

from tui.view_state import Headline, RoundProgress, Row

_FULL, _EMPTY = "━", "─"
_COLOURS = {
    "good": "$text-success",
    "rest": "$text-warning",
    "busy": "$text-primary",
    "bad": "$text-error",
}


class Text(Static):
    """Text that may have come from a peer, so no markup; drawn again only when it changes."""

    def __init__(self, *, id: str) -> None:
        """Show nothing yet."""
        super().__init__(id=id, markup=False)
        self._shown: Content | None = None

    @property
    def text(self) -> str:
        """What is shown, without its styles."""
        return self._shown.plain if self._shown is not None else ""

    def set_text(self, text: Content) -> None:
        """Show `text`."""
        # Content equality leaves out the styles.
        if self._shown is None or not self._shown.is_same(text):
            self._shown = text
            self.update(text)


class Rows(Text):
    """Labels and values in two columns."""

    def show(self, rows: Sequence[Row], *, label_width: int = 15) -> None:
        """Show `rows`, labels dimmed."""
        lines = [
            Content.assemble((f"{label:<{label_width}}", "$text-muted"), value)
            for label, value in rows
        ]
        self.set_text(Content("\n").join(lines))


class Lines(Text):
    """Plain lines, the first one dimmed as a heading."""

    def show(self, lines: Sequence[str]) -> None:
        """Show `lines`."""
        if not lines:
            self.set_text(Content(""))
            return
        head, *rest = lines
        body = Content("\n" + "\n".join(rest)) if rest else Content("")
        self.set_text(Content.assemble((head, "$text-muted"), body))


class HeadlineBox(Text):
    """State, the one reason, what ends it, and what happens now."""

    def show(self, head: Headline, now_text: str) -> None:
        """Show `head`, and `now_text` below it."""
        first = Content.assemble((f"{head.mark} {head.title}", f"bold {_COLOURS[head.level]}"))
        lines = [first, *(Content(text) for text in (head.reason, head.ends, now_text) if text)]
        self.set_text(Content("\n").join(lines))


class RoundBar(Text):
    """How far the round is, drawn without any animation."""

    def show(self, progress: RoundProgress | None) -> None:
        """Show `progress`; nothing before it is known."""
        if progress is None:
            self.set_text(Content(""))
            return
        # Two blanks on each side of the bar.
        room = self.size.width - len(progress.label) - len(progress.text) - 4
        if progress.fraction is None or room < 4:
            self.set_text(Content(f"{progress.label}  {progress.text}"))
            return
        num_full = round(room * progress.fraction)
        self.set_text(
            Content.assemble(
                f"{progress.label}  ",
                (_FULL * num_full, "$primary"),
                (_EMPTY * (room - num_full), "$text-muted"),
                f"  {progress.text}",
            )
        )
