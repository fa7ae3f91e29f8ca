"""The clock: against the peers', against the network's time service, and against reason.

Runs in: the command line. The protocol compares no clocks; hours, logs, dates of statistics and the
certificates that updates need do.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from volunteer.doctor.check import Check, Level
from volunteer.doctor.facts import AgentFacts, PeerClock

WRONG_S = 60.0
"""From here on hours and certificates suffer."""
NOTE_S = 5.0
MIN_PEERS = 3
"""Of fewer, one that lies is the median."""
RELEASED = datetime(2026, 11, 1, tzinfo=UTC)
"""This version did not exist before."""
_FIX = "sudo timedatectl set-ntp true"
_STA_UNSYNC = 0x0040
_TIMEX_STATUS_WORD = 5
"""struct timex (adjtimex(2)): modes, then longs offset, freq, maxerror, esterror, then status."""


def clock_checks(
    facts: AgentFacts | None,
    now: datetime,
    *,
    is_synchronized: bool | None,
    is_agent_silent: bool = False,
) -> list[Check]:
    """Return every check of the clock.

    Args:
        facts: of the running agent, its clocks just compared; None: none runs.
        now: the machine's clock, with its time zone.
        is_synchronized: as `read_synchronized` says.
        is_agent_silent: whether one runs that does not answer.
    """
    return [
        _date(now),
        _service(is_synchronized),
        _silent() if is_agent_silent else _peers(facts.clocks if facts is not None else None),
    ]


def _date(now: datetime) -> Check:
    shown = now.strftime("%Y-%m-%d %H:%M:%S %Z")
    if now >= RELEASED:
        text = "the machine's clock; `hours` and `network_hours` go by it"
        return Check(area="clock", name="date", level="well", value=shown, meaning=text)
    return Check(
        area="clock",
        name="date",
        level="wrong",
        value=shown,
        meaning=f"the clock is wrong: this version was made after {RELEASED:%Y-%m-%d}",
        fix=_FIX,
    )


def _service(is_synchronized: bool | None) -> Check:
    if is_synchronized is None:
        value, meaning = (
            "unknown",
            "this system does not tell whether a time service sets the clock",
        )
    elif is_synchronized:
        value, meaning = "yes", "a time service keeps the clock right"
    else:
        value, meaning = "no", "nothing keeps the clock right (in a virtual machine its host may)"
    return Check(
        area="clock",
        name="synchronized",
        level="note" if is_synchronized is False else "well",
        value=value,
        meaning=meaning,
        fix=_FIX if is_synchronized is False else "",
    )


def _silent() -> Check:
    return _peer_check("note", "-", "only the agent knows peers, and it does not answer")


def _peers(clocks: Sequence[PeerClock] | None) -> Check:
    if clocks is None:
        text = "only the agent knows peers, and none runs"
        return _peer_check("note", "-", text, "allmende start")
    if not clocks:
        text = "no peer is connected that says what time it is; nothing depends on it"
        return _peer_check("note", "-", text)
    ahead_s = statistics.median(clock.ahead_s for clock in clocks)
    error_s = statistics.median(clock.error_s for clock in clocks)
    who = "1 peer" if len(clocks) == 1 else f"the median of {len(clocks)} peers"
    off_s = max(0.0, abs(ahead_s) - error_s)
    if off_s < NOTE_S:
        text = f"the clock is right, {who} says"
        return _peer_check("well", f"{ahead_s:+.1f} s", text)
    side = "behind" if ahead_s > 0 else "ahead of"
    text = f"this machine's clock is {_span(off_s)} {side} what {who} says"
    if off_s < WRONG_S or len(clocks) < MIN_PEERS:
        few = "" if len(clocks) >= MIN_PEERS else "; so few may be wrong themselves"
        return _peer_check("note", f"{ahead_s:+.1f} s", text + few)
    return _peer_check("wrong", f"{ahead_s:+.0f} s", text, _FIX)


def _peer_check(level: Level, value: str, meaning: str, fix: str = "") -> Check:
    return Check(
        area="clock",
        name="peers",
        level=level,
        value=value,
        meaning=meaning,
        fix=fix,
    )


def _span(seconds: float) -> str:
    """Return a span in its largest unit; what a peer says may be any number."""
    for unit, size_s in (
        ("years", 365.25 * 86400),
        ("days", 86400.0),
        ("h", 3600.0),
        ("min", 60.0),
    ):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def read_synchronized() -> bool | None:
    """Return whether the kernel's clock is kept by a time service; None: it does not tell."""
    if sys.platform != "linux":
        return None
    buffer = (ctypes.c_long * 64)()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(buffer))
    if state < 0:
        return None
    status = ctypes.cast(buffer, ctypes.POINTER(ctypes.c_int))[
        _TIMEX_STATUS_WORD * ctypes.sizeof(ctypes.c_long) // ctypes.sizeof(ctypes.c_int)
    ]
    return not status & _STA_UNSYNC
