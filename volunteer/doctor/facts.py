"""What a running agent tells the doctor about itself (the control verb `doctor`).

Runs in: agent, the command line. The agent's own sensors are asked, not ours: it is they that
decide, and they may see less (BOINC#5226).
"""

from __future__ import annotations

import msgspec


class SourceLine(msgspec.Struct, frozen=True, kw_only=True):
    """One source of the idle policy (`policy.report.SourceReport`)."""

    name: str
    is_well: bool
    value: str
    meaning: str
    fix: str = ""


class PeerClock(msgspec.Struct, frozen=True, kw_only=True):
    """A peer's clock against this machine's."""

    peer_id: str
    ahead_s: float
    """Negative: it is behind."""
    error_s: float
    """By how much that may be wrong at most."""


class AgentFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    state: str
    """As in `Status`."""
    reason: str
    resumes_when: str
    is_idle_unknown: bool
    """Whether it waits because nobody can tell if the machine is in use."""
    sources: tuple[SourceLine, ...]
    clocks: tuple[PeerClock, ...] = ()
    device: str = ""
    """What the trainer trains on, as its maker calls it; empty while none runs."""
    listen_addrs: tuple[str, ...] = ()
    num_inbound: int = 0
    """Connected peers who dialled us."""
    num_outbound: int = 0
    dialled_us_by_scope: dict[str, int] = msgspec.field(default_factory=dict)
    """Connections that peers opened to us since the agent's start, by where they came from:
    global, private (this network), loopback (this machine)."""
    num_known_peers: int = 0
    num_banned: int = 0
    differing_peers: dict[str, int] = msgspec.field(default_factory=dict)
    """As in `Status`."""
    data_note: str = ""
    """As in `Status`."""
    host_restarts: int = 0
