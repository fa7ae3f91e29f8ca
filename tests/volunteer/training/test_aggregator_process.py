"""The aggregator as the agent meets it: a real process, lines in, lines out, files between."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec
import pytest

from p2p.blobstore import BlobStore, blob_id_of_bytes
from tests.volunteer.training.synthetic import gradient, make_spec
from tests.volunteer.training.synthetic_run import SyntheticRound, blob_key, synthetic_rounds
from volunteer.messages import (
    AggregatorEvent,
    AggregatorFailed,
    AggregatorStarted,
    ApplyCommit,
    BlobValidated,
    BuildGenesis,
    EvaluateState,
    ListedWork,
    StateBuilt,
    StateEvaluated,
    StateVerified,
    ValidateBlob,
    VerifyState,
    aggregator_event_decoder,
    encode_line,
)
from volunteer.run import RunSpec, format_run_spec
from volunteer.training.compression import encode
from volunteer.training.content_hash import content_hash_of
from volunteer.training.contribution_blob import write_contribution_blob
from volunteer.training.layout import num_parameters
from volunteer.training.state import read_state

REPOSITORY = Path(__file__).parents[3]
UNKNOWN = "f" * 64
SPEC = make_spec()

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(120)]


class Process:
    """One aggregator and its run directory."""

    def __init__(self, run_dir: Path, spec: RunSpec = SPEC) -> None:
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "spec.toml").write_text(format_run_spec(spec), "utf-8")
        self.store = BlobStore(run_dir / "modules" / "dense" / "blobs")
        self.log_file = run_dir / "log"
        with self.log_file.open("ab") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "volunteer.training.aggregator", "--run-dir", str(run_dir)],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.request_id = 0

    @property
    def stdin(self) -> IO[bytes]:
        assert self.child.stdin is not None
        return self.child.stdin

    def read(self) -> AggregatorEvent:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line, self.log_file.read_text("utf-8")
        return aggregator_event_decoder.decode(line)

    def ask_raw(self, line: bytes) -> AggregatorEvent:
        self.stdin.write(line)
        self.stdin.flush()
        return self.read()

    def ask(self, make: Callable[[int], msgspec.Struct]) -> AggregatorEvent:
        self.request_id += 1
        event = self.ask_raw(encode_line(make(self.request_id)))
        assert not isinstance(event, AggregatorStarted)
        assert event.request_id == self.request_id
        return event

    def genesis(self) -> StateBuilt:
        event = self.ask(lambda n: BuildGenesis(request_id=n))
        assert isinstance(event, StateBuilt), event
        return event

    def apply(self, parent: str, listed: tuple[ListedWork, ...]) -> AggregatorEvent:
        return self.ask(
            lambda n: ApplyCommit(request_id=n, round_index=0, parent_state=parent, listed=listed)
        )

    def validate(
        self,
        blob_id: str,
        round_index: int = 0,
        codec: str = "int4",
        author: str = "peer-0",
        content_hash: str | None = None,
    ) -> AggregatorEvent:
        if content_hash is None:  # what an honest record says
            is_here = blob_id in self.store.list_ids()
            content_hash = content_hash_of(self.store.file_of(blob_id)) if is_here else UNKNOWN
        return self.ask(
            lambda n: ValidateBlob(
                request_id=n,
                blob_id=blob_id,
                author=author,
                round_index=round_index,
                codec=codec,
                codec_version=1,
                content_hash=content_hash,
            )
        )

    def close(self) -> int:
        self.stdin.close()
        return self.child.wait(60)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def start_one(name: str = "a", spec: RunSpec = SPEC) -> Process:
        process = Process(tmp_path / name, spec)
        processes.append(process)
        return process

    yield start_one
    for process in processes:
        if process.child.poll() is None:
            process.child.kill()
        process.child.wait(60)
        for stream in (process.child.stdin, process.child.stdout):
            if stream is not None:
                stream.close()


def one_round(spec: RunSpec = SPEC) -> SyntheticRound:
    return next(synthetic_rounds(spec, 1, 4))


def test_a_run_from_genesis_to_a_measured_state(start: Callable[..., Process]) -> None:
    process = start()
    assert process.read() == AggregatorStarted()
    genesis = process.genesis()
    assert genesis.state_hash == SPEC.genesis.state_hash
    item = one_round()
    for index, blob in enumerate(item.blobs):
        verdict = process.validate(process.store.add_bytes(blob), author=f"peer-{index}")
        assert isinstance(verdict, BlobValidated)
        assert verdict.reason == ""
    built = process.apply(genesis.state_hash, item.listed)
    assert isinstance(built, StateBuilt), built
    assert built.state_hash == item.state_hash
    assert [o.contribution_id for o in built.outcomes] == [w.contribution_id for w in item.listed]
    assert sum(outcome.weight for outcome in built.outcomes) == pytest.approx(1.0)
    read_state(process.store.file_of(built.state_hash), num_parameters(SPEC.model))
    evaluated = process.ask(lambda n: EvaluateState(request_id=n, state_hash=built.state_hash))
    assert isinstance(evaluated, StateEvaluated), evaluated
    assert 5.0 < evaluated.held_out_loss < 6.0  # ln 256 is 5.55
    verified = process.ask(lambda n: VerifyState(request_id=n, state_hash=built.state_hash))
    assert isinstance(verified, StateVerified), verified
    no_state_id = process.store.add_bytes(item.blobs[0])
    no_state = process.ask(lambda n: VerifyState(request_id=n, state_hash=no_state_id))
    assert isinstance(no_state, AggregatorFailed), no_state
    assert process.apply(genesis.state_hash, ()).__class__ is StateBuilt
    assert not list(process.store.directory.glob(".tmp-*"))
    assert process.close() == 0


def test_what_is_missing_damaged_or_wrong_is_named_and_it_goes_on(
    start: Callable[..., Process],
) -> None:
    process = start()
    process.read()
    genesis = process.genesis().state_hash
    item = one_round()
    ids = [process.store.add_bytes(blob) for blob in item.blobs]

    def failed(event: AggregatorEvent, error: str, word: str) -> None:
        assert isinstance(event, AggregatorFailed), event
        assert event.error == error
        assert word in event.message

    failed(process.validate(UNKNOWN), "BlobUnavailableError", UNKNOWN)
    failed(process.validate("../../spec.toml"), "BlobUnavailableError", "spec.toml")
    failed(process.apply(UNKNOWN, ()), "BlobUnavailableError", UNKNOWN)
    failed(process.apply(ids[0], ()), "CheckpointCorruptError", "state")
    missing = msgspec.structs.replace(item.listed[1], blob_id=UNKNOWN)
    failed(process.apply(genesis, (item.listed[0], missing)), "BlobUnavailableError", UNKNOWN)
    no_blob = msgspec.structs.replace(item.listed[1], blob_id=genesis)
    failed(process.apply(genesis, (no_blob,)), "ContributionRejectedError", genesis)
    copied = msgspec.structs.replace(item.listed[1], blob_id=ids[0])
    failed(process.apply(genesis, (copied,)), "ContributionRejectedError", "author")
    other_round = msgspec.structs.replace(item.listed[0], round_index=5)
    failed(process.apply(genesis, (other_round,)), "ContributionRejectedError", "round_index")

    for blob_id, kwargs, word in (
        (ids[0], {"round_index": 5}, "round_index"),
        (ids[0], {"codec": "topk"}, "codec"),
        (ids[0], {"author": "a copier"}, "author"),
        (genesis, {}, "format"),
        (process.store.add_bytes(b""), {}, "empty"),
        (process.store.add_bytes(item.blobs[0][:-1]), {}, "bytes"),
        (ids[0], {"content_hash": UNKNOWN}, "another content than its record says"),
        (ids[0], {"content_hash": ""}, "does not say"),
    ):
        verdict = process.validate(blob_id, **kwargs)
        assert isinstance(verdict, BlobValidated), verdict
        assert word in verdict.reason

    damaged = bytearray(item.blobs[2])
    damaged[-1] ^= 0x30
    process.store.file_of(ids[2]).write_bytes(bytes(damaged))
    failed(process.apply(genesis, item.listed), "BlobCorruptError", ids[2])
    process.store.delete(ids[2])
    process.store.add_bytes(item.blobs[2])
    built = process.apply(genesis, item.listed)
    assert isinstance(built, StateBuilt)
    assert built.state_hash == item.state_hash


def test_lines_that_are_no_commands_are_answered_and_it_goes_on(
    start: Callable[..., Process],
) -> None:
    process = start()
    process.read()
    for line, request_id in (
        (b"\n", -1),
        (b"nonsense\n", -1),
        (b"\xff\xfe\x00\n", -1),
        (b"[" * 100_000 + b"\n", -1),
        (b"x" * (3 * 2**20) + b"\n", -1),
        (b'{"type":"build_genesis"}\n', -1),
        (b'{"type":"unknown","request_id":12}\n', 12),
        (b'{"type":"apply_commit","request_id":13,"parent_state":5,"listed":[]}\n', 13),
        (b'{"type":"evaluate_state","request_id":1.5}\n', -1),
    ):
        event = process.ask_raw(line)
        assert isinstance(event, AggregatorFailed), line[:40]
        assert event.request_id == request_id, line[:40]
    assert process.genesis().state_hash == SPEC.genesis.state_hash


def test_a_spec_whose_genesis_is_another_is_refused(start: Callable[..., Process]) -> None:
    genesis = msgspec.structs.replace(SPEC.genesis, state_hash="1" * 64)
    process = start("b", msgspec.structs.replace(SPEC, genesis=genesis))
    process.read()
    event = process.ask(lambda n: BuildGenesis(request_id=n))
    assert isinstance(event, AggregatorFailed)
    assert event.error == "RunSpecError"
    assert SPEC.genesis.state_hash in event.message
    assert process.store.list_ids() == ()


def test_without_a_valid_spec_it_says_so_and_ends(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text("format = 2", "utf-8")
    child = subprocess.run(
        [sys.executable, "-m", "volunteer.training.aggregator", "--run-dir", str(tmp_path)],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    event = aggregator_event_decoder.decode(child.stdout)
    assert isinstance(event, AggregatorFailed)
    assert (child.returncode, event.error) == (1, "RunSpecError")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and priorities")
def test_it_yields_ignores_ctrl_c_and_ends_when_told(start: Callable[..., Process]) -> None:
    process = start()
    process.read()
    pid = process.child.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    os.kill(pid, signal.SIGINT)
    assert process.genesis().state_hash == SPEC.genesis.state_hash
    os.kill(pid, signal.SIGTERM)
    assert process.child.wait(60) != 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the end of stdin has to do")
def test_it_does_not_outlive_its_parent_even_if_its_stdin_stays_open(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "spec.toml").write_text(format_run_spec(SPEC), "utf-8")
    ours, theirs = os.pipe()  # nobody ever closes its stdin: only the parent's death is left
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys; subprocess.run(sys.argv[1:])",
            *(sys.executable, "-m", "volunteer.training.aggregator", "--run-dir", str(run_dir)),
        ],
        cwd=REPOSITORY,
        stdin=ours,
        stdout=subprocess.PIPE,
    )
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == encode_line(AggregatorStarted())
        parent.kill()
        parent.wait(60)
        assert parent.stdout.read() == b""  # returns once the aggregator has closed its end
    finally:
        parent.kill()
        parent.wait(60)
        assert parent.stdout is not None
        parent.stdout.close()
        os.close(ours)
        os.close(theirs)


@pytest.mark.timeout(300)
def test_three_members_agree_for_50_rounds_and_one_of_them_joins_by_replay(
    start: Callable[..., Process],
) -> None:
    """Acceptance test 6 of ALGORITHMS.md."""
    first, second, newcomer = start("first"), start("second"), start("newcomer")
    for process in (first, second, newcomer):
        process.read()
    tips = {process: process.genesis().state_hash for process in (first, second)}
    shuffle = random.Random(1).shuffle
    rounds = list(synthetic_rounds(SPEC, 50, 4))

    def take_part(process: Process, item: SyntheticRound) -> str:
        arriving = list(enumerate(item.blobs))
        shuffle(arriving)
        for index, blob in arriving:
            blob_id = blob_id_of_bytes(blob)
            process.store.file_of(blob_id).write_bytes(blob)  # unsynced: 750 of them take a while
            verdict = process.validate(blob_id, item.round_index, author=f"peer-{index}")
            assert isinstance(verdict, BlobValidated)
            assert verdict.reason == ""
        built = process.apply(tips[process], item.listed)
        assert isinstance(built, StateBuilt), built
        return built.state_hash

    for item in rounds[:30]:
        for process in (first, second):
            tips[process] = take_part(process, item)
            assert tips[process] == item.state_hash
    tips[newcomer] = newcomer.genesis().state_hash
    for item in rounds[:30]:
        tips[newcomer] = take_part(newcomer, item)
    for item in rounds[30:]:
        for process in (newcomer, second, first):
            tips[process] = take_part(process, item)
        assert set(tips.values()) == {item.state_hash}
    assert all(process.close() == 0 for process in tips)


def test_a_kill_while_it_writes_leaves_no_half_state(start: Callable[..., Process]) -> None:
    spec = make_spec(dim=256, block_elements=4096)
    process = start("big", spec)
    process.read()
    genesis = process.genesis().state_hash
    num = num_parameters(spec.model)
    blob = write_contribution_blob(
        encode(gradient("kill", num), spec.codec), blob_key(spec, 0, "a")
    )
    listed = ListedWork(
        contribution_id="0" * 64,
        author="a",
        round_index=0,
        blob_id=process.store.add_bytes(blob),
        tokens=10,
        is_late=False,
        is_on_probation=False,
    )
    command = ApplyCommit(request_id=1, round_index=0, parent_state=genesis, listed=(listed,))
    process.stdin.write(encode_line(command) * 50)
    process.stdin.flush()
    assert isinstance(process.read(), StateBuilt)
    process.child.kill()  # somewhere in one of the other 49
    process.child.wait(60)
    again = start("big", spec)
    again.read()
    built = again.apply(genesis, (listed,))
    assert isinstance(built, StateBuilt)
    assert not list(again.store.directory.glob(".tmp-*"))
    assert all(again.store.verify(blob_id) for blob_id in again.store.list_ids())
    read_state(again.store.file_of(built.state_hash), num)
