"""The trainer's loop without a process: what is done in which order, and what is saved when."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from p2p.blobstore import BlobStore
from tests.volunteer.training.tiny_run import CPU, tiny_spec
from volunteer.errors import (
    CheckpointCorruptError,
    OutOfGpuMemoryError,
    StorageFullError,
    TrainerError,
)
from volunteer.messages import (
    Contribute,
    Encoded,
    NothingToContribute,
    OwnWork,
    Rebase,
    Rebased,
    SaveSnapshot,
    SnapshotSaved,
    Stepped,
    Stopping,
    StopTrainer,
    TrainerCommand,
    TrainerEvent,
    TrainerStarted,
    trainer_command_decoder,
)
from volunteer.training import diloco
from volunteer.training.child_process import Inbox
from volunteer.training.diloco import LocalState
from volunteer.training.genesis import build_genesis
from volunteer.training.module_blobs import ModuleBlobs
from volunteer.training.snapshot import SnapshotStore
from volunteer.training.state import SharedState, write_state
from volunteer.training.training_loop import LoopSettings, TrainingLoop

SPEC = tiny_spec()
STEP_TOKENS = 4 * 16
CONTRIBUTE = Contribute(base="c", round_index=0)


@dataclass
class Bench:
    """A run's folder, in which loops can be started one after the other."""

    folder: Path
    checkpoint_every_s: float = 1e9
    events: list[TrainerEvent] = field(default_factory=list)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.store = BlobStore(self.folder / "blobs")
        self.genesis = write_state(build_genesis(SPEC), self.store)

    def rebase(
        self,
        state_hash: str = "",
        *,
        pending: tuple[str, ...] = (),
        works: tuple[OwnWork, ...] = (),
        known: tuple[str, ...] = (),
    ) -> Rebase:
        return Rebase(
            commit_id="c",
            round_index=0,
            state_hash=state_hash or self.genesis,
            pending=pending,
            works=works,
            known_contributions=known,
        )

    def snapshots(self) -> SnapshotStore:
        return SnapshotStore(self.folder / "trainer", SPEC, "dense")

    def run(
        self, *first: TrainerCommand, script: dict[int, TrainerCommand] | None = None
    ) -> list[TrainerEvent]:
        """Run a loop: `first` at once, then each command once its number of steps is taken.

        The inner steps take half a second each on this clock.
        """
        inbox: Inbox[TrainerCommand] = Inbox(trainer_command_decoder, StopTrainer())
        for command in first:
            inbox.put(command)
        waiting = dict(script or {})
        steps = 0
        events: list[TrainerEvent] = []

        def emit(event: TrainerEvent) -> None:
            nonlocal steps
            events.append(event)
            if isinstance(event, Stepped):
                steps += 1
                if steps in waiting:
                    inbox.put(waiting.pop(steps))

        def now_s() -> float:
            self.now_s += 0.5
            return self.now_s

        loop = TrainingLoop(
            LoopSettings(spec=SPEC, peer_seed=b"seed", checkpoint_every_s=self.checkpoint_every_s),
            device=CPU,
            blobs=ModuleBlobs(self.store, SPEC, "dense"),
            snapshots=self.snapshots(),
            inbox=inbox,
            emit=emit,
            now_s=now_s,
        )
        self.events = events
        loop.run()
        return events

    def saved(self) -> LocalState:
        state = self.snapshots().load(CPU)
        assert state is not None
        return state


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def kinds(events: list[TrainerEvent]) -> list[str]:
    return [type(event).__name__ for event in events]


def only(events: list[TrainerEvent], kind: type[TrainerEvent]) -> list[TrainerEvent]:
    return [event for event in events if isinstance(event, kind)]


def encoded_in(events: list[TrainerEvent]) -> list[Encoded]:
    return [event for event in events if isinstance(event, Encoded)]


def test_nothing_is_trained_before_the_first_rebase(bench: Bench) -> None:
    events = bench.run(CONTRIBUTE, SaveSnapshot(), StopTrainer())
    assert kinds(events) == [
        "TrainerStarted",
        "NothingToContribute",
        "SnapshotSaved",
        "Stopping",
        "SnapshotSaved",
    ]
    assert not (bench.folder / "trainer").exists()


def test_a_first_round_from_genesis(bench: Bench) -> None:
    events = bench.run(bench.rebase(), script={3: CONTRIBUTE, 5: StopTrainer()})
    assert kinds(events) == (
        ["TrainerStarted", "Rebased"]
        + ["Stepped"] * 3
        + ["SnapshotSaved", "Encoded"]
        + ["Stepped"] * 2
        + ["Stopping", "SnapshotSaved"]
    )
    (encoded,) = encoded_in(events)
    assert encoded.tokens == 3 * STEP_TOKENS
    assert bench.store.size_bytes(encoded.blob_id) == encoded.blob_bytes
    last = events[-1]
    assert isinstance(last, SnapshotSaved)
    assert (last.tokens_total, last.tokens_since_contribution) == (5 * STEP_TOKENS, 2 * STEP_TOKENS)
    assert bench.saved().progress.last_contribution == encoded


def test_a_blob_decodes_to_the_displacement_and_the_residual_is_the_rest(bench: Bench) -> None:
    (encoded,) = encoded_in(bench.run(bench.rebase(), script={3: CONTRIBUTE, 4: StopTrainer()}))
    work = OwnWork(contribution_id="c1", blob_id=encoded.blob_id, carries=())
    quantised_P = ModuleBlobs(bench.store, SPEC, "dense").load_quantised(work)
    state = bench.saved()
    displacement_P = build_genesis(SPEC).weights_P - state.base_P
    torch.testing.assert_close(quantised_P + state.residual_P, displacement_P, rtol=0, atol=1e-7)
    assert float(quantised_P.abs().max()) > 0


def test_without_a_step_there_is_nothing_to_contribute(bench: Bench) -> None:
    events = bench.run(bench.rebase(), script={1: CONTRIBUTE, 2: StopTrainer()})
    bench.run(bench.rebase(), CONTRIBUTE, script={1: StopTrainer()})
    assert len(encoded_in(events)) == 1
    # One step was taken after the contribution of the first run, so the second has one.
    (second,) = encoded_in(bench.events)
    assert second.tokens == STEP_TOKENS
    events = bench.run(bench.rebase(), CONTRIBUTE, CONTRIBUTE, StopTrainer())
    assert kinds(events).count("Encoded") == 1
    assert isinstance(events[-3], NothingToContribute)


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


def test_snapshots_are_taken_by_the_clock(bench: Bench) -> None:
    bench.checkpoint_every_s = 10.0
    events = bench.run(bench.rebase(), script={40: StopTrainer()})
    steps = [e.inner_step for e in events if isinstance(e, SnapshotSaved)]
    assert steps == [10, 20, 30, 40, 40]  # a step takes 1.0 s here; the last is the stop's
    assert kinds(events)[-2:] == ["Stopping", "SnapshotSaved"]


def test_progress_is_told_at_most_twice_a_second_and_covers_every_step(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from volunteer.training import training_loop

    monkeypatch.setattr(training_loop, "STEPPED_EVERY_S", 3.0)
    events = bench.run(bench.rebase(), script={4: StopTrainer()})
    told = [e for e in events if isinstance(e, Stepped)]
    assert [e.inner_step for e in told] == [3, 6, 9, 12]  # a step takes 1.0 s here
    assert told[-1].tokens_per_s == pytest.approx(STEP_TOKENS / 0.5)
    assert all(math.isfinite(e.loss) and e.lr > 0 for e in told)


def test_rebase_keeps_what_was_learned_since_the_contribution(bench: Bench) -> None:
    genesis_P = build_genesis(SPEC).weights_P
    shared_P = genesis_P + 0.125
    moved = write_state(
        SharedState(weights_P=shared_P, momentum_P=torch.zeros_like(shared_P)), bench.store
    )
    bench.run(bench.rebase(), script={3: StopTrainer()})
    before = bench.saved()
    bench.run(bench.rebase(moved), StopTrainer())
    after = bench.saved()
    expected_P = shared_P + (before.theta_P - before.base_P)
    torch.testing.assert_close(after.theta_P, expected_P, rtol=0, atol=1e-6)
    assert torch.equal(after.base_P, shared_P)
    assert after.progress.tokens_since_contribution == 3 * STEP_TOKENS


def test_carried_work_survives_a_restart_and_goes_out_with_its_tokens(bench: Bench) -> None:
    (first,) = encoded_in(bench.run(bench.rebase(), script={2: CONTRIBUTE, 3: StopTrainer()}))
    work = OwnWork(contribution_id="c1", blob_id=first.blob_id, carries=())
    carry = bench.rebase(pending=("c1",), works=(work,), known=(first.blob_id,))
    events = bench.run(carry, StopTrainer())
    assert only(events, Rebased) == [Rebased(commit_id="c", carried=("c1",), discarded_tokens=0)]
    carried_P = bench.saved().theta_P
    # The same command again changes nothing: the set is what counts, and it was saved.
    bench.run(carry, StopTrainer())
    torch.testing.assert_close(bench.saved().theta_P, carried_P, rtol=0, atol=1e-6)
    (second,) = encoded_in(bench.run(carry, script={1: CONTRIBUTE, 2: StopTrainer()}))
    assert second.carries == ("c1",)
    assert second.tokens == first.tokens + 2 * STEP_TOKENS
    assert bench.saved().progress.carried == ()


def test_a_snapshot_older_than_a_signed_contribution_gives_its_work_up(bench: Bench) -> None:
    bench.run(bench.rebase(), script={3: StopTrainer()})
    unknown = "ab" * 32
    events = bench.run(bench.rebase(known=(unknown,)), StopTrainer())
    assert only(events, Rebased) == [
        Rebased(commit_id="c", carried=(), discarded_tokens=3 * STEP_TOKENS)
    ]
    state = bench.saved()
    assert torch.equal(state.theta_P, build_genesis(SPEC).weights_P)
    assert not bool(state.residual_P.any())
    events = bench.run(bench.rebase(known=(unknown,)), script={2: StopTrainer()})
    events = bench.run(bench.rebase(known=(unknown,)), StopTrainer())
    assert only(events, Rebased) == [Rebased(commit_id="c", carried=(), discarded_tokens=0)]
    assert bench.saved().progress.tokens_since_contribution == 2 * STEP_TOKENS


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


def test_too_little_memory_for_one_sequence_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_steps(patch, set(range(2, 9)), torch.OutOfMemoryError("CUDA out of memory"))
        with pytest.raises(OutOfGpuMemoryError, match="one sequence"):
            bench.run(bench.rebase())
    assert bench.saved().progress.inner_step == 1  # what was trained is saved


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
