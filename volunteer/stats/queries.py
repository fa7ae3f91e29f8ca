"""What the ledger asks of its tables, inside a transaction that the ledger has begun.

Runs in: agent. Every function takes the open connection; `stats.records` has the tables.
"""

from __future__ import annotations

import sqlite3
from collections import Counter

from volunteer.answers import ContributionPoint, DayTraffic, RoundPoint, Stats
from volunteer.stats.records import Balance

_NO_REASON = "no reason was noted"


def read_counters(connection: sqlite3.Connection, run_id: str, module_id: str) -> tuple[int, int]:
    """Return the trainer's (tokens_total, inner_steps) as last noted; zeros before."""
    row = connection.execute(
        "SELECT tokens_total, inner_steps FROM totals WHERE run_id = ? AND module_id = ?",
        (run_id, module_id),
    ).fetchone()
    return (row[0], row[1]) if row else (0, 0)


def read_not_contributed(connection: sqlite3.Connection, run_id: str, module_id: str) -> int:
    """Return done tokens that are in no contribution and were not discarded."""
    return int(
        connection.execute(
            "SELECT coalesce((SELECT tokens_total + tokens_before FROM totals"
            "  WHERE run_id = :run AND module_id = :module), 0)"
            " - coalesce((SELECT sum(new_tokens) FROM contributions"
            "  WHERE run_id = :run AND module_id = :module), 0)"
            " - coalesce((SELECT sum(tokens) FROM discards"
            "  WHERE run_id = :run AND module_id = :module), 0)",
            {"run": run_id, "module": module_id},
        ).fetchone()[0]
    )


def move_counters(
    connection: sqlite3.Connection,
    run_id: str,
    module_id: str,
    *,
    tokens_total: int,
    inner_steps: int,
    at_utc: str,
) -> None:
    """Set the trainer's counters; what one that goes back had counted stays done."""
    old_tokens, old_steps = read_counters(connection, run_id, module_id)
    tokens_back = max(0, old_tokens - tokens_total)
    steps_back = max(0, old_steps - inner_steps)
    key = (run_id, module_id)
    connection.execute(
        "INSERT INTO totals VALUES (?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (run_id, module_id) DO UPDATE SET tokens_total = excluded.tokens_total,"
        " inner_steps = excluded.inner_steps, as_of_utc = excluded.as_of_utc,"
        " tokens_before = tokens_before + excluded.tokens_before,"
        " inner_steps_before = inner_steps_before + excluded.inner_steps_before",
        (*key, tokens_total, inner_steps, tokens_back, steps_back, at_utc),
    )
    added = (tokens_total - old_tokens + tokens_back, inner_steps - old_steps + steps_back)
    connection.execute(
        "INSERT INTO progress VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT (day_utc, run_id, module_id) DO UPDATE SET"
        " tokens = tokens + excluded.tokens, inner_steps = inner_steps + excluded.inner_steps",
        (at_utc[:10], *key, *added),
    )


def count_contributed(
    connection: sqlite3.Connection, run_id: str, module_id: str, *, at_utc: str
) -> None:
    """Raise the counters to what is contributed: it was trained, though no snapshot was noted."""
    missing = -read_not_contributed(connection, run_id, module_id)
    if missing > 0:
        total, inner_steps = read_counters(connection, run_id, module_id)
        move_counters(
            connection,
            run_id,
            module_id,
            tokens_total=total + missing,
            inner_steps=inner_steps,
            at_utc=at_utc,
        )


def discard(
    connection: sqlite3.Connection,
    run_id: str,
    module_id: str,
    *,
    tokens: int,
    reason: str,
    at_utc: str,
) -> int:
    """Note at most `tokens` of what is not contributed as dropped; return how many."""
    lost = min(tokens, read_not_contributed(connection, run_id, module_id))
    if lost > 0:
        connection.execute(
            "INSERT INTO discards (run_id, module_id, tokens, reason, at_utc)"
            " VALUES (?, ?, ?, ?, ?)",
            (run_id, module_id, lost, reason, at_utc),
        )
    return max(0, lost)


def read_balance(connection: sqlite3.Connection) -> Balance:
    """Return where every trained token is."""
    tokens = _tokens_by_outcome(connection, "")
    modules = connection.execute("SELECT run_id, module_id FROM totals").fetchall()
    return Balance(
        done=_read_int(connection, "SELECT sum(tokens_total + tokens_before) FROM totals"),
        not_contributed=sum(read_not_contributed(connection, *module) for module in modules),
        pending=tokens.get("pending", 0),
        in_flight=tokens.get("in_flight", 0),
        confirmed=tokens.get("confirmed", 0),
        refused=tokens.get("refused", 0),
        dropped=tokens.get("dropped", 0) + _read_discarded(connection, ""),
    )


def read_stats(connection: sqlite3.Connection, since_utc: str) -> Stats:
    """Return the totals since an instant; the empty string is before all of them."""
    day_utc = since_utc[:10]
    tokens = _tokens_by_outcome(connection, since_utc)
    done, inner_steps = connection.execute(
        "SELECT coalesce(sum(tokens), 0), coalesce(sum(inner_steps), 0) FROM progress"
        " WHERE day_utc >= ?",
        (day_utc,),
    ).fetchone()
    (contributed_s,) = connection.execute(
        "SELECT coalesce(sum(contributed_s), 0.0) FROM sessions WHERE day_utc >= ?", (day_utc,)
    ).fetchone()
    (done_as_of_utc,) = connection.execute(
        "SELECT coalesce(max(as_of_utc), '') FROM totals"
    ).fetchone()
    confirmed_as_of_utc, rounds_confirmed, rounds_refused = connection.execute(
        "SELECT coalesce(max(CASE state WHEN 'confirmed' THEN state_utc END), ''),"
        " count(CASE state WHEN 'confirmed' THEN 1 END),"
        " count(CASE state WHEN 'refused' THEN 1 END) FROM contributions WHERE at_utc >= ?",
        (since_utc,),
    ).fetchone()
    return Stats(
        tokens_done=done,
        tokens_confirmed=tokens.get("confirmed", 0),
        tokens_in_flight=tokens.get("in_flight", 0),
        tokens_pending=tokens.get("pending", 0) + read_balance(connection).not_contributed,
        tokens_refused=tokens.get("refused", 0),
        tokens_dropped=tokens.get("dropped", 0) + _read_discarded(connection, since_utc),
        tokens_refused_by_reason=_tokens_by_reason(connection, since_utc, "refused"),
        tokens_dropped_by_reason=_tokens_by_reason(connection, since_utc, "dropped"),
        inner_steps=inner_steps,
        rounds_confirmed=rounds_confirmed,
        rounds_refused=rounds_refused,
        contributed_s=contributed_s,
        bytes_by_purpose=_read_bytes(connection, day_utc),
        done_as_of_utc=done_as_of_utc,
        confirmed_as_of_utc=confirmed_as_of_utc,
    )


def read_history(
    connection: sqlite3.Connection, run_id: str, module_id: str, limit: int
) -> tuple[RoundPoint, ...]:
    """Return the last `limit` rounds on the way to the tip, the oldest first."""
    # With max(), SQLite takes the other columns from the row that has the maximum.
    rows = connection.execute(
        "SELECT round_index, rounds.commit_id, state_hash, held_out_loss, num_contributions,"
        " applied_utc, own_listed, loss_stderr, num_windows, max(applied_order) FROM rounds"
        " LEFT JOIN evaluations ON evaluations.commit_id = rounds.commit_id"
        " WHERE run_id = :run AND module_id = :module AND round_index <= (SELECT"
        " round_index FROM rounds WHERE run_id = :run AND module_id = :module"
        " ORDER BY applied_order DESC LIMIT 1)"
        " GROUP BY round_index ORDER BY round_index DESC LIMIT :limit",
        {"run": run_id, "module": module_id, "limit": max(0, limit)},
    ).fetchall()
    return tuple(
        RoundPoint(
            round_index=round_index,
            commit_id=commit_id,
            state_hash=state_hash,
            held_out_loss=held_out_loss,
            num_contributions=num_contributions,
            applied_utc=applied_utc,
            own_listed=bool(own_listed),
            loss_stderr=loss_stderr,
            num_windows=num_windows,
        )
        for (
            round_index,
            commit_id,
            state_hash,
            held_out_loss,
            num_contributions,
            applied_utc,
            own_listed,
            loss_stderr,
            num_windows,
            _,
        ) in reversed(rows)
    )


def read_contributions(
    connection: sqlite3.Connection, run_id: str, module_id: str, limit: int
) -> tuple[ContributionPoint, ...]:
    """Return what became of the last `limit` contributions, the oldest first."""
    rows = connection.execute(
        "SELECT contribution_id, round_index, tokens, new_tokens, state, reason, outcome, at_utc,"
        " state_utc, (SELECT group_concat(carrier_id) FROM (SELECT carries.carrier_id FROM carries"
        "  JOIN contributions AS carrier ON carrier.contribution_id = carries.carrier_id"
        "  WHERE carries.carried_id = works.contribution_id ORDER BY carrier.rowid))"
        " FROM (SELECT works.*, own.rowid AS made_order FROM works"
        "  JOIN contributions AS own USING (contribution_id)"
        "  WHERE works.run_id = ? AND works.module_id = ?) AS works"
        " ORDER BY made_order DESC LIMIT ?",
        (run_id, module_id, max(0, limit)),
    ).fetchall()
    return tuple(
        ContributionPoint(
            contribution_id=contribution_id,
            round_index=round_index,
            tokens=tokens,
            new_tokens=new_tokens,
            state=state,
            reason=reason,
            outcome=outcome,
            carried_by=tuple((carriers or "").split(",")) if carriers else (),
            made_utc=made_utc,
            state_utc=state_utc,
        )
        for (
            contribution_id,
            round_index,
            tokens,
            new_tokens,
            state,
            reason,
            outcome,
            made_utc,
            state_utc,
            carriers,
        ) in reversed(rows)
    )


def _tokens_by_reason(
    connection: sqlite3.Connection, since_utc: str, outcome: str
) -> dict[str, int]:
    """Return the tokens refused or dropped since then, by the reason, which a carrier may have."""
    rows = connection.execute(
        "SELECT CASE WHEN state = outcome THEN reason ELSE (SELECT carrier.reason FROM carries"
        "  JOIN contributions AS carrier ON carrier.contribution_id = carries.carrier_id"
        "  WHERE carries.carried_id = works.contribution_id AND carrier.state = works.outcome"
        "  LIMIT 1) END AS why, sum(new_tokens)"
        " FROM works WHERE outcome = ? AND at_utc >= ? GROUP BY why",
        (outcome, since_utc),
    ).fetchall()
    by_reason: Counter[str] = Counter()
    for reason, tokens in rows:
        by_reason[reason or _NO_REASON] += tokens
    if outcome == "dropped":
        for reason, tokens in connection.execute(
            "SELECT reason, sum(tokens) FROM discards WHERE at_utc >= ? GROUP BY reason",
            (since_utc,),
        ):
            by_reason[reason or _NO_REASON] += tokens
    return dict(by_reason)


def _tokens_by_outcome(connection: sqlite3.Connection, since_utc: str) -> dict[str, int]:
    return dict(
        connection.execute(
            "SELECT outcome, sum(new_tokens) FROM works WHERE at_utc >= ? GROUP BY outcome",
            (since_utc,),
        ).fetchall()
    )


def _read_discarded(connection: sqlite3.Connection, since_utc: str) -> int:
    return _read_int(connection, "SELECT sum(tokens) FROM discards WHERE at_utc >= ?", since_utc)


def _read_bytes(connection: sqlite3.Connection, day_utc: str) -> dict[str, dict[str, int]]:
    rows = connection.execute(
        "SELECT purpose, sum(sent), sum(received) FROM bytes WHERE day_utc >= ? GROUP BY purpose",
        (day_utc,),
    )
    return {purpose: {"sent": sent, "received": received} for purpose, sent, received in rows}


def read_bytes_in_month(connection: sqlite3.Connection, month: str) -> int:
    """Return the bytes of all days of `month` (like `2026-11`), both directions."""
    query = "SELECT sum(sent + received) FROM bytes WHERE substr(day_utc, 1, 7) = ?"
    return _read_int(connection, query, month)


def read_bytes_by_day(connection: sqlite3.Connection, first_day: str) -> tuple[DayTraffic, ...]:
    """Return the bytes of each day since `first_day`, by purpose, the newest day first."""
    days: dict[str, dict[str, dict[str, int]]] = {}
    for day, purpose, sent, received in connection.execute(
        "SELECT day_utc, purpose, sent, received FROM bytes WHERE day_utc >= ?"
        " ORDER BY day_utc DESC, purpose",
        (first_day,),
    ):
        days.setdefault(day, {})[purpose] = {"sent": sent, "received": received}
    return tuple(DayTraffic(day_utc=day, bytes_by_purpose=found) for day, found in days.items())


def _read_int(connection: sqlite3.Connection, query: str, *values: str) -> int:
    """Return a sum; that of no rows is NULL, which is 0 here."""
    return int(connection.execute(query, values).fetchone()[0] or 0)
