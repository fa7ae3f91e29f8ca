"""A line chart in characters.

Runs in: tui. Pure. Braille cells hold 2 x 4 dots; the Linux console's font has no braille, so there
half blocks (1 x 2 dots) are used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

Points = Sequence[tuple[int, float | None]]
_MAX_Y = 1e12
# No loss is so high; NaN and infinity are not below it either.
_LEVEL_MARGIN = 0.1
# Room above and below a curve that is level, as a fraction of its value.


@dataclass(frozen=True, slots=True)
class DotStyle:
    """How dots become characters."""

    columns: int
    """Dots in a cell, across."""
    rows: int
    """Dots in a cell, down."""
    bits: tuple[tuple[int, ...], ...]
    """bits[row][column] of a cell's mask."""
    characters: str
    """The character of each mask."""


BRAILLE = DotStyle(
    2,
    4,
    ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80)),
    " " + "".join(chr(0x2800 + mask) for mask in range(1, 256)),
)
BLOCKS = DotStyle(1, 2, ((1,), (2,)), " ▀▄█")


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawn chart: `height` lines of the curve, and the text of its axes."""

    lines: tuple[str, ...]
    high: float
    low: float
    """Values at the top and the bottom edge."""
    first: int
    last: int
    """Rounds at the left and the right edge."""


def plot(points: Points, width: int, height: int, style: DotStyle = BRAILLE) -> Plot | None:
    """Draw (x, y) points joined by lines; None where nothing can be drawn.

    Args:
        points: in rising order of x; a y of None, NaN or beyond _MAX_Y is a gap, which the line
            bridges.
        width: cells across.
        height: cells down.
        style: dots of a cell.
    """
    finite = [(x, y) for x, y in points if y is not None and abs(y) <= _MAX_Y]
    if not finite or width < 1 or height < 1:
        return None
    num_columns, num_rows = width * style.columns, height * style.rows
    low, high = _bounds([y for _, y in finite])
    first, last = finite[0][0], finite[-1][0]
    span = max(last - first, 1)
    dots = [
        (
            round((x - first) / span * (num_columns - 1)),
            round((high - y) / (high - low) * (num_rows - 1)),
        )
        for x, y in _thin(finite, num_columns)
    ]
    grid = [[0] * width for _ in range(height)]
    for column, row in _joined(dots):
        bit = style.bits[row % style.rows][column % style.columns]
        grid[row // style.rows][column // style.columns] |= bit
    lines = tuple("".join(style.characters[mask] for mask in masks) for masks in grid)
    return Plot(lines, high, low, first, last)


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high > low:
        return low, high
    margin = _LEVEL_MARGIN * abs(high) or _LEVEL_MARGIN
    return low - margin, high + margin


def _thin(points: Sequence[tuple[int, float]], num_columns: int) -> list[tuple[int, float]]:
    """Keep the lowest and the highest point of each column's worth: peaks stay visible."""
    size = math.ceil(2 * len(points) / max(num_columns, 1))
    if size <= 2:
        return list(points)
    kept: list[tuple[int, float]] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1]), part[0], part[-1]}
        kept += sorted(ends)
    return kept


def _joined(dots: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return every dot of the lines between neighbours."""
    drawn = [dots[0]]
    for (from_x, from_y), (to_x, to_y) in itertools.pairwise(dots):
        num_steps = max(abs(to_x - from_x), abs(to_y - from_y), 1)
        drawn += [
            (
                from_x + round((to_x - from_x) * step / num_steps),
                from_y + round((to_y - from_y) * step / num_steps),
            )
            for step in range(1, num_steps + 1)
        ]
    return drawn
