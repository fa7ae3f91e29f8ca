"""What the flags' values must be; a bad one is bad usage, said by typer with the flag's name.

Runs in: the command line. Pure.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tui.durations import parse_duration
from volunteer.messages import MAX_TEMPERATURE

MIN_DEMO_MINUTES, MAX_DEMO_MINUTES = 1.0, 24 * 60.0
MIN_ROUND_S, MAX_ROUND_S = 1.0, 86400.0
# As in volunteer.run; checked by a test.

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]

LastContributions = Annotated[
    int | None,
    typer.Option("--contributions", metavar="N", min=1, max=1000, help="Only the last N."),
]

LastDays = Annotated[
    int | None,
    typer.Option("--days", metavar="N", min=1, max=3660, help="Bytes of each of the last N days."),
]


def duration(text: str | float) -> float:
    """Return the seconds that `text` names; typer also passes values that are parsed already."""
    if isinstance(text, float):
        return text
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def round_length(value: float | None) -> float | None:
    """Return a round's length in seconds, if the RunSpec of a run of one's own could have it."""
    if value is not None and not MIN_ROUND_S <= value <= MAX_ROUND_S:
        raise typer.BadParameter(f"{value:g} is not from {MIN_ROUND_S:g} to {MAX_ROUND_S:g} s")
    return value


def minutes(value: float) -> float:
    """Return how long a demo trains, in minutes, if that is enough to judge it by."""
    if not MIN_DEMO_MINUTES <= value <= MAX_DEMO_MINUTES:
        raise typer.BadParameter(
            f"{value:g} is not from {MIN_DEMO_MINUTES:g} to {MAX_DEMO_MINUTES:g};"
            " in less than a minute too few rounds end to show anything"
        )
    return value


def temperature(value: float) -> float:
    """Return a sampling temperature."""
    if not 0.0 <= value <= MAX_TEMPERATURE:
        raise typer.BadParameter(f"{value} is not from 0 to {MAX_TEMPERATURE:g}")
    return value
