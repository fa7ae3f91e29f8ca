"""The curve of the held-out loss, with its axes.

Runs in: tui.
"""

from __future__ import annotations

import os

from textual.app import RenderResult
from textual.content import Content
from textual.widget import Widget

from tui.widgets.plot import BLOCKS, BRAILLE, DotStyle, Plot, Points, plot
from tui.wording import format_loss

_EMPTY = "No round has been measured yet: the first point comes with the first commit."


class LossChart(Widget):
    """Held-out loss by round; redrawn only when its points or its size change."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._points: Points = ()
        self._style = BLOCKS if os.environ.get("TERM") == "linux" else BRAILLE

    def show(self, points: Points) -> None:
        """Draw `points`: (round, loss), in order of rounds."""
        if points != self._points:
            self._points = points
            self.refresh()

    def render(self) -> RenderResult:
        """Return the whole chart as text."""
        return Content("\n".join(chart_lines(self._points, *self.size, style=self._style)))


def chart_lines(
    points: Points, width: int, height: int, *, style: DotStyle = BRAILLE
) -> tuple[str, ...]:
    """Return `height` lines: the labelled curve and, below it, the rounds.

    Args:
        points: (round, loss).
        width: cells across.
        height: cells down, axis included.
        style: dots of a cell.
    """
    trial = plot(points, 1, 1, style)
    if trial is None or height < 3:
        return (_EMPTY[:width],) if trial is None else ()
    margin = max(len(format_loss(trial.high)), len(format_loss(trial.low)))
    drawn = plot(points, width - margin - 2, height - 1, style)
    if drawn is None:
        return ()
    labels = _labels(drawn, height - 1)
    rows = [f"{label:>{margin}} ┤{line}" for label, line in zip(labels, drawn.lines, strict=True)]
    first, last = f"round {drawn.first}", f"{drawn.last}"
    gap = width - margin - 2 - len(first) - len(last)
    axis = f"{first}{' ' * gap}{last}" if gap > 0 and drawn.last != drawn.first else first
    return (*rows, f"{'':>{margin}}  {axis}")


def _labels(drawn: Plot, num_rows: int) -> list[str]:
    labels = [""] * num_rows
    labels[0], labels[-1] = format_loss(drawn.high), format_loss(drawn.low)
    if num_rows >= 5 and num_rows % 2:
        labels[num_rows // 2] = format_loss((drawn.high + drawn.low) / 2)
    return labels
