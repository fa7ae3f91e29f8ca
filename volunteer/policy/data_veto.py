"""The row of the month's data budget, and what is kept back for the farewell.

Runs in: agent. Stage 1 of the map. Pure.
"""

from __future__ import annotations

from volunteer.policy.veto import Cause, Veto, at_once, gb

MAX_SPARE_BYTES = 1024 * 1024
SPARE_FRACTION = 0.05
"""Of a budget so small that a whole MiB would be much of it (`spare_bytes`)."""


def spare_bytes(budget_bytes: int) -> int:
    """Return how much of a budget is kept back when nothing more is begun.

    Half of it is for the farewell, where the line is slow enough; half for what was on its way when
    the connections end, so that not a byte goes beyond the budget.
    """
    return min(MAX_SPARE_BYTES, int(SPARE_FRACTION * budget_bytes))


def is_used_up(used_bytes: int, budget_bytes: int) -> bool:
    """Return whether nothing more may be begun; a budget of 0 is none."""
    return budget_bytes > 0 and used_bytes >= budget_bytes - spare_bytes(budget_bytes)


def _size(num_bytes: int) -> str:
    return gb(num_bytes) if num_bytes >= 10**9 else f"{num_bytes / 1e6:.1f} MB"


DATA_BUDGET = Veto(
    cause=Cause.DATA_BUDGET,
    is_on=lambda config: True,
    is_present=lambda signals, config, now_s, was: is_used_up(
        signals.data_used_bytes, config.monthly_data_budget_bytes
    ),
    reason=lambda signals, config: (
        f"this month's data budget is used up: {_size(config.monthly_data_budget_bytes)}"
        " (`monthly_data_budget_bytes`)"
    ),
    resumes_when=lambda signals, config: "the next month begins (in UTC), or you allow more",
    ends_at_s=lambda signals, config, now_s: now_s + signals.data_renews_in_s,
    pause_after_s=at_once,
    resume_after_s=at_once,
    holds_network=True,
)
