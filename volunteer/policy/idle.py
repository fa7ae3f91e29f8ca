"""Whether to contribute now, the one reason why not, what ends it and when.

Runs in: agent. Stage 1 of the map: everything else waits for this. Pure: `decide` is a function of
the state that it returned last, the readings, the owner's wishes and the time.

`VETOES` is the decision table, as policy/README.md shows it: the first row that vetoes is the
reason. A new sensor is a field of Signals, a row of one of the `*_vetoes.py` and a row there. What
the owner says counts at once, and so does input on a desktop; any other sensor must be steady for
`pause_after_s` before it pauses, and every sensor for `resume_after_s` before it lets go, so that
nothing flaps. At the start there is nothing to flap: readings count at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from volunteer.policy import (
    data_veto,
    load_vetoes,
    machine_vetoes,
    owner_vetoes,
    presence_vetoes,
)
from volunteer.policy.signals import IdleConfig, Signals
from volunteer.policy.veto import Cause, Veto

VETOES = (
    machine_vetoes.DISK,
    machine_vetoes.OWN_DISK,
    owner_vetoes.OWNER,
    machine_vetoes.SLEEP,
    machine_vetoes.MEMORY,
    machine_vetoes.OWN_MEMORY,
    machine_vetoes.HEAT,
    owner_vetoes.HOURS,
    owner_vetoes.NETWORK_HOURS,
    data_veto.DATA_BUDGET,
    machine_vetoes.METERED,
    machine_vetoes.BATTERY,
    presence_vetoes.UNKNOWN,
    presence_vetoes.INPUT,
    presence_vetoes.TERMINAL,
    presence_vetoes.INHIBITED,
    load_vetoes.GAME,
    load_vetoes.EXCLUSIVE,
    load_vetoes.CPU,
    load_vetoes.GPU,
    load_vetoes.GPU_MEMORY,
)
"""The decision table, the strongest first; policy/README.md is the same for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now, and what to tell the owner."""

    may_contribute: bool
    cause: Cause
    reason: str
    """One sentence."""
    resumes_when: str
    """What ends it, as in `resumes when ...`; empty while contributing."""
    resumes_at_s: float | None
    """The earliest instant at which this reason ends by itself; None: nobody can know, or it is
    now."""
    next_start_s: float | None = None
    """The earliest instant at which no row vetoes, if nothing happens until then; None: nobody can
    know, or it is now."""
    network_reason: str = ""
    """Why blobs and states are neither sent nor fetched, whatever else is the reason for not
    contributing; empty: they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """What one row stood for until now."""

    is_vetoing: bool
    differs_since_s: float | None = None
    """Since when its readings have said the opposite; None: they do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleState:
    """What `decide` remembers; a fresh one has seen nothing."""

    rows: Mapping[Cause, RowState] = field(default_factory=dict)


CONTRIBUTE = Decision(
    may_contribute=True,
    cause=Cause.NOTHING,
    reason="nothing stands against it",
    resumes_when="",
    resumes_at_s=None,
)
LOOKING = Decision(
    may_contribute=False,
    cause=Cause.LOOKING,
    reason="looking whether the machine is in use",
    resumes_when="the sensors have told, within seconds",
    resumes_at_s=None,
    network_reason="looking whether the network may be used",
)
"""What holds until the first readings are there."""


def decide(
    state: IdleState, signals: Signals, config: IdleConfig, now_s: float
) -> tuple[IdleState, Decision]:
    """Decide whether to contribute.

    Args:
        state: as returned by the last call; `IdleState()` for the first.
        signals: this moment's readings.
        config: the owner's wishes.
        now_s: seconds of a clock that never goes back and counts sleep.

    Returns:
        The state for the next call, and the decision.
    """
    rows = {
        row.cause: _follow(row, state.rows.get(row.cause), signals, config, now_s) for row in VETOES
    }
    standing = [row for row in VETOES if row.is_on(config) and rows[row.cause].is_vetoing]
    if not standing:
        return IdleState(rows=rows), CONTRIBUTE
    ends = [_ends_at_s(row, rows[row.cause], signals, config, now_s) for row in standing]
    known = [end_s for end_s in ends if end_s is not None]
    next_start_s = max(known) if len(known) == len(ends) else None
    refusal = _refuse(standing[0], rows[standing[0].cause], signals, config, ends[0], next_start_s)
    holding = [
        _refuse(r, rows[r.cause], signals, config, None, None) for r in standing if r.holds_network
    ]
    network_reason = holding[0].reason if holding else ""
    return IdleState(rows=rows), replace(refusal, network_reason=network_reason)


def _follow(
    row: Veto, state: RowState | None, signals: Signals, config: IdleConfig, now_s: float
) -> RowState:
    """Let a row follow its readings, once they have been steady for long enough."""
    was = state is not None and state.is_vetoing
    is_present = row.is_present(signals, config, now_s, was)
    if state is None or was == is_present:
        return RowState(is_vetoing=is_present)
    since_s = now_s if state.differs_since_s is None else state.differs_since_s
    steady_s = row.pause_after_s(config) if is_present else row.resume_after_s(config)
    if now_s - since_s < steady_s:
        return RowState(is_vetoing=was, differs_since_s=since_s)
    if was and row.is_present(signals, config, now_s, False):
        # Good enough to stay calm, too bad to begin anew: it would veto again at once.
        return RowState(is_vetoing=True, differs_since_s=since_s)
    return RowState(is_vetoing=is_present)


def _ends_at_s(
    row: Veto, state: RowState, signals: Signals, config: IdleConfig, now_s: float
) -> float | None:
    """Return when a standing row lets go, if nothing happens."""
    if state.differs_since_s is not None:
        calm_s = state.differs_since_s + row.resume_after_s(config)
        own_s = row.ends_at_s(signals, config, now_s)
        return calm_s if own_s is None else max(calm_s, own_s)
    end_s = row.ends_at_s(signals, config, now_s)
    return None if end_s is None or end_s <= now_s else end_s


def _refuse(
    row: Veto,
    state: RowState,
    signals: Signals,
    config: IdleConfig,
    ends_at_s: float | None,
    next_start_s: float | None,
) -> Decision:
    is_calm = state.differs_since_s is not None
    calm_s = row.resume_after_s(config)
    return Decision(
        may_contribute=False,
        cause=row.cause,
        reason=row.calm_reason if is_calm else row.reason(signals, config),
        resumes_when=f"that has lasted for {calm_s:g} s"
        if is_calm
        else row.resumes_when(signals, config),
        resumes_at_s=ends_at_s,
        next_start_s=next_start_s,
    )
