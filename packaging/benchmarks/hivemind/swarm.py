"""What both sides of the comparison have in common: a swarm that exchanges when it is told to."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")
POLL_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured."""

    peers: int
    """How many exchange."""
    parameters_m: int
    """Millions of parameters, about."""
    codec: str
    """int4, fp16 or fp32."""


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One round, from its close to the moment at which every survivor has applied it."""

    seconds: float
    """Until the last survivor trains from the new weights."""
    preparation_s: float = 0.0
    """hivemind: finding the group, before the close; it can be hidden behind training."""
    parts_s: dict[str, float] = field(default_factory=dict)
    """Where the time went, in seconds after the close at which each part was over everywhere."""
    differing_fraction: float = 0.0
    """Share of the parameters on which two survivors disagree by more than TOLERANCE."""
    bit_differing_fraction: float = 0.0
    """Share on which they are not the same to the last bit."""
    note: str = ""
    """What else is to be said of it."""


class Swarm(ABC):
    """Some peers on this machine."""

    name: str

    @abstractmethod
    def start(self) -> None:
        """Start the peers and let them exchange until they are in step."""

    @abstractmethod
    def prepare(self) -> None:
        """Do what belongs before a round's close: train, find the others."""

    @abstractmethod
    def exchange(self, *, kill_after_s: float | None = None) -> Exchange:
        """Close the round and wait until all have applied; perhaps kill the last peer meanwhile."""

    @abstractmethod
    def pids(self) -> list[int]:
        """Return the peers' processes; they have children."""

    @abstractmethod
    def stop(self) -> None:
        """End all processes."""


class StuckError(Exception):
    """Something did not happen in time."""


def wait_until(what: str, look: Callable[[], T | None], deadline_s: float) -> T:
    """Return the first value of `look` that is true.

    Raises:
        StuckError: it did not come to be in time.
    """
    end_s = time.monotonic() + deadline_s
    while True:
        value = look()
        if value:
            return value
        if time.monotonic() > end_s:
            raise StuckError(f"not within {deadline_s:g} s: {what}")
        time.sleep(POLL_S)  # noqa: TID251 - a measurement takes its time
