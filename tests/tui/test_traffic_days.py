"""`allmende stats --days N`, as a table."""

from __future__ import annotations

from tui.traffic_days import day_table
from volunteer.answers import DayTraffic


def test_each_day_begins_with_its_sum() -> None:
    days = [
        DayTraffic(
            day_utc="2026-11-30",
            bytes_by_purpose={
                "states": {"sent": 2_000_000, "received": 20_000_000},
                "contributions": {"sent": 500_000, "received": 0},
            },
        ),
        DayTraffic(day_utc="2026-11-29", bytes_by_purpose={"sync": {"sent": 3000, "received": 1}}),
    ]
    assert day_table(days) == (
        ("Day (UTC)", "Traffic", "Sent", "Received"),
        ("2026-11-30", "all", "2.50 MB", "20.0 MB"),
        ("", "contributions", "500 kB", "0 B"),
        ("", "states", "2.00 MB", "20.0 MB"),
        ("2026-11-29", "all", "3.00 kB", "1 B"),
        ("", "sync", "3.00 kB", "1 B"),
    )
