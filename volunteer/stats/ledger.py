"""The ledger: what this machine has done, and what the swarm has confirmed.

Runs in: agent, from worker threads. SQLite. It decides nothing and can be lost without hurting a
run: a damaged file is moved to `quarantine/`, and a new one is begun.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import msgspec

from volunteer.answers import ContributionPoint, DayTraffic, RoundPoint, Stats
from volunteer.database import Database, quarantine_database
from volunteer.errors import CheckpointCorruptError
from volunteer.stats import queries
from volunteer.stats.records import (
    SCHEMA,
    SCHEMA_VERSION,
    Balance,
    ContributionState,
    now_utc,
)

_DAMAGED_SNAPSHOT = "the newest snapshot was damaged: trained again from the one before"

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Ledger:
    """The books of one volunteer. Any thread.

    Every method that writes raises StorageFullError if the disk is full, and then has written
    nothing.
    """

    def __init__(self, file: Path, *, utc_now: Callable[[], str] = now_utc) -> None:
        """Open `file`, or create it in its folder, which must exist.

        Raises:
            CheckpointTooNewError: a newer version wrote it; it is left alone.
            StorageFullError: the disk is full.
        """
        self._file = file
        self._utc_now = utc_now
        self._lock = threading.RLock()
        try:
            self._database = self._open()
        except CheckpointCorruptError as error:
            self._database = self._begin_anew(error)

    # ------------------------------------------------------------------------------- writing

    def record_contribution(
        self,
        *,
        run_id: str,
        module_id: str,
        contribution_id: str,
        round_index: int,
        tokens: int,
        new_tokens: int,
        carries: tuple[str, ...] = (),
        at_utc: str | None = None,
    ) -> None:
        """Note a contribution of our own, in flight; again changes nothing.

        Args:
            run_id: its run.
            module_id: its module.
            contribution_id: its record's id.
            round_index: height of its base.
            tokens: all whose work it contains.
            new_tokens: those that no carried contribution contains.
            carries: own earlier contributions folded in, transitively.
            at_utc: when it was made; default: now.
        """
        at = at_utc or self._utc_now()

        def write(connection: sqlite3.Connection) -> None:
            added = connection.execute(
                "INSERT INTO contributions VALUES (?, ?, ?, ?, ?, ?, 'in_flight', '', ?, ?)"
                " ON CONFLICT DO NOTHING",
                (contribution_id, run_id, module_id, round_index, tokens, new_tokens, at, at),
            )
            if added.rowcount:
                connection.executemany(
                    "INSERT INTO carries VALUES (?, ?) ON CONFLICT DO NOTHING",
                    [(contribution_id, carried_id) for carried_id in carries],
                )
                queries.count_contributed(connection, run_id, module_id, at_utc=at)

        self._run(write)

    def mark_contribution(self, contribution_id: str, state: str, reason: str) -> bool:
        """Note what became of a contribution; return whether it is in the books.

        The same state again, without a reason, keeps the reason that was given before: after a
        restart nobody knows it but this file.

        Raises:
            ValueError: `state` is no ContributionState.
        """
        row = {
            "state": ContributionState(state).value,
            "reason": reason,
            "at": self._utc_now(),
            "id": contribution_id,
        }
        return self._run(
            lambda connection: (
                connection.execute(
                    "UPDATE contributions SET state = :state, state_utc = :at, reason ="
                    " CASE WHEN state = :state AND :reason = '' THEN reason ELSE :reason END"
                    " WHERE contribution_id = :id",
                    row,
                ).rowcount
                == 1
            )
        )

    def record_discarded(self, run_id: str, module_id: str, tokens: int, reason: str) -> int:
        """Note that work was given up before it was in any contribution.

        Returns:
            The tokens noted: at most those not contributed, for the rest of what the trainer threw
            away is in contributions already.
        """
        return self._run(
            lambda connection: queries.discard(
                connection,
                run_id,
                module_id,
                tokens=tokens,
                reason=reason,
                at_utc=self._utc_now(),
            )
        )

    def set_totals(self, run_id: str, module_id: str, tokens_total: int, inner_steps: int) -> None:
        """Note the trainer's counters as of a snapshot.

        A counter that goes back means that a damaged snapshot was passed over: what it had counted
        stays done, and what of it was in no contribution is dropped.
        """
        at_utc = self._utc_now()

        def write(connection: sqlite3.Connection) -> None:
            old_tokens, _ = queries.read_counters(connection, run_id, module_id)
            queries.discard(
                connection,
                run_id,
                module_id,
                tokens=max(0, old_tokens - tokens_total),
                reason=_DAMAGED_SNAPSHOT,
                at_utc=at_utc,
            )
            queries.move_counters(
                connection,
                run_id,
                module_id,
                tokens_total=tokens_total,
                inner_steps=inner_steps,
                at_utc=at_utc,
            )

        self._run(write)

    def record_round(
        self,
        *,
        run_id: str,
        module_id: str,
        commit_id: str,
        round_index: int,
        state_hash: str,
        num_contributions: int,
        own_listed: bool,
        applied_utc: str | None = None,
    ) -> None:
        """Note that `commit_id` is the tip now; coming back to one keeps its loss."""
        at = applied_utc or self._utc_now()
        row = (run_id, module_id, commit_id, round_index, state_hash, num_contributions)
        self._run(
            lambda connection: connection.execute(
                "INSERT INTO rounds VALUES (?, ?, ?, ?, ?, NULL, ?, ?, ?,"
                " (SELECT coalesce(max(applied_order), 0) + 1 FROM rounds))"
                " ON CONFLICT (run_id, module_id, commit_id) DO UPDATE"
                " SET applied_utc = excluded.applied_utc,"
                " applied_order = excluded.applied_order, own_listed = excluded.own_listed",
                (*row, own_listed, at),
            )
        )

    def record_evaluation(
        self, commit_id: str, loss: float, *, stderr: float, num_windows: int
    ) -> None:
        """Note the held-out loss of the state after `commit_id`.

        Args:
            commit_id: of the round.
            loss: nats per byte of text.
            stderr: its standard error.
            num_windows: that it was measured on.
        """

        def record(connection: sqlite3.Connection) -> None:
            connection.execute(
                "UPDATE rounds SET held_out_loss = ? WHERE commit_id = ?", (loss, commit_id)
            )
            connection.execute(
                "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?)",
                (commit_id, stderr, num_windows),
            )

        self._run(record)

    def add_contributed_s(self, seconds: float) -> None:
        """Add time spent contributing, measured by a clock that never goes back."""
        self._run(
            lambda connection: connection.execute(
                "INSERT INTO sessions VALUES (?, ?) ON CONFLICT (day_utc) DO UPDATE"
                " SET contributed_s = contributed_s + excluded.contributed_s",
                (self._day_utc(), seconds),
            )
        )

    def add_bytes(self, purpose: str, sent: int, received: int) -> None:
        """Add bytes of the network, by what they were for."""
        self._run(
            lambda connection: connection.execute(
                "INSERT INTO bytes VALUES (?, ?, ?, ?)"
                " ON CONFLICT (purpose, day_utc) DO UPDATE"
                " SET sent = sent + excluded.sent, received = received + excluded.received",
                (purpose, self._day_utc(), sent, received),
            )
        )

    # ------------------------------------------------------------------------------- reading

    def bytes_in_month(self, month: str) -> int:
        """Return the network's bytes of a month in UTC, like `2026-11`, both directions."""
        return self._run(lambda connection: queries.read_bytes_in_month(connection, month))

    def bytes_by_day(self, num_days: int) -> tuple[DayTraffic, ...]:
        """Return the network's bytes of the last `num_days` days (UTC), the newest first.

        A day on which nothing went is left out.
        """
        today = date.fromisoformat(self._day_utc())
        first = today - timedelta(days=max(0, num_days - 1))
        return self._run(lambda connection: queries.read_bytes_by_day(connection, str(first)))

    def totals(self, run_id: str, module_id: str) -> tuple[int, int]:
        """Return (tokens, inner steps) trained in a run, as its trainer's snapshots have them."""
        return self._run(lambda connection: queries.read_counters(connection, run_id, module_id))

    def stats(self, since_utc: str | None = None) -> Stats:
        """Return the totals, or what was done since an instant.

        Args:
            since_utc: like `2026-11-30T08:15:00Z`. Contributions count from the instant they were
                made, all else by whole days in UTC. Work not contributed yet always counts.
        """
        return self._run(lambda connection: queries.read_stats(connection, since_utc or ""))

    def stats_of_last(self, seconds: float) -> Stats:
        """Return what was done since the beginning of the UTC day that was `seconds` ago.

        Whole days, for only contributions are kept by the instant (`stats`).
        """
        now = datetime.fromisoformat(self._utc_now())
        day = (now - timedelta(seconds=seconds)).date()
        since_utc = f"{day}T00:00:00Z"
        return msgspec.structs.replace(self.stats(since_utc), since_utc=since_utc)

    def balance(self) -> Balance:
        """Return where every trained token is."""
        return self._run(queries.read_balance)

    def history(self, run_id: str, module_id: str, limit: int) -> tuple[RoundPoint, ...]:
        """Return the last `limit` rounds on the way to the tip, the oldest first.

        Of two commits of one height the one applied last counts; what lies above the tip was left.
        """
        return self._run(
            lambda connection: queries.read_history(connection, run_id, module_id, limit)
        )

    def contributions(
        self, run_id: str, module_id: str, limit: int
    ) -> tuple[ContributionPoint, ...]:
        """Return what became of the last `limit` contributions, the oldest first.

        Where the chain lists them is not in these books.
        """
        return self._run(
            lambda connection: queries.read_contributions(connection, run_id, module_id, limit)
        )

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run `work` in a transaction; on a damaged file, once more on a new one."""
        with self._lock:
            try:
                return self._database.run(work)
            except CheckpointCorruptError as error:
                self._database.close()
                self._database = self._begin_anew(error)
                return self._database.run(work)

    def _open(self) -> Database:
        return Database(self._file, schema=SCHEMA, version=SCHEMA_VERSION)

    def _begin_anew(self, error: CheckpointCorruptError) -> Database:
        kept = quarantine_database(self._file)
        _log.error("stats damaged, begun anew kept=%s: %s", kept, error)
        return self._open()

    def _day_utc(self) -> str:
        return self._utc_now()[:10]
