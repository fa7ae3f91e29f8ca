"""The trainer as a real process: pipes, signals, kills, and a token ledger that stays exact."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fakes.tiny_disk import mounted_tiny_disk
from tests.volunteer.training.trainer_process import ROOT_DIR, SPEC, Run, Trainer
from volunteer.messages import (
    Contribute,
    Encoded,
    OwnWork,
    Rebased,
    SaveSnapshot,
    SnapshotSaved,
    Stepped,
    Stopping,
    StopTrainer,
    TrainerFailed,
    TrainerStarted,
    encode_line,
    trainer_event_decoder,
)
from volunteer.run import OuterSpec
from volunteer.training.genesis import build_genesis
from volunteer.training.module_blobs import ModuleBlobs
from volunteer.training.outer import outer_step
from volunteer.training.state import SharedState, read_state, write_state

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(120)]


def fill(folder: Path) -> Path:
    """Take all the space that is left; return the file that holds it."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as stream:
        for piece_bytes in (65536, 4096):
            with contextlib.suppress(OSError):
                while True:
                    stream.write(b"x" * piece_bytes)
    return filler


def test_a_full_disk_ends_it_and_the_last_snapshot_is_good(tmp_path: Path) -> None:
    with mounted_tiny_disk(tmp_path / "disk", size_kib=1024) as run_dir:
        run = Run(run_dir)
        trainer = run.start("--checkpoint-every-s", "0.1")
        try:
            trainer.send(run.rebase())
            trainer.wait_for(SnapshotSaved)
            filler = fill(run_dir)
            failed = trainer.wait_for(TrainerFailed)
            assert trainer.wait_for_end() == 1
        finally:
            trainer.close()
        assert failed.error == "StorageFullError"
        last = [event for event in trainer.events if isinstance(event, SnapshotSaved)][-1]
        filler.unlink()
        assert run.saved().inner_step == last.inner_step > 0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    for trainer in run.trainers:
        trainer.close()


def test_two_rounds_with_a_kill_in_the_middle(run: Run) -> None:
    trainer = run.start()
    started = trainer.wait_for(TrainerStarted)
    assert (started.device, started.inner_step, started.last_contribution) == ("cpu", 0, None)
    trainer.send(run.rebase())
    assert trainer.wait_for(Rebased) == Rebased(commit_id="c0", carried=(), discarded_tokens=0)
    trainer.wait_for(Stepped, lambda stepped: stepped.inner_step > 20)
    trainer.send(Contribute(base="c0", round_index=0))
    encoded = trainer.wait_for(Encoded)

    # The swarm of one aggregates what it decodes.
    genesis = read_state(run.store.file_of(run.genesis), len(build_genesis(SPEC).weights_P))
    work = OwnWork(contribution_id="w0", blob_id=encoded.blob_id, carries=())
    quantised_P = ModuleBlobs(run.store, SPEC, "dense", "me").load_quantised(work)
    weights_P, momentum_P = outer_step(
        genesis.weights_P, genesis.momentum_P, quantised_P, OuterSpec()
    )
    assert float((weights_P - genesis.weights_P).abs().max()) > 1e-3
    state = write_state(SharedState(weights_P=weights_P, momentum_P=momentum_P), run.store)
    trainer.send(run.rebase(state, 1, (encoded.blob_id,)))
    rebased = trainer.wait_for(Rebased)
    assert rebased.discarded_tokens == 0
    trainer.send(SaveSnapshot())
    saved = trainer.wait_for(SnapshotSaved)
    trainer.wait_for(Stepped, lambda stepped: stepped.inner_step > saved.inner_step)
    trainer.kill()

    again = run.start()
    started = again.wait_for(TrainerStarted)
    assert started.inner_step == saved.inner_step
    assert started.tokens_total == saved.tokens_total
    assert started.last_contribution == encoded
    again.send(run.rebase(state, 1, (encoded.blob_id,)))
    assert again.wait_for(Rebased).discarded_tokens == 0
    first = again.wait_for(Stepped)
    assert first.inner_step > saved.inner_step
    assert first.tokens_since_contribution == first.tokens_total - encoded.tokens
    again.send(StopTrainer())
    stopping = again.wait_for(Stopping)
    last = again.wait_for(SnapshotSaved)
    assert (last.inner_step, last.tokens_total) == (stopping.inner_step, stopping.tokens_total)
    assert again.wait_for_end() == 0


def end_by_kill(trainer: Trainer) -> None:
    trainer.kill()


def end_by_stop(trainer: Trainer) -> None:
    trainer.send(StopTrainer())
    trainer.wait_for(SnapshotSaved)
    assert trainer.wait_for_end() == 0


def end_by_sigterm(trainer: Trainer) -> None:
    trainer.process.send_signal(signal.SIGTERM)
    assert trainer.wait_for_end() == 0


def end_by_closing_stdin(trainer: Trainer) -> None:
    assert trainer.process.stdin is not None
    trainer.process.stdin.close()
    assert trainer.wait_for_end() == 0


def end_by_kill_after_contribute(trainer: Trainer) -> None:
    """Perhaps before the blob, perhaps after the snapshot: whichever it is, the books agree."""
    trainer.send(Contribute(base="c0", round_index=0))
    trainer.process.kill()
    trainer.wait_for_end()


def test_the_token_ledger_is_exact_over_kills_and_stops(run: Run) -> None:
    known: dict[str, int] = {}
    total = 0
    for end in (
        end_by_kill,
        end_by_stop,
        end_by_kill_after_contribute,
        end_by_sigterm,
        end_by_closing_stdin,
    ):
        trainer = run.start("--checkpoint-every-s", "0.2")
        started = trainer.wait_for(TrainerStarted)
        if started.last_contribution is not None:  # as the agent does: announce what it missed
            known.setdefault(started.last_contribution.blob_id, started.last_contribution.tokens)
        trainer.send(run.rebase(known=tuple(known)))
        assert trainer.wait_for(Rebased).discarded_tokens == 0
        trainer.wait_for(Stepped)
        trainer.send(Contribute(base="c0", round_index=0))
        encoded = trainer.wait_for(Encoded)
        assert encoded.blob_id not in known
        known[encoded.blob_id] = encoded.tokens
        trainer.wait_for(Stepped)
        end(trainer)
        progress = run.saved()
        last = progress.last_contribution
        assert last is not None
        known.setdefault(last.blob_id, last.tokens)
        assert sum(known.values()) + progress.tokens_since_contribution == progress.tokens_total
        assert progress.tokens_total > total
        total = progress.tokens_total


def test_hostile_lines_are_logged_and_training_goes_on(run: Run) -> None:
    trainer = run.start()
    trainer.send_bytes(b"\xff\x00garbage\n" + b'{"type":"eval","code":"1"}\n' + b"x" * 3_000_000)
    trainer.send_bytes(b"\n")
    trainer.send(run.rebase())
    trainer.wait_for(Stepped)
    trainer.send_bytes(b'{"type":"contribute","base":{}}\n')
    trainer.send(StopTrainer())
    assert trainer.wait_for_end() == 0
    assert trainer.log_file.read_text().count("ignored a line") == 4


def test_ctrl_c_in_the_terminal_is_the_agents_affair(run: Run) -> None:
    trainer = run.start()
    trainer.wait_for(TrainerStarted)
    trainer.process.send_signal(signal.SIGINT)
    trainer.send(run.rebase())
    trainer.wait_for(Stepped)
    end_by_stop(trainer)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (("--device", "cuda:63"), "ConfigError", "'cuda:63' is not here"),
        (("--module", "none"), "TrainerError", "is not in"),
    ],
)
def test_what_cannot_work_is_told_before_the_end(
    run: Run, options: tuple[str, ...], error: str, words: str
) -> None:
    trainer = run.start(*options)
    trainer.send(run.rebase())
    failed = trainer.wait_for(TrainerFailed)
    assert failed.error == error
    assert words in failed.message
    assert trainer.wait_for_end() == 1


def test_a_damaged_spec_is_told(run: Run) -> None:
    (run.run_dir / "spec.toml").write_text("format = 2")
    trainer = run.start()
    assert trainer.wait_for(TrainerFailed).error == "RunSpecError"
    assert trainer.wait_for_end() == 1


def test_it_runs_at_low_priority(run: Run) -> None:
    trainer = run.start()
    trainer.wait_for(TrainerStarted)
    assert psutil.Process(trainer.process.pid).nice() == os.nice(0) + 10


PARENT = """
import subprocess, sys, threading
stdin, inherited, *command = sys.argv[1:]
def start():
    subprocess.Popen(command, stdin=int(stdin), pass_fds=[int(inherited)])
    sys.stdin.readline()
thread = threading.Thread(target=start)
thread.start()
thread.join()
print("thread ended", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_it_outlives_the_thread_that_started_it_and_not_the_process(run: Run) -> None:
    """The agent starts children in worker threads, which end long before it does."""
    # The trainer inherits the other end of its stdin, so that no end of file can tell it.
    read_end, write_end = os.pipe()
    trainer = [sys.executable, "-m", "volunteer.training.trainer", "--run-dir", str(run.run_dir)]
    trainer += ["--device", "cpu", "--threads", "1", "--author", "me"]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(read_end), str(write_end), *trainer],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[read_end, write_end],
        cwd=ROOT_DIR,
    )
    os.close(read_end)
    assert parent.stdin is not None
    assert parent.stdout is not None
    with (
        parent,
        os.fdopen(write_end, "wb", buffering=0) as commands,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(parent.kill)
        commands.write(encode_line(run.rebase()))
        while b'"stepped"' not in parent.stdout.readline():
            pass
        parent.stdin.write(b"end the thread\n")
        parent.stdin.flush()
        while parent.stdout.readline() != b"thread ended\n":
            pass
        for _ in range(3):  # it goes on
            assert b'"stepped"' in parent.stdout.readline()
        parent.kill()
        rest = [trainer_event_decoder.decode(line) for line in parent.stdout]
    assert isinstance(rest[-1], SnapshotSaved)
    assert run.saved().inner_step == rest[-1].inner_step > 0
