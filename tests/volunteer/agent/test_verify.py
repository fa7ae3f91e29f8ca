"""A demo's folder that was tampered with: what is wrong is named, and nothing ends in a traceback.

The aggregator is a twin; `tests/system/test_demo.py` replays with the real one.
"""

from __future__ import annotations

import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from p2p.blobstore import BlobStore
from tests.fakes.members import PEOPLE
from tests.fakes.network import FakeNetwork
from tests.fakes.solo import GENESIS_STATE, Disk, FakeAggregator, Solo, solo_spec
from tests.fakes.virtual_time import in_nursery, run_threads_inline, run_virtual
from volunteer.agent import demo as demo_module
from volunteer.agent import driver as driver_module
from volunteer.agent import verify as verify_module
from volunteer.agent.aggregator_service import AggregatorLostError
from volunteer.agent.record_log import RecordLog
from volunteer.agent.verify import DemoCheck, verify_demo
from volunteer.errors import VolunteerError
from volunteer.locations import HOME_VARIABLE, Locations
from volunteer.messages import AggregatorCommand, AggregatorEvent
from volunteer.rounds.records import (
    Commit,
    encode_envelope,
    parse_body,
    parse_envelope,
    record_id_of,
)
from volunteer.run import RunSpec, format_run_spec

NUM_ROUNDS = 5


class TwinService(FakeAggregator):
    """The aggregator as the check starts it."""

    is_broken = False

    def __init__(self, run_dir: Path, module_id: str, log_file: Path) -> None:
        super().__init__(BlobStore(run_dir / "modules" / module_id / "blobs"))

    async def run(self) -> None:
        await trio.sleep_forever()

    def want(self) -> None:
        pass

    async def ask(self, make: Callable[[int], AggregatorCommand]) -> AggregatorEvent:
        if self.is_broken:
            raise AggregatorLostError
        return await super().ask(make)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return what a demo of two volunteers leaves."""
    with monkeypatch.context() as patch:
        patch.setattr(driver_module, "now_s", trio.current_time)
        patch.setattr(trio.to_thread, "run_sync", run_threads_inline)
        run_virtual(in_nursery(lambda nursery, clock: train(tmp_path, nursery, clock)), jumps=True)
    monkeypatch.setattr(verify_module, "AggregatorService", TwinService)
    (tmp_path / "demo.toml").write_text(format_run_spec(solo_spec()), "utf-8")
    return tmp_path


async def train(
    folder: Path, nursery: trio.Nursery, clock: MockClock, spec: RunSpec | None = None
) -> None:
    network = FakeNetwork()
    disks = [Disk(module_dir(folder, n, spec), PEOPLE[n]) for n in range(2)]
    disks[0].store.add_bytes(GENESIS_STATE)
    solos = [Solo(disk, nursery, network, spec) for disk in disks]
    for solo in solos:
        await solo.start()
        nursery.start_soon(solo.exchange.run, 0.5, lambda: None)
    await solos[0].until(lambda: all(solo.height >= NUM_ROUNDS for solo in solos))
    await solos[0].until(lambda: solos[0].machine.tip == solos[1].machine.tip)
    for solo in solos:
        solo.close()


def module_dir(folder: Path, number: int, spec: RunSpec | None = None) -> Path:
    home = Locations.from_environment({HOME_VARIABLE: str(folder / f"volunteer-{number}")})
    return home.module_dir((spec or solo_spec()).run_id, "dense")


def envelopes(folder: Path, number: int) -> list[bytes]:
    log = RecordLog(module_dir(folder, number) / "records.sqlite")
    found = list(log.all())
    log.close()
    return found


def commits(folder: Path) -> list[Commit]:
    """Return the chain below the highest commit, the lowest first: others may fork off."""
    bodies = [parse_envelope(data).body for data in envelopes(folder, 0)]
    records = {record_id_of(body): parse_body(body) for body in bodies}
    found = {i: record for i, record in records.items() if isinstance(record, Commit)}
    chain = [max(found.values(), key=lambda commit: commit.round_index)]
    while chain[-1].parent in found:
        chain.append(found[chain[-1].parent])
    return chain[::-1]


def change_rows(folder: Path, number: int, statement: str, *values: object) -> None:
    connection = sqlite3.connect(module_dir(folder, number) / "records.sqlite")
    changed = connection.execute(statement, values).rowcount
    connection.commit()
    connection.close()
    assert changed > 0


def problems(folder: Path) -> str:
    check = verify_demo(folder)
    assert isinstance(check, DemoCheck)
    assert check.problems
    return "\n".join(check.problems)


def test_an_honest_folder_has_no_problems(folder: Path) -> None:
    check = verify_demo(folder)
    assert check.problems == []
    assert check.commits_reproduced == check.num_commits >= NUM_ROUNDS
    assert check.drops_noticed == check.drops_tried > NUM_ROUNDS
    assert set(check.listed_by_author) == {PEOPLE[0].peer_id, PEOPLE[1].peer_id}
    assert len(check.heads) == 2
    assert f"{check.num_commits} of {check.num_commits} commits" in " ".join(check.sentences())


def test_a_given_genesis_is_taken_from_whoever_has_it_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = solo_spec(is_given=True)
    with monkeypatch.context() as patch:
        patch.setattr(driver_module, "now_s", trio.current_time)
        patch.setattr(trio.to_thread, "run_sync", run_threads_inline)
        run_virtual(
            in_nursery(lambda nursery, clock: train(tmp_path, nursery, clock, spec)), jumps=True
        )
    monkeypatch.setattr(verify_module, "AggregatorService", TwinService)
    (tmp_path / "demo.toml").write_text(format_run_spec(spec), "utf-8")
    check = verify_demo(tmp_path)
    assert check.problems == []
    assert check.given_genesis == spec.genesis.state_hash
    assert "weights that cannot be computed" in " ".join(check.sentences())
    for number in range(2):
        store = BlobStore(module_dir(tmp_path, number, spec) / "blobs")
        assert store.has(spec.genesis.state_hash), "the second one has fetched it"
        store.delete(spec.genesis.state_hash)
    assert "nobody has the weights that the run begins from" in problems(tmp_path)


def listed_blob(folder: Path) -> str:
    listed = commits(folder)[2].contributions[0]
    for data in envelopes(folder, 0):
        record = parse_body(parse_envelope(data).body)
        if record_id_of(parse_envelope(data).body) == listed:
            assert not isinstance(record, Commit)
            return str(record.blob_id)  # type: ignore[union-attr]
    raise AssertionError(listed)


@pytest.mark.parametrize("who", [[0], [0, 1]], ids=["one copy", "both copies"])
def test_a_flipped_byte_is_named(folder: Path, who: list[int]) -> None:
    blob_id = listed_blob(folder)
    for number in who:
        file = module_dir(folder, number) / "blobs" / blob_id
        if not file.exists():
            continue
        data = bytearray(file.read_bytes())
        data[0] ^= 1
        file.write_bytes(data)
    text = problems(folder)
    assert f"damaged blob {blob_id[:12]}" in text
    assert ("nobody has it" in text) == (len(who) == 2)
    assert ("the replay ended after 2 commits" in text) == (len(who) == 2)


def test_a_missing_blob_is_named(folder: Path) -> None:
    blob_id = listed_blob(folder)
    for number in range(2):
        (module_dir(folder, number) / "blobs" / blob_id).unlink(missing_ok=True)
    assert f"lists blob {blob_id[:12]}: nobody has it" in problems(folder)


def test_a_forged_signature_is_named(folder: Path) -> None:
    data = envelopes(folder, 1)[0]
    envelope = parse_envelope(data)
    forged = encode_envelope(
        envelope.body, bytes([envelope.signature[0] ^ 1]) + envelope.signature[1:]
    )
    change_rows(folder, 1, "UPDATE records SET envelope = ? WHERE envelope = ?", forged, data)
    assert "volunteer-1 keeps a forged record: the signature is not its author's" in problems(
        folder
    )


def test_a_damaged_record_is_named(folder: Path) -> None:
    change_rows(folder, 0, "UPDATE records SET envelope = ? WHERE number = 3", b"\x00garbage")
    assert "volunteer-0: " in problems(folder)
    assert "does not match its id" in problems(folder)


def test_a_damaged_database_is_named(folder: Path) -> None:
    file = module_dir(folder, 0) / "records.sqlite"
    for beside in file.parent.glob("records.sqlite-*"):
        beside.unlink()
    file.write_bytes(b"no database" * 1000)
    assert "volunteer-0: " in problems(folder)


def test_a_volunteer_without_records_is_named(folder: Path) -> None:
    (folder / "volunteer-2").mkdir()
    assert "volunteer-2 has no records of this run" in problems(folder)
    assert list((folder / "volunteer-2").iterdir()) == [], "nothing is made there"


@pytest.mark.slow  # SQLite waits a second
def test_records_that_are_being_used_are_told(folder: Path) -> None:
    log = RecordLog(module_dir(folder, 0) / "records.sqlite")
    log.note("kind", "payload")
    try:
        with pytest.raises(VolunteerError, match="cannot be read") as caught:
            verify_demo(folder)
        assert "end the agent" in caught.value.hint
    finally:
        log.close()


def test_a_volunteer_that_lags_on_the_same_branch_is_fine(folder: Path) -> None:
    last = commits(folder)[-1]
    change_rows(folder, 1, "DELETE FROM records WHERE round_index >= ?", last.round_index)
    check = verify_demo(folder)
    assert check.problems == []
    assert check.heads[0] != check.heads[1]


def test_a_broken_aggregator_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TwinService, "is_broken", True)
    assert "the replay ended after 0 commits" in problems(folder)


def test_a_state_that_does_not_follow_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tests.fakes.solo.applied", lambda parent, blobs: f"{parent} another rule".encode()
    )
    text = problems(folder)
    assert "gives another state than it says" in text
    assert "is listed with content in only 0 commits" in text


def test_a_contribution_without_effect_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = TwinService.ask
    first = commits(folder)[0]

    async def ask_again(
        self: TwinService, make: Callable[[int], AggregatorCommand]
    ) -> AggregatorEvent:
        reply = await ask(self, make)
        if hasattr(make(1), "listed") and not make(1).listed:  # type: ignore[union-attr]
            return type(reply)(  # type: ignore[call-arg]
                request_id=1, state_hash=first.state_hash, outcomes=()
            )
        return reply

    monkeypatch.setattr(TwinService, "ask", ask_again)
    if len(first.contributions) == 1:
        assert "does not depend on" in problems(folder)
    else:
        assert verify_demo(folder).problems == []


def test_what_is_no_demo_is_told(tmp_path: Path) -> None:
    with pytest.raises(VolunteerError, match="not a demo's folder"):
        verify_demo(tmp_path)
    (tmp_path / "demo.toml").write_text("format = 1")
    with pytest.raises(VolunteerError, match="not a demo's folder"):
        verify_demo(tmp_path)
    (tmp_path / "volunteer-0").mkdir()
    with pytest.raises(VolunteerError, match="name"):
        verify_demo(tmp_path)


# ------------------------------------------------------------------------- the demo's own part


def run_main(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        demo_module.main(argv)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_verifying_prints_what_was_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("--verify", str(folder)) == 0
    assert "reproduced bit for bit" in capsys.readouterr().out
    assert run_main("--verify", str(folder), "--json") == 0
    assert '"problems":[]' in capsys.readouterr().out
    blob_id = listed_blob(folder)
    for number in range(2):
        (module_dir(folder, number) / "blobs" / blob_id).unlink(missing_ok=True)
    assert run_main("--verify", str(folder)) == 1
    assert "problem: commit" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--dir", "d", "--volunteers", "0"],
        ["--dir", "d", "--volunteers", "-1"],
        ["--dir", "d", "--volunteers", "17"],
        ["--dir", "d", "--volunteers", "many"],
        ["--dir", "d", "--minutes", "0"],
        ["--dir", "d", "--minutes", "nan"],
        ["--dir", "d", "--minutes", "1e9"],
    ],
)
def test_bad_arguments_start_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_main(*argv) == 2
    assert not list(tmp_path.iterdir())


def test_folders_that_cannot_be_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run_main("--dir", str(tmp_path / "file" / "d")) == 1
    assert run_main("--dir", str(tmp_path / "file")) == 1
    assert run_main("--verify", str(tmp_path)) == 1
    errors = capsys.readouterr().err
    assert errors.count("allmende: ") == 3
    assert "Traceback" not in errors


DEAD = "import sys; sys.exit(1)"
REFUSING = "import sys; sys.exit('2026-11-30 22:00:00,000 ERROR volunteer.agent it needs 8 GB')"
MUTE = "import time; time.sleep(1000)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "said"),
    [(DEAD, "see /"), (MUTE, "see /"), (REFUSING, "volunteer.agent it needs 8 GB")],
    ids=["ends at once", "never answers", "says why"],
)
def test_an_agent_that_does_not_come_up_is_told_and_all_are_ended(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: str,
    said: str,
) -> None:
    started = []
    popen = subprocess.Popen

    def start(argv: list[str], **options: Any) -> object:
        process = popen([argv[0], "-S", "-c", program], **options)
        started.append(process)
        return process

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(demo_module, "UP_DEADLINE_S", 20.0 if program is REFUSING else 0.3)
    assert run_main("--dir", str(tmp_path / "d"), "--volunteers", "2") == 1
    assert f"did not come up: {said}" in capsys.readouterr().err
    assert [process.poll() is not None for process in started] == [True]
