"""`allmende stats --contributions N`: what became of each of the last contributions.

Runs in: the command line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from tui.client import DEADLINE_S, ControlClient
from tui.view_state import align
from tui.wording import clean, format_tokens, short_id
from volunteer.answers import ContributionPoint
from volunteer.locations import Locations

_WIDTH = 160
_STATES = {
    "in_flight": "sent, not final yet",
    "pending": "kept here, to be sent again",
    "confirmed": "confirmed",
    "refused": "refused",
    "dropped": "dropped",
}


def show_contributions(locations: Locations, last: int, *, as_json: bool) -> None:
    """Print the last contributions, the oldest first."""
    with ControlClient(locations.control_socket, deadline_s=DEADLINE_S) as client:
        points = client.request("contributions", list[ContributionPoint], {"limit": last})
    if as_json:
        sys.stdout.write(msgspec.json.encode(points).decode() + "\n")
    elif not points:
        sys.stdout.write("Nothing has been contributed to this run yet.\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in align(contribution_table(points), _WIDTH))


def contribution_table(points: Sequence[ContributionPoint]) -> tuple[tuple[str, ...], ...]:
    """Return rows of cells, the first one being the headings."""
    rows = [
        (
            short_id(point.contribution_id),
            str(point.round_index),
            format_tokens(point.new_tokens),
            _STATES.get(point.outcome, clean(point.outcome, limit=24)),
            how_it_came(point),
        )
        for point in points
    ]
    return (("Contribution", "Made in round", "New work", "What became of it", "How"), *rows)


def how_it_came(point: ContributionPoint) -> str:
    """Say where the work of a contribution is listed, what carries it, or why it was given up."""
    parts = []
    if point.listed_in_round is not None:
        parts.append(f"listed in round {point.listed_in_round}")
    if point.carried_by and point.state != point.outcome:
        parts.append(f"carried by {short_id(point.carried_by[-1])}")
    if point.reason:
        parts.append(clean(point.reason, limit=100))
    return "; ".join(parts)
