"""What a crash of a simulated member leaves."""

from __future__ import annotations

from dataclasses import dataclass, field

from volunteer.lab.simulation.trainer_model import Snapshot
from volunteer.rounds.records import Record


@dataclass(slots=True)
class Disk:
    """Records, blobs, states, and the trainer's snapshot."""

    records: dict[str, Record] = field(default_factory=dict)
    """In their order of arrival."""
    blobs: set[str] = field(default_factory=set)
    verified: list[str] = field(default_factory=list)
    states: set[str] = field(default_factory=set)
    dropped: list[str] = field(default_factory=list)
    snapshot: Snapshot = field(default_factory=Snapshot)
