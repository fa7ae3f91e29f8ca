"""What the ledger keeps: its tables, and the values that it answers with.

Runs in: agent. Pure.

Every trained token is in exactly one place: not contributed yet, pending (in a contribution that
came to nothing, to be sent again), in flight, confirmed, refused, or dropped. What became of a
contribution's *new* tokens also follows from the contributions that carry it (ROUNDS.md rule 28):
confirmed wins over refused, refused over in flight, in flight over what the contribution itself
says.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

SCHEMA_VERSION = 1

SCHEMA = """
CREATE TABLE IF NOT EXISTS contributions (
  contribution_id TEXT PRIMARY KEY,
  run_id TEXT NOT NULL,
  module_id TEXT NOT NULL,
  round_index INTEGER NOT NULL,
  tokens INTEGER NOT NULL,
  new_tokens INTEGER NOT NULL,
  state TEXT NOT NULL,
  reason TEXT NOT NULL,
  at_utc TEXT NOT NULL,
  state_utc TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS carries (
  carrier_id TEXT NOT NULL,
  carried_id TEXT NOT NULL,
  PRIMARY KEY (carried_id, carrier_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS totals (
  run_id TEXT NOT NULL,
  module_id TEXT NOT NULL,
  tokens_total INTEGER NOT NULL,
  inner_steps INTEGER NOT NULL,
  tokens_before INTEGER NOT NULL,
  inner_steps_before INTEGER NOT NULL,
  as_of_utc TEXT NOT NULL,
  PRIMARY KEY (run_id, module_id)
);
CREATE TABLE IF NOT EXISTS progress (
  day_utc TEXT NOT NULL,
  run_id TEXT NOT NULL,
  module_id TEXT NOT NULL,
  tokens INTEGER NOT NULL,
  inner_steps INTEGER NOT NULL,
  PRIMARY KEY (day_utc, run_id, module_id)
);
CREATE TABLE IF NOT EXISTS discards (
  number INTEGER PRIMARY KEY,
  run_id TEXT NOT NULL,
  module_id TEXT NOT NULL,
  tokens INTEGER NOT NULL,
  reason TEXT NOT NULL,
  at_utc TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS rounds (
  run_id TEXT NOT NULL,
  module_id TEXT NOT NULL,
  commit_id TEXT NOT NULL,
  round_index INTEGER NOT NULL,
  state_hash TEXT NOT NULL,
  held_out_loss REAL,
  num_contributions INTEGER NOT NULL,
  own_listed INTEGER NOT NULL,
  applied_utc TEXT NOT NULL,
  applied_order INTEGER NOT NULL,
  PRIMARY KEY (run_id, module_id, commit_id)
);
CREATE TABLE IF NOT EXISTS evaluations (
  commit_id TEXT PRIMARY KEY,
  loss_stderr REAL NOT NULL,
  num_windows INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sessions (
  day_utc TEXT PRIMARY KEY,
  contributed_s REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS bytes (
  purpose TEXT NOT NULL,
  day_utc TEXT NOT NULL,
  sent INTEGER NOT NULL,
  received INTEGER NOT NULL,
  PRIMARY KEY (purpose, day_utc)
);
CREATE VIEW IF NOT EXISTS works AS
  SELECT own.*, CASE max(max(CASE own.state
      WHEN 'confirmed' THEN 4 WHEN 'refused' THEN 3 WHEN 'in_flight' THEN 2 ELSE 1 END),
    max(CASE carrier.state
      WHEN 'confirmed' THEN 4 WHEN 'refused' THEN 3 WHEN 'in_flight' THEN 2 ELSE 1 END))
    WHEN 4 THEN 'confirmed' WHEN 3 THEN 'refused' WHEN 2 THEN 'in_flight' ELSE own.state
    END AS outcome
  FROM contributions AS own
  LEFT JOIN carries ON carries.carried_id = own.contribution_id
  LEFT JOIN contributions AS carrier ON carrier.contribution_id = carries.carrier_id
  GROUP BY own.contribution_id
"""
"""`works` gives each contribution with the `outcome` of its new tokens, carriers considered.

`totals` counts from the trainer's snapshots; `..._before` is what a trainer that had to go back to
an older snapshot has counted already. `progress` is the same by day.
"""


class ContributionState(StrEnum):
    """What became of a contribution, as its author last heard."""

    IN_FLIGHT = "in_flight"
    """A commit may list it, or lists it and is not final."""
    PENDING = "pending"
    """It can no longer be listed: its work is carried by the next one."""
    CONFIRMED = "confirmed"
    """A final commit lists it."""
    REFUSED = "refused"
    """A final commit gave it no weight."""
    DROPPED = "dropped"
    """Given up, with a reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Where every trained token is; in tokens."""

    done: int
    """Trained on this machine, as of the last snapshots."""
    not_contributed: int
    """Trained since the last contribution; negative only if the books are wrong."""
    pending: int
    in_flight: int
    confirmed: int
    refused: int
    dropped: int

    @property
    def is_exact(self) -> bool:
        """Whether every token is in exactly one place."""
        parts = (
            self.not_contributed,
            self.pending,
            self.in_flight,
            self.confirmed,
            self.refused,
            self.dropped,
        )
        return self.done == sum(parts) and min(parts) >= 0


def now_utc() -> str:
    """Return the wall-clock time for people, e.g. `2026-11-30T08:15:00Z`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
