"""The books close: every trained token is in exactly one place."""

from __future__ import annotations

import math
import shutil
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.fakes.books import MODULE, RUN, balance, contribute
from tests.fakes.clock import FakeClock
from volunteer.answers import RoundPoint, Stats
from volunteer.errors import CheckpointTooNewError, StorageFullError
from volunteer.stats.ledger import Ledger
from volunteer.stats.records import Balance, now_utc


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def ledger(tmp_path: Path, clock: FakeClock) -> Iterator[Ledger]:
    """Return an empty ledger that does not wait for the disk (test_database.py does)."""
    ledger = Ledger(tmp_path / "stats.sqlite", utc_now=clock.now_utc)
    ledger._database._connection.execute("PRAGMA synchronous=OFF")
    yield ledger
    ledger.close()


def test_an_empty_ledger_is_all_zeros(ledger: Ledger) -> None:
    assert ledger.stats() == Stats()
    assert ledger.balance() == balance()
    assert ledger.history(RUN, MODULE, 10) == ()


def test_work_moves_from_done_to_confirmed(ledger: Ledger) -> None:
    ledger.set_totals(RUN, MODULE, 1000, 10)
    assert ledger.balance() == balance(not_contributed=1000)
    contribute(ledger, "a", 900)
    assert ledger.balance() == balance(not_contributed=100, in_flight=900)
    assert ledger.mark_contribution("a", "confirmed", "")
    assert ledger.balance() == balance(not_contributed=100, confirmed=900)
    contribute(ledger, "a", 900)
    assert ledger.balance() == balance(not_contributed=100, confirmed=900)


@pytest.mark.parametrize(
    ("carried_state", "carrier_state", "outcome"),
    [
        ("pending", "in_flight", "in_flight"),
        ("pending", "confirmed", "confirmed"),
        ("dropped", "confirmed", "confirmed"),
        ("dropped", "in_flight", "in_flight"),
        ("dropped", "pending", "dropped"),
        ("in_flight", "refused", "refused"),
        ("confirmed", "refused", "confirmed"),
        ("pending", "dropped", "pending"),
        ("refused", "confirmed", "confirmed"),
    ],
)
def test_what_became_of_work_follows_from_its_carriers(
    ledger: Ledger, carried_state: str, carrier_state: str, outcome: str
) -> None:
    contribute(ledger, "a", 1)
    ledger.mark_contribution("a", carried_state, "")
    contribute(ledger, "b", 10, {"a": 1})
    ledger.mark_contribution("b", carrier_state, "")
    places = Counter({outcome: 1})
    places[carrier_state] += 10
    assert ledger.balance() == balance(**places)


def test_each_module_of_each_run_has_books_of_its_own(ledger: Ledger) -> None:
    for run_id, module_id in ((RUN, "dense"), (RUN, "other"), ("b" * 64, "dense")):
        ledger.set_totals(run_id, module_id, 100, 1)
    contribute(ledger, "a", 150)
    assert ledger.balance() == balance(not_contributed=200, in_flight=150)
    assert ledger.record_discarded(RUN, "dense", 50, "no base") == 0
    assert ledger.record_discarded(RUN, "other", 500, "no base") == 100
    assert ledger.balance() == balance(not_contributed=100, in_flight=150, dropped=100)


def test_contributed_work_counts_as_done_before_its_snapshot_is_heard_of(ledger: Ledger) -> None:
    contribute(ledger, "a", 100)
    assert ledger.balance() == balance(in_flight=100)
    ledger.set_totals(RUN, MODULE, 120, 3)
    assert ledger.balance() == balance(in_flight=100, not_contributed=20)
    assert ledger.stats().inner_steps == 3


def test_a_counter_that_goes_back_keeps_what_was_done(ledger: Ledger) -> None:
    ledger.set_totals(RUN, MODULE, 1000, 10)
    contribute(ledger, "a", 900)
    ledger.set_totals(RUN, MODULE, 800, 8)
    assert ledger.balance() == balance(in_flight=900, dropped=100)
    ledger.set_totals(RUN, MODULE, 850, 9)
    assert ledger.balance() == balance(in_flight=900, dropped=100, not_contributed=50)
    assert ledger.stats().inner_steps == 11


def test_discarded_work_that_was_contributed_is_not_dropped(ledger: Ledger) -> None:
    ledger.set_totals(RUN, MODULE, 1000, 10)
    contribute(ledger, "a", 1000)
    assert ledger.record_discarded(RUN, MODULE, 800, "older than what was sent") == 0
    assert ledger.balance() == balance(in_flight=1000)


def test_each_contribution_tells_what_became_of_it(ledger: Ledger, clock: FakeClock) -> None:
    contribute(ledger, "a", 100)
    ledger.mark_contribution("a", "pending", "")
    clock.advance(60)
    contribute(ledger, "b", 50, {"a": 100})
    contribute(ledger, "c", 30, {"a": 100, "b": 50})
    ledger.mark_contribution("b", "pending", "")
    ledger.mark_contribution("c", "confirmed", "")
    a, b, c = ledger.contributions(RUN, MODULE, 10)
    assert (a.contribution_id, a.state, a.outcome) == ("a", "pending", "confirmed")
    assert (a.tokens, a.new_tokens, a.carried_by) == (100, 100, ("b", "c"))
    assert (b.tokens, b.new_tokens, b.carried_by) == (150, 50, ("c",))
    assert (c.tokens, c.new_tokens, c.carried_by, c.outcome) == (180, 30, (), "confirmed")
    assert (a.made_utc, b.made_utc) == ("2026-11-30T08:00:00Z", "2026-11-30T08:01:00Z")
    assert a.listed_in_round is None
    assert ledger.contributions(RUN, MODULE, 1) == (c,)
    assert ledger.contributions(RUN, "other", 10) == ledger.contributions(RUN, MODULE, 0) == ()


def test_lost_tokens_are_told_by_their_reasons(ledger: Ledger) -> None:
    ledger.set_totals(RUN, MODULE, 1000, 10)
    for name, tokens in (("a", 100), ("b", 200), ("d", 7)):
        contribute(ledger, name, tokens)
    contribute(ledger, "c", 50, {"a": 100})
    ledger.mark_contribution("a", "pending", "")
    ledger.mark_contribution("b", "dropped", "more than can be carried")
    ledger.mark_contribution("c", "refused", "not finite")
    ledger.mark_contribution("d", "refused", "")
    ledger.record_discarded(RUN, MODULE, 30, "no base")
    stats = ledger.stats()
    # What the refused one carried is refused with it.
    assert stats.tokens_refused_by_reason == {"not finite": 150, "no reason was noted": 7}
    assert stats.tokens_dropped_by_reason == {"more than can be carried": 200, "no base": 30}
    assert sum(stats.tokens_refused_by_reason.values()) == stats.tokens_refused
    assert sum(stats.tokens_dropped_by_reason.values()) == stats.tokens_dropped
    assert ledger.stats("2026-12-09T00:00:00Z").tokens_dropped_by_reason == {}


def test_a_reason_outlives_being_told_the_same_without_one(ledger: Ledger) -> None:
    contribute(ledger, "a", 100)
    ledger.mark_contribution("a", "dropped", "its blob is gone")
    ledger.mark_contribution("a", "dropped", "")
    assert ledger.contributions(RUN, MODULE, 1)[0].reason == "its blob is gone"
    ledger.mark_contribution("a", "in_flight", "")
    assert ledger.contributions(RUN, MODULE, 1)[0].reason == ""


def test_an_unknown_contribution_or_state_is_told(ledger: Ledger) -> None:
    assert not ledger.mark_contribution("unknown", "confirmed", "")
    with pytest.raises(ValueError, match="not a valid"):
        ledger.mark_contribution("unknown", "lost", "")


def test_wrong_books_are_not_exact() -> None:
    assert balance(confirmed=3, dropped=1).is_exact
    assert not Balance(
        done=3, not_contributed=-1, pending=4, in_flight=0, confirmed=0, refused=0, dropped=0
    ).is_exact
    assert not Balance(
        done=3, not_contributed=1, pending=1, in_flight=0, confirmed=0, refused=0, dropped=0
    ).is_exact


# ----------------------------------------------------------------------- time, bytes, rounds, CSV


def test_sums_since_an_instant(ledger: Ledger, clock: FakeClock) -> None:
    for day in range(3):
        ledger.set_totals(RUN, MODULE, 100 * (day + 1), day + 1)
        contribute(ledger, f"c{day}", 90)
        ledger.add_contributed_s(60.5)
        ledger.add_contributed_s(1.0)
        ledger.add_bytes("gossip", 10, 1)
        ledger.add_bytes("state", 0, 1000)
        clock.advance(86400)
    ledger.mark_contribution("c0", "confirmed", "")
    ledger.mark_contribution("c2", "refused", "not finite")
    since = ledger.stats("2026-12-01T00:00:00Z")
    assert (since.tokens_done, since.inner_steps, since.contributed_s) == (200, 2, 123.0)
    assert (since.tokens_in_flight, since.tokens_refused, since.tokens_confirmed) == (90, 90, 0)
    assert since.tokens_pending == 30
    assert (since.rounds_confirmed, since.rounds_refused) == (0, 1)
    assert since.bytes_by_purpose == {
        "gossip": {"sent": 20, "received": 2},
        "state": {"sent": 0, "received": 2000},
    }
    everything = ledger.stats()
    assert (everything.tokens_done, everything.contributed_s) == (300, 184.5)
    assert everything.done_as_of_utc == "2026-12-02T08:00:00Z"
    assert everything.confirmed_as_of_utc == "2026-12-03T08:00:00Z"
    assert ledger.stats("2026-12-09T00:00:00Z").tokens_done == 0
    of_two_days = ledger.stats_of_last(2 * 86400.0)  # it is 8 o'clock on the third
    assert of_two_days.since_utc == "2026-12-01T00:00:00Z"
    assert of_two_days == msgspec.structs.replace(since, since_utc=of_two_days.since_utc)
    assert ledger.stats_of_last(0.0).since_utc == "2026-12-03T00:00:00Z"
    assert ledger.stats_of_last(3660 * 86400.0).tokens_done == 300


def apply_commit(ledger: Ledger, commit_id: str, round_index: int, *, own: bool = False) -> None:
    ledger.record_round(
        run_id=RUN,
        module_id=MODULE,
        commit_id=commit_id,
        round_index=round_index,
        state_hash=f"hash of {commit_id}",
        num_contributions=round_index + 10,
        own_listed=own,
    )


def ids(points: tuple[RoundPoint, ...]) -> list[str]:
    return [point.commit_id for point in points]


def test_history_follows_the_branch_of_the_tip(ledger: Ledger, clock: FakeClock) -> None:
    for commit_id, round_index in (("a1", 1), ("a2", 2), ("a3", 3), ("a4", 4)):
        apply_commit(ledger, commit_id, round_index, own=commit_id == "a2")
    ledger.record_evaluation("a2", 2.5, stderr=0.25, num_windows=48)
    assert ids(ledger.history(RUN, MODULE, 10)) == ["a1", "a2", "a3", "a4"]
    apply_commit(ledger, "b2", 2)
    apply_commit(ledger, "b3", 3)
    assert ids(ledger.history(RUN, MODULE, 10)) == ["a1", "b2", "b3"]
    clock.advance(60)
    apply_commit(ledger, "a2", 2, own=True)
    assert ids(ledger.history(RUN, MODULE, 10)) == ["a1", "a2"]
    assert ids(ledger.history(RUN, MODULE, 1)) == ["a2"]
    assert ids(ledger.history(RUN, MODULE, 0)) == ids(ledger.history("c" * 64, MODULE, 5)) == []
    assert ledger.history(RUN, MODULE, 1) == (
        RoundPoint(
            round_index=2,
            commit_id="a2",
            state_hash="hash of a2",
            held_out_loss=2.5,
            num_contributions=12,
            applied_utc="2026-11-30T08:01:00Z",
            own_listed=True,
            loss_stderr=0.25,
            num_windows=48,
        ),
    )


def test_a_loss_that_is_not_a_number_is_none(ledger: Ledger) -> None:
    apply_commit(ledger, "a1", 1)
    ledger.record_evaluation("a1", math.nan, stderr=0.0, num_windows=1)
    assert ledger.history(RUN, MODULE, 1)[0].held_out_loss is None


# --------------------------------------------------------------------------------------- the file


def test_everything_is_there_after_reopening(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "stats.sqlite")
    ledger.set_totals(RUN, MODULE, 10, 1)
    made: list[tuple[str, int, tuple[str, ...]]] = [("first", 4, ()), ("second", 10, ("first",))]
    for contribution_id, tokens, carries in made:
        ledger.record_contribution(
            run_id=RUN,
            module_id=MODULE,
            contribution_id=contribution_id,
            round_index=0,
            tokens=tokens,
            new_tokens=tokens - 4 * len(carries),
            carries=carries,
        )
    before = ledger.stats()
    assert before.tokens_in_flight == 10
    assert before.done_as_of_utc[:10] == now_utc()[:10]
    ledger.close()
    ledger = Ledger(tmp_path / "stats.sqlite")
    assert ledger.stats() == before
    ledger.close()


def test_many_threads_may_write(ledger: Ledger) -> None:
    def write(part: int) -> None:
        for number in range(5):
            ledger.add_bytes("gossip", 1, 2)
            contribute(ledger, f"c{part}-{number}", 3)

    threads = [threading.Thread(target=write, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.stats().bytes_by_purpose == {"gossip": {"sent": 20, "received": 40}}
    assert ledger.balance() == balance(in_flight=60)


@pytest.mark.parametrize("damage", ["noise", "cut", "folder"])
def test_a_damaged_file_is_kept_aside_and_a_new_one_begun(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "stats.sqlite"
    ledger = Ledger(file)
    contribute(ledger, "a", 5)
    ledger.close()
    if damage == "folder":
        file.unlink()
        (file / "inner").mkdir(parents=True)
    else:
        file.write_bytes(b"noise" * 2000 if damage == "noise" else file.read_bytes()[:9000])
    ledger = Ledger(file)
    assert ledger.balance() == balance()
    contribute(ledger, "b", 6)
    assert ledger.balance() == balance(in_flight=6)
    assert "stats damaged" in caplog.text
    assert (tmp_path / "quarantine" / "stats.sqlite").exists()
    ledger.close()


def test_the_log_of_a_lost_file_is_not_replayed_into_the_new_one(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "stats.sqlite")
    contribute(ledger, "a", 5)
    killed_dir = tmp_path / "killed"
    (killed_dir / "stats.sqlite").mkdir(parents=True)
    shutil.copy(tmp_path / "stats.sqlite-wal", killed_dir)
    ledger.close()
    ledger = Ledger(killed_dir / "stats.sqlite")
    assert ledger.balance() == balance()
    ledger.close()
    kept = {file.name for file in (killed_dir / "quarantine").iterdir()}
    assert kept == {"stats.sqlite", "stats.sqlite-wal"}


def test_damage_that_shows_while_open_does_not_stop_the_books(tmp_path: Path) -> None:
    file = tmp_path / "stats.sqlite"
    ledger = Ledger(file)
    contribute(ledger, "a", 5)
    ledger.close()
    ledger = Ledger(file)
    ledger._database._connection.execute("PRAGMA shrink_memory")  # forget the pages read so far
    with file.open("r+b") as stream:
        stream.seek(4096)
        stream.write(b"\xff" * 4096 * 30)
    contribute(ledger, "b", 6)
    assert ledger.balance() == balance(in_flight=6)
    assert (tmp_path / "quarantine" / "stats.sqlite").exists()
    ledger.close()


def test_a_newer_file_is_told_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "stats.sqlite"
    connection = sqlite3.connect(file)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(CheckpointTooNewError, match="version 99"):
        Ledger(file)
    assert not (tmp_path / "quarantine").exists()


def test_a_full_disk_is_told_and_writes_nothing(ledger: Ledger) -> None:
    contribute(ledger, "a", 5)
    ledger._database.run(  # a small limit behaves like a full disk
        lambda connection: connection.execute("PRAGMA max_page_count = 1").fetchone()
    )
    with pytest.raises(StorageFullError):
        contribute(ledger, "b" * 10_000, 6)
    assert ledger.balance() == balance(in_flight=5)
