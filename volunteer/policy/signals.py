"""What the idle policy knows: readings of the sensors and the owner's word.

Runs in: agent. Pure values; `policy.sensors` reads them. A sensor that cannot tell says None.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerPause:
    """The owner has said pause; `resume` takes it back."""

    until_s: float | None = None
    """Instant on the agent's clock at which it ends by itself; None: only by `resume`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """All readings of one moment."""

    owner_pause: OwnerPause | None
    """None: the owner has not said pause."""
    on_battery: bool | None
    """Whether the machine runs on battery; False without one; None: cannot tell."""
    disk_free_bytes: int | None
    """Free to us where the data lies; None: cannot tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleConfig:
    """What the owner wants of the policy."""

    disk_min_free_bytes: int
    """As in Config."""
    pause_on_battery: bool = True
    """As in Config."""
    ignore_idle: bool = False
    """`--ignore-idle`: contribute whatever the policy says, but for the owner and a full disk."""
    pause_after_s: float = 10.0
    """How long a sensor must veto before contributing pauses; 10: BOINC's flapping reports."""
    resume_after_s: float = 60.0
    """How long it must be calm before contributing resumes; 60: as above."""
