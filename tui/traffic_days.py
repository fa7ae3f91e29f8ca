"""What the network has carried: of each day, by purpose, and of the month.

Runs in: the command line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from tui.client import ControlClient
from tui.view_state import align
from tui.wording import clean, format_bytes
from volunteer.answers import DayTraffic
from volunteer.locations import Locations

WIDTH_CELLS = 120


def show_days(locations: Locations, days: int, *, as_json: bool) -> None:
    """Print the bytes of the last `days` days.

    Raises:
        ControlError: no agent, or it refuses.
    """
    with ControlClient(locations.control_socket) as client:
        found = client.request("traffic", list[DayTraffic], {"days": days})
    if as_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        return
    lines = align(day_table(found), WIDTH_CELLS) if found else (f"Nothing in {days} days.",)
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def day_table(days: Sequence[DayTraffic]) -> tuple[tuple[str, ...], ...]:
    """Return rows of (day, purpose, sent, received), the first one being the headings.

    Each day begins with the sum of its purposes.
    """
    rows: list[tuple[str, ...]] = [("Day (UTC)", "Traffic", "Sent", "Received")]
    for day in days:
        counts = sorted(day.bytes_by_purpose.items())
        total = {
            side: sum(each.get(side, 0) for _, each in counts) for side in ("sent", "received")
        }
        for number, (purpose, each) in enumerate([("all", total), *counts]):
            first = clean(day.day_utc, limit=10) if number == 0 else ""
            sides = (format_bytes(each.get(side, 0)) for side in ("sent", "received"))
            rows.append((first, clean(purpose, limit=24), *sides))
    return tuple(rows)
