"""What a crash of a simulated member leaves.

Runs in: simulation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from volunteer.lab.simulation.trainer_model import Snapshot
from volunteer.rounds.records import Record

MAX_TURNED_AWAY = 4096


@dataclass(slots=True)
class Disk:
    """Records, blobs, states, and the trainer's snapshot."""

    records: dict[str, Record] = field(default_factory=dict)
    """In their order of arrival."""
    by_height: dict[int, dict[str, Record]] = field(default_factory=dict)
    """The same by height, as the exchange asks for them."""
    marks: dict[int, int] = field(default_factory=dict)
    """Height -> a number that two disks share if they hold the same records there."""
    turned_away: dict[str, int] = field(default_factory=dict)
    """What was lately forgotten for want of room -> its height: neighbours need not send it again,
    as in `volunteer.agent.record_book`. In memory: a restart begins without."""
    blobs: set[str] = field(default_factory=set)
    verified: list[str] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)
    """Commit -> hash of the state file, as its bytes give it: not as the commit states it."""
    has_signed: bool = False
    """Whether something was signed with this disk in the machine: it is a file beside the log."""
    dropped: list[str] = field(default_factory=list)
    snapshot: Snapshot = field(default_factory=Snapshot)

    def keep(self, record_id: str, record: Record) -> None:
        """Put a record on disk, once."""
        if record_id not in self.records:
            self.records[record_id] = record
            height = record.round_index
            self.by_height.setdefault(height, {})[record_id] = record
            self.marks[height] = self.marks.get(height, 0) ^ hash(record_id)
            self.turned_away.pop(record_id, None)

    def forget(self, record_ids: Iterable[str]) -> None:
        """Delete records for which there is no room."""
        for record_id in record_ids:
            record = self.records.pop(record_id, None)
            if record is not None:
                del self.by_height[record.round_index][record_id]
                self.marks[record.round_index] ^= hash(record_id)
                self.turned_away[record_id] = record.round_index
        while len(self.turned_away) > MAX_TURNED_AWAY:
            del self.turned_away[next(iter(self.turned_away))]

    def num_from(self, height: int) -> int:
        """Count the records from `height` up that an exchange names, those turned away too."""
        kept = sum([len(records) for h, records in self.by_height.items() if h >= height])
        return kept + sum([h >= height for h in self.turned_away.values()])
