"""Back-off, timing, remembered peers, and the run that is joined."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.fakes.members import PEOPLE
from tests.fakes.virtual_time import in_nursery, run_virtual, until
from volunteer.agent.backoff import CRASH_WINDOW_S, MAX_CRASHES, QUARANTINE_S, Backoff
from volunteer.agent.clock import now_s, now_utc
from volunteer.agent.joined_run import chain_rules, choose_run, keep_run
from volunteer.agent.peer_memory import MAX_ADDRS, MAX_FILE_BYTES, MAX_PEERS, PeerMemory
from volunteer.agent.timing import MAX_SYNC_S, MIN_SYNC_S, ExchangeClock
from volunteer.data.builtin import load_builtin_run
from volunteer.errors import RunSpecError
from volunteer.locations import HOME_VARIABLE, Locations
from volunteer.run import RoundSpec, RunSpec, format_run_spec, read_run_spec, signed_bytes

ADDR = "/ip4/192.0.2.1/tcp/4001"


def test_crashes_in_a_row_wait_twice_as_long_and_then_give_up() -> None:
    backoff = Backoff()
    rare_s = iter(range(0, 100 * int(CRASH_WINDOW_S), int(CRASH_WINDOW_S)))
    waits = [backoff.note_crash(next(rare_s)) for _ in range(MAX_CRASHES - 1)]
    assert waits == [1.0, 2.0, 4.0, 8.0]
    assert not backoff.is_broken
    assert backoff.note_crash(next(rare_s)) == QUARANTINE_S
    assert backoff.is_broken
    backoff.begin_trial()
    assert not backoff.is_broken
    assert backoff.note_crash(next(rare_s)) == QUARANTINE_S, "one try, if it comes to nothing"
    backoff.begin_trial()
    backoff.note_progress()
    assert [backoff.note_crash(next(rare_s)) for _ in range(2)] == [1.0, 2.0]
    backoff.forgive()
    assert backoff.note_crash(next(rare_s)) == 1.0


def test_crashes_within_a_time_count_whatever_was_done_between_them() -> None:
    backoff = Backoff()
    between_s = CRASH_WINDOW_S / MAX_CRASHES
    for number in range(MAX_CRASHES - 1):
        assert backoff.note_crash(number * between_s) == 1.0
        backoff.note_progress()
        assert not backoff.is_broken
    assert backoff.note_crash(MAX_CRASHES * between_s - 1) == QUARANTINE_S
    backoff.forgive()
    for number in range(20, 30):
        assert backoff.note_crash(number * between_s * 1.3) == 1.0, "rare ones never do"
        backoff.note_progress()


def test_the_clock_goes_on_and_the_date_is_for_people() -> None:
    assert now_s() <= now_s()
    assert len(now_utc()) == len("2026-11-30T08:15:00Z")


# ----------------------------------------------------------------------------------- timing


def test_without_a_measurement_the_round_decides() -> None:
    clock = ExchangeClock(RoundSpec(round_s=600.0, min_grace_s=2.0))
    assert (clock.grace_s, clock.failover_s, clock.sync_s) == (30.0, 30.0, 18.0)
    assert ExchangeClock(RoundSpec(round_s=8.0, min_grace_s=1.0)).grace_s == 1.0


def test_slow_exchanges_make_everybody_wait_longer() -> None:
    clock = ExchangeClock(RoundSpec(round_s=600.0))
    for duration_s in (10.0, 10.0, 500.0):
        clock.note_exchange(duration_s)
    assert (clock.exchange_s, clock.grace_s, clock.failover_s) == (10.0, 40.0, 120.0)


@given(
    round_s=st.floats(1.0, 86400.0),
    min_grace_s=st.floats(0.01, 3600.0),
    exchanges_s=st.lists(st.floats(0.0, 1e5), max_size=80),
)
def test_the_timing_is_always_possible(
    round_s: float, min_grace_s: float, exchanges_s: list[float]
) -> None:
    clock = ExchangeClock(RoundSpec(round_s=round_s, min_grace_s=min_grace_s))
    for duration_s in exchanges_s:
        clock.note_exchange(duration_s)
    assert clock.grace_s >= min_grace_s
    assert clock.grace_s <= max(0.5 * round_s, min_grace_s)
    assert clock.grace_s <= clock.failover_s <= max(round_s, clock.grace_s)
    assert MIN_SYNC_S <= clock.sync_s <= MAX_SYNC_S


# ------------------------------------------------------------------------------ peer memory


def saved(memory: PeerMemory) -> None:
    memory._save()


def test_peers_are_remembered_over_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        memory = PeerMemory(file)
        assert memory.load() == {}
        nursery.start_soon(memory.run)
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(5.0)
        await trio.testing.wait_all_tasks_blocked()
        assert not file.exists(), "nothing to save"
        memory.note("a", (ADDR,))
        clock.jump(5.0)
        await until(file.exists)

    run_virtual(in_nursery(body))
    assert PeerMemory(file).load() == {"a": (ADDR,)}


def test_only_the_peers_heard_last_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    memory = PeerMemory(file)
    for number in range(MAX_PEERS):
        memory.note(f"p{number}", (ADDR,))
    memory.note("p0", (ADDR, "/ip4/192.0.2.2/tcp/1"))
    memory.note("new", (ADDR,))
    saved(memory)
    known = PeerMemory(file).load()
    assert len(known) == MAX_PEERS
    assert "p1" not in known
    assert "p0" in known
    assert "new" in known


def test_a_file_with_too_many_is_cut(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    file.write_bytes(msgspec.json.encode({f"p{n}": [ADDR] for n in range(MAX_PEERS + 9)}))
    known = PeerMemory(file).load()
    assert list(known) == [f"p{n}" for n in range(9, MAX_PEERS + 9)]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"[]",
        b'{"a": "b"}',
        b'{"a": ["\xff"]}',
        b'{"a": ' + b"[" * 100_000,
        b'{"a": ["' + b"x" * 201 + b'"]}',
        b'{"a": ["' + b'/x","' * MAX_ADDRS + b'"]}',
        b" " * (MAX_FILE_BYTES + 1),
    ],
    ids=range(9),
)
def test_a_damaged_file_is_written_anew(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "peers.json"
    file.write_bytes(content)
    memory = PeerMemory(file)
    assert memory.load() == {}
    assert "written anew" in caplog.text
    memory.note("a", (ADDR,))
    saved(memory)
    assert PeerMemory(file).load() == {"a": (ADDR,)}


def test_a_folder_in_its_place_costs_the_memory_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "peers.json"
    file.mkdir()
    memory = PeerMemory(file)
    assert memory.load() == {}
    memory.note("a", (ADDR,))
    saved(memory)
    assert "not remembered" in caplog.text


def test_what_strangers_say_never_fills_the_file(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    memory = PeerMemory(file)
    for number in range(200):
        odd = tuple("/" + "\x00" * 199 for _ in range(8))
        plain = tuple("/" + "x" * 199 for _ in range(8))
        memory.note(f"{number:052d}", odd)
        memory.note(f"{number:052d}", plain)
        memory.note(f"q{number}", ("no address", "", '/"', "/\\"))
    saved(memory)
    assert file.stat().st_size <= MAX_FILE_BYTES
    known = PeerMemory(file).load()
    assert len(known) == MAX_PEERS
    assert all(addr.startswith("/x") for addrs in known.values() for addr in addrs)


# ------------------------------------------------------------------------------- joined run


def published(who: int = 0, *, signed_by: int = 0) -> RunSpec:
    spec = msgspec.structs.replace(load_builtin_run("demo"), publisher=PEOPLE[who].peer_id)
    signature = PEOPLE[signed_by].sign(signed_bytes(spec)).hex()
    return msgspec.structs.replace(spec, signature=signature)


def write(tmp_path: Path, spec: RunSpec) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(format_run_spec(spec), "utf-8")
    return file


def test_the_built_in_run_is_the_default() -> None:
    assert choose_run(None, None) == load_builtin_run("commons")


def test_a_published_run_is_its_publishers(tmp_path: Path) -> None:
    spec = published()
    assert choose_run(write(tmp_path, spec), None) == spec
    with pytest.raises(RunSpecError, match="publisher's"):
        choose_run(write(tmp_path, spec), 60.0)


@pytest.mark.parametrize(
    "spec",
    [
        published(signed_by=1),
        msgspec.structs.replace(published(), signature=""),
        msgspec.structs.replace(published(), description="changed since"),
        msgspec.structs.replace(published(), publisher="nobody"),
    ],
    ids=["another's", "none", "of something else", "no peer"],
)
def test_a_signature_that_is_not_the_publishers_is_refused(tmp_path: Path, spec: RunSpec) -> None:
    with pytest.raises(RunSpecError, match="signature is not that of") as refused:
        choose_run(write(tmp_path, spec), None)
    assert "allmende publish FILE" in refused.value.hint


def test_another_round_length_is_another_run() -> None:
    own = choose_run(None, 12.5)
    assert own.rounds.round_s == 12.5
    assert own.name == "commons-12.5s"
    assert own.run_id != load_builtin_run("commons").run_id


@pytest.mark.parametrize("round_s", [0.0, -1.0, 0.99, 86401.0, float("nan"), float("inf"), 1e300])
def test_a_round_length_out_of_range_is_refused(round_s: float) -> None:
    with pytest.raises(RunSpecError, match="--round-s"):
        choose_run(None, round_s)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunSpecError):
        choose_run(tmp_path / "nothing.toml", None)


def test_the_run_is_kept_where_the_children_look(tmp_path: Path) -> None:
    locations = Locations.from_environment({HOME_VARIABLE: str(tmp_path)})
    spec = published()
    run_dir = keep_run(spec, locations)
    assert keep_run(spec, locations) == run_dir, "twice is harmless"
    assert read_run_spec(run_dir / "spec.toml") == spec
    assert (run_dir / "modules" / "dense" / "blobs").is_dir()


def test_the_rules_are_the_specs() -> None:
    spec = published()
    two_thirds = msgspec.structs.replace(
        spec, rounds=msgspec.structs.replace(spec.rounds, quorum="2/3", expiry_rounds=5)
    )
    found = chain_rules(two_thirds)
    assert (found.quorum_numerator, found.quorum_denominator) == (2, 3)
    assert (found.publisher, found.expiry_rounds) == (PEOPLE[0].peer_id, 5)
    assert found.run_id == two_thirds.run_id != spec.run_id
