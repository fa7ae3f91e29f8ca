"""Short forms for the ledger's tests."""

from __future__ import annotations

from volunteer.stats.ledger import Ledger
from volunteer.stats.records import Balance

RUN, MODULE = "a" * 64, "dense"


def contribute(
    ledger: Ledger, contribution_id: str, new_tokens: int, carried: dict[str, int] | None = None
) -> None:
    carried = carried or {}
    ledger.record_contribution(
        run_id=RUN,
        module_id=MODULE,
        contribution_id=contribution_id,
        round_index=7,
        tokens=new_tokens + sum(carried.values()),
        new_tokens=new_tokens,
        carries=tuple(carried),
    )


def balance(**places: int) -> Balance:
    names = ("not_contributed", "pending", "in_flight", "confirmed", "refused", "dropped")
    assert set(places) <= set(names)
    return Balance(done=sum(places.values()), **{name: places.get(name, 0) for name in names})
