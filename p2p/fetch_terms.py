"""How one blob is fetched, and what that needs of the swarm. Runs in: agent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from p2p.conduct import Misdeed
from p2p.flow import Priority
from p2p.host import Host

Providers = Callable[[], Sequence[str]]
Connect = Callable[[str], Awaitable[Host]]
NoteMisdeed = Callable[[str, Misdeed], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a blob is fetched (`Swarm.fetch_blob` has the words)."""

    purpose: str
    max_bytes: int
    stall_s: float
    gone_s: float
    priority: Priority
