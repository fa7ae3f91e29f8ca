"""The trainer as a real process whose layers are compiled: kept code, stops, and no compiler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.volunteer.training.trainer_process import Run
from volunteer.messages import Rebased, SnapshotSaved, Stepped, Stopping, StopTrainer
from volunteer.micro_batch import MicroBatchChosen

pytestmark = [pytest.mark.full, pytest.mark.system, pytest.mark.timeout(300)]
STOP_DEADLINE_S = 3.0
"""After which the agent kills a trainer that was told to stop."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    for trainer in run.trainers:
        trainer.close()


def is_at_work(process: psutil.Process) -> bool:
    """Return whether it lives; one that has ended stays listed until its parent has reaped it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_stop_while_layers_are_compiled_ends_trainer_and_compiler_at_once(run: Run) -> None:
    trainer = run.start("--compile")
    trainer.send(run.rebase())
    trainer.wait_for(Rebased)
    process = psutil.Process(trainer.process.pid)
    compilers: list[psutil.Process] = []
    while not compilers:  # the C++ compiler is at work
        compilers = process.children(recursive=True)
        assert trainer.process.poll() is None
    asked_at_s = time.monotonic()
    trainer.send(StopTrainer())
    trainer.wait_for(Stopping)
    trainer.wait_for(SnapshotSaved)
    assert trainer.wait_for_end() == 0
    assert time.monotonic() - asked_at_s < STOP_DEADLINE_S
    _, left = psutil.wait_procs(compilers, timeout=1.0)
    assert not [one for one in left if is_at_work(one)]


def test_compiled_layers_train_and_are_kept_for_the_next_start(run: Run) -> None:
    for _ in range(2):
        trainer = run.start("--compile")
        trainer.send(run.rebase())
        found = trainer.wait_for(MicroBatchChosen).micro_batch
        assert found.is_compiled, found.note
        assert "layers are compiled" in found.note
        trainer.wait_for(Stepped)
        trainer.send(StopTrainer())
        assert trainer.wait_for_end() == 0
    assert any((run.run_dir / "compiled").rglob("*.so"))
    plain = run.start()
    plain.send(run.rebase())
    assert not plain.wait_for(MicroBatchChosen).micro_batch.is_compiled
    assert not (run.run_dir / "compiled").exists()


def test_without_a_compiler_it_trains_as_layers_are_written_and_says_why(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    trainer = run.start("--compile")
    trainer.send(run.rebase())
    found = trainer.wait_for(MicroBatchChosen).micro_batch
    assert not found.is_compiled
    assert "not compiled, as wished: " in found.note
    assert "C++ compiler" in found.note
    trainer.wait_for(Stepped)
