"""`allmende stats`: what this machine has given, and what became of it.

Runs in: the command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tui import arguments
from tui.client import ControlClient
from volunteer.answers import RoundPoint, Stats
from volunteer.errors import ControlError
from volunteer.locations import Locations

HISTORY_LIMIT = 2000
"""Rounds in one reply; about 350 bytes each, so below MAX_LINE_BYTES."""
_WIDTH_CELLS = 120


def stats(
    since_s: Annotated[
        float | None,
        typer.Option(
            "--since",
            metavar="DURATION",
            parser=arguments.duration,
            help="Only this long back, as 7d, in whole days (UTC).",
        ),
    ] = None,
    csv_file: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Also write one row a committed round."),
    ] = None,
    last: arguments.LastContributions = None,
    days: arguments.LastDays = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Say what this machine has given, and what became of it."""
    _verify_one_table(since_s, csv_file, last, days)
    locations = Locations.from_environment(os.environ)
    if last is not None:
        from tui.contributions import show_contributions

        show_contributions(locations, last, as_json=as_json)
        return
    if days is not None:
        from tui.traffic_days import show_days

        show_days(locations, days, as_json=as_json)
        return
    with ControlClient(locations.control_socket) as client:
        wanted = {} if since_s is None else {"since_s": since_s}
        figures = client.request("stats", Stats, wanted)
        if since_s is not None and not figures.since_utc:
            raise ControlError(
                "the agent is older than this program and knows no `--since`",
                hint="`allmende stop`, then `allmende start`",
            )
        if csv_file is not None:
            from tui.round_table import write_rounds

            points = client.request("history", list[RoundPoint], {"limit": HISTORY_LIMIT})
            # Both are UTC in one form, which sorts as the time does.
            write_rounds(csv_file, [p for p in points if p.applied_utc >= figures.since_utc])
    lines = [msgspec.json.encode(figures).decode()] if as_json else _stats_lines(figures)
    sys.stdout.writelines(f"{line}\n" for line in lines)


def _verify_one_table(
    since_s: float | None, csv_file: Path | None, last: int | None, days: int | None
) -> None:
    """Refuse what would be passed over in silence."""
    given = {"--since": since_s, "--csv": csv_file, "--contributions": last, "--days": days}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1 and (last is not None or days is not None):
        raise typer.BadParameter(f"{' and '.join(names)} are different tables: ask for one")


def _stats_lines(figures: Stats) -> Sequence[str]:
    """Return what a person reads."""
    from datetime import datetime

    from tui.view_state import align, stats_rows, traffic_table
    from tui.wording import clean

    now = datetime.now().astimezone()
    lines = [f"{label:<24} {value}" for label, value in stats_rows(figures, now)]
    if figures.since_utc:
        day = clean(figures.since_utc[:10], limit=10)
        lines.insert(0, f"Since {day} (UTC); what is kept here and not sent is all of it.")
    if figures.bytes_by_purpose:
        lines += ["", *align(traffic_table(figures), _WIDTH_CELLS)]
    return lines
