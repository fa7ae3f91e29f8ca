"""The trainer's loop when things go wrong: kills, full disks, little memory, broken weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.volunteer.training.loop_bench import (
    CONTRIBUTE,
    STEP_TOKENS,
    Bench,
    encoded_in,
    kinds,
    only,
)
from volunteer.errors import (
    CheckpointCorruptError,
    OutOfGpuMemoryError,
    StorageFullError,
    TrainerError,
)
from volunteer.messages import (
    SaveSnapshot,
    Stepped,
    Stopping,
    StopTrainer,
    TrainerStarted,
)
from volunteer.run import ModelSpec
from volunteer.training import diloco
from volunteer.training.diloco import LocalState
from volunteer.training.micro_batches import MicroBatches
from volunteer.training.model import Weights
from volunteer.training.snapshot import SnapshotStore
from volunteer.training.training_loop import TrainingLoop


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_full_disk_ends_training_and_leaves_the_previous_snapshot(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.run(bench.rebase(), script={2: StopTrainer()})

    def disk_is_full(_store: SnapshotStore, _state: LocalState) -> None:
        raise StorageFullError

    with monkeypatch.context() as patch:
        patch.setattr(SnapshotStore, "save", disk_is_full)
        with pytest.raises(StorageFullError):
            bench.run(bench.rebase(), script={2: SaveSnapshot()})
    assert bench.saved().progress.inner_step == 2


def test_a_kill_between_blob_and_snapshot_sends_the_work_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_is_full(_store: SnapshotStore, _state: LocalState) -> None:
        raise StorageFullError

    with monkeypatch.context() as patch:
        patch.setattr(SnapshotStore, "save", disk_is_full)
        with pytest.raises(StorageFullError):
            bench.run(bench.rebase(), script={2: CONTRIBUTE})
    assert encoded_in(bench.events) == []
    assert len(bench.store.list_ids()) == 2  # genesis, and a blob that nobody names
    events = bench.run(bench.rebase(), script={1: CONTRIBUTE, 2: StopTrainer()})
    started = events[0]
    assert isinstance(started, TrainerStarted)
    assert started.last_contribution is None
    assert encoded_in(events)[0].tokens == STEP_TOKENS


def test_a_contribution_is_on_disk_before_it_is_told(bench: Bench) -> None:
    """A kill at the moment of the event: the restart reports the same contribution again."""

    class KilledError(BaseException):
        pass

    original = TrainingLoop._emit_saved

    def emit_saved_then_die(loop: TrainingLoop) -> None:
        original(loop)
        raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "_emit_saved", emit_saved_then_die)
        with pytest.raises(KilledError):
            bench.run(bench.rebase(), script={2: CONTRIBUTE})
    assert encoded_in(bench.events) == []
    events = bench.run(StopTrainer())
    started = events[0]
    assert isinstance(started, TrainerStarted)
    assert started.last_contribution is not None
    assert bench.store.has(started.last_contribution.blob_id)
    # The agent announces it; what follows does not contain its work again.
    events = bench.run(
        bench.rebase(known=(started.last_contribution.blob_id,)),
        script={1: CONTRIBUTE, 2: StopTrainer()},
    )
    (encoded,) = encoded_in(events)
    assert encoded.tokens == STEP_TOKENS
    assert bench.saved().progress.tokens_total == 4 * STEP_TOKENS


def test_a_missing_or_damaged_state_ends_training_and_saves_what_was_trained(bench: Bench) -> None:
    missing = bench.rebase("cd" * 32)
    with pytest.raises(TrainerError, match="is not in"):
        bench.run(bench.rebase(), script={3: missing})
    assert bench.saved().progress.inner_step == 3
    with pytest.raises(TrainerError, match="is not in"):
        bench.run(bench.rebase("../../etc/passwd"))
    file = bench.store.file_of(bench.genesis)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointCorruptError, match="damaged on the disk"):
        bench.run(bench.rebase())


def test_pending_work_that_nobody_knows_is_refused_aloud(bench: Bench) -> None:
    with pytest.raises(TrainerError, match="c9"):
        bench.run(bench.rebase(pending=("c9",)))


def fail_steps(patch: pytest.MonkeyPatch, numbers: set[int], error: Exception) -> list[int]:
    """Have the calls of `diloco.train` with these numbers raise; return their micro-batches."""
    original = diloco.train
    micro_batches: list[int] = []

    def train(*args: object, micro_batch_sequences: int, **kwargs: object) -> object:
        micro_batches.append(micro_batch_sequences)
        if len(micro_batches) in numbers:
            raise error
        return original(*args, micro_batch_sequences=micro_batch_sequences, **kwargs)  # type: ignore[arg-type]

    patch.setattr(diloco, "train", train)
    return micro_batches


def test_out_of_memory_halves_the_micro_batch_and_takes_the_step_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        micro_batches = fail_steps(patch, {2}, torch.OutOfMemoryError("CUDA out of memory"))
        bench.run(bench.rebase(), script={3: StopTrainer()})
    assert micro_batches[:4] == [4, 4, 2, 2]
    assert bench.saved().progress.inner_step == 3


def test_too_little_memory_for_one_sequence_is_told_before_any_step(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def loss(weights: Weights, windows_BT1: Tensor, model: ModelSpec) -> Tensor:
        tried.append(len(windows_BT1))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(MicroBatches, "loss_function", property(lambda _: loss))
    with pytest.raises(OutOfGpuMemoryError, match="one sequence"):
        bench.run(bench.rebase())
    assert tried == [4, 2, 1]
    assert "Stepped" not in kinds(bench.events)


def test_what_others_take_of_the_memory_is_left_to_them_after_one_halving(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        micro_batches = fail_steps(patch, {2, 4}, torch.OutOfMemoryError("CUDA out of memory"))
        with pytest.raises(OutOfGpuMemoryError, match="less and less"):
            bench.run(bench.rebase())
    assert micro_batches == [4, 4, 2, 2]
    assert bench.saved().progress.inner_step == 2  # what was trained is saved


def test_another_error_of_torch_is_not_taken_for_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_steps(patch, {1}, RuntimeError("CUDA error: device-side assert"))
        with pytest.raises(RuntimeError, match="device-side"):
            bench.run(bench.rebase())


def break_weights(patch: pytest.MonkeyPatch, at_steps: set[int]) -> None:
    """Have the weights become not-a-number just before the calls with these numbers."""
    original = diloco.train
    calls = 0

    def train(state: LocalState, *args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls in at_steps:
            state.weights.weights_P.fill_(math.nan)
        return original(state, *args, **kwargs)  # type: ignore[arg-type]

    patch.setattr(diloco, "train", train)


def test_broken_weights_go_back_to_the_snapshot_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        break_weights(patch, {5})
        events = bench.run(bench.rebase(), script={2: SaveSnapshot(), 6: StopTrainer()})
    steps = [event.inner_step for event in events if isinstance(event, Stepped)]
    assert steps == [1, 2, 3, 4, 3, 4]
    assert bool(torch.isfinite(bench.saved().theta_P).all())


def test_weights_that_break_again_end_training_and_are_never_saved(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        break_weights(patch, {3, 5})
        with pytest.raises(TrainerError, match="diverged"):
            bench.run(bench.rebase(), script={1: SaveSnapshot()})
    state = bench.saved()
    assert state.progress.inner_step == 1
    assert bool(torch.isfinite(state.theta_P).all())


def test_broken_weights_are_neither_contributed_nor_saved_at_a_stop(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = diloco.train

    def train_then_break(state: LocalState, *args: object, **kwargs: object) -> object:
        result = original(state, *args, **kwargs)  # type: ignore[arg-type]
        if state.progress.inner_step == 3:
            state.weights.weights_P[0] = math.inf
        return result

    with monkeypatch.context() as patch:
        patch.setattr(diloco, "train", train_then_break)
        events = bench.run(
            bench.rebase(), script={1: SaveSnapshot(), 3: CONTRIBUTE, 4: StopTrainer()}
        )
    # Back at step 1: that is what is contributed, and step 2 is taken again.
    (encoded,) = encoded_in(events)
    assert encoded.tokens == STEP_TOKENS
    assert [e.inner_step for e in events if isinstance(e, Stepped)] == [1, 2, 3, 2]
    assert only(events, Stopping) == [Stopping(inner_step=2, tokens_total=2 * STEP_TOKENS)]


def test_a_stop_during_a_step_takes_no_further_micro_batch(bench: Bench) -> None:
    """The stop is in the queue from the start: the step that was begun is given up."""
    events = bench.run(bench.rebase(), StopTrainer())
    assert kinds(events) == ["TrainerStarted", "Rebased", "Stopping", "SnapshotSaved"]
    assert only(events, Stopping) == [Stopping(inner_step=0, tokens_total=0)]
