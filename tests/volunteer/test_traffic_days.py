"""Bytes by purpose and day, and of a month, as the ledger keeps them over restarts."""

from __future__ import annotations

from pathlib import Path

from volunteer.answers import DayTraffic
from volunteer.stats.ledger import Ledger


def test_each_day_and_month_has_its_own_bytes(tmp_path: Path) -> None:
    file, day = tmp_path / "stats.sqlite", ["2026-10-31T23:59:59Z"]
    ledger = Ledger(file, utc_now=lambda: day[0])
    ledger.add_bytes("states", 1, 10)
    day[0] = "2026-11-29T08:00:00Z"
    ledger.add_bytes("states", 2, 20)
    ledger.add_bytes("sync", 3, 30)
    ledger.close()
    ledger = Ledger(file, utc_now=lambda: day[0])
    day[0] = "2026-11-30T00:00:00Z"
    ledger.add_bytes("sync", 4, 40)
    ledger.add_bytes("sync", -1, 0)  # what was on its way

    assert ledger.bytes_in_month("2026-10") == 11
    assert ledger.bytes_in_month("2026-11") == 22 + 33 + 43
    assert ledger.bytes_in_month("2026-1") == 0
    today = DayTraffic(day_utc="2026-11-30", bytes_by_purpose={"sync": {"sent": 3, "received": 40}})
    yesterday = DayTraffic(
        day_utc="2026-11-29",
        bytes_by_purpose={
            "states": {"sent": 2, "received": 20},
            "sync": {"sent": 3, "received": 30},
        },
    )
    assert ledger.bytes_by_day(1) == (today,)
    assert ledger.bytes_by_day(2) == (today, yesterday)
    assert [each.day_utc for each in ledger.bytes_by_day(31)] == [
        *("2026-11-30", "2026-11-29", "2026-10-31")
    ]
    ledger.close()
