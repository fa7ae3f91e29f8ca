"""What one row of the decision table is.

Runs in: agent. Stage 1 of the map. Pure. The rows are in owner_vetoes.py, machine_vetoes.py,
presence_vetoes.py and load_vetoes.py; `idle.VETOES` puts them in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from volunteer.policy.signals import IdleConfig, Signals


class Cause(StrEnum):
    """Which row decided."""

    NOTHING = "nothing"
    """No row vetoes."""
    LOOKING = "looking"
    """The sensors have not told anything yet."""
    DISK = "disk"
    OWN_DISK = "own_disk"
    OWNER = "owner"
    SLEEP = "sleep"
    MEMORY = "memory"
    OWN_MEMORY = "own_memory"
    HEAT = "heat"
    HOURS = "hours"
    NETWORK_HOURS = "network_hours"
    DATA_BUDGET = "data_budget"
    METERED = "metered"
    BATTERY = "battery"
    UNKNOWN = "idle_unknown"
    """Nobody can tell whether the owner is there: a state of its own, never taken for idle."""
    INPUT = "input"
    TERMINAL = "terminal"
    INHIBITED = "inhibited"
    GAME = "game"
    EXCLUSIVE = "exclusive"
    CPU = "cpu"
    GPU = "gpu"
    GPU_MEMORY = "gpu_memory"


def _paused_after(config: IdleConfig) -> float:
    return config.pause_after_s


def _resumed_after(config: IdleConfig) -> float:
    return config.resume_after_s


def at_once(config: IdleConfig) -> float:
    """Return no time at all: for rows that count without having to be steady."""
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Veto:
    """One row of the table."""

    cause: Cause
    is_present: Callable[[Signals, IdleConfig, float, bool], bool]
    """Whether the readings veto: (signals, config, now_s, whether the row vetoes now)."""
    reason: Callable[[Signals, IdleConfig], str]
    resumes_when: Callable[[Signals, IdleConfig], str]
    is_on: Callable[[IdleConfig], bool] = lambda config: not config.ignore_idle
    """Whether the owner wants it at all."""
    ends_at_s: Callable[[Signals, IdleConfig, float], float | None] = lambda s, c, now_s: None
    """When the readings change by themselves, if nothing happens; None: nobody can know."""
    calm_reason: str = ""
    """The reason while its readings no longer veto, but not for long enough yet."""
    pause_after_s: Callable[[IdleConfig], float] = _paused_after
    """How long the readings must veto before the row does."""
    resume_after_s: Callable[[IdleConfig], float] = _resumed_after
    """How long they must not, before it no longer does."""
    holds_network: bool = False
    """Whether it also keeps blobs and states from being sent and fetched."""


def gb(size_bytes: int) -> str:
    """Return a size as `1.5 GB`."""
    return f"{size_bytes / 1e9:.1f} GB"


def amount(size_bytes: int) -> str:
    """Return a size as `1.5 GB`, and below one as `560 MB`: limits of our own may be small."""
    return gb(size_bytes) if size_bytes >= 10**9 else f"{size_bytes / 1e6:.0f} MB"


def percent(fraction: float) -> str:
    """Return a fraction as `25 %`."""
    return f"{100 * fraction:.0f} %"


def named(names: tuple[str, ...], most: int = 3) -> str:
    """Return up to `most` names as a list in a sentence, with how many there are beyond."""
    shown = list(names[:most])
    if len(names) > most:
        shown.append(f"{len(names) - most} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def duration(seconds: float) -> str:
    """Return a configured time as `5 min` or `30 s`."""
    return f"{seconds / 60:g} min" if seconds >= 60 else f"{seconds:g} s"
