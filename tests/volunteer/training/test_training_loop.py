"""The trainer's loop without a process: what is done in which order, and what is saved when."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.volunteer.training.loop_bench import (
    CONTRIBUTE,
    SPEC,
    STEP_TOKENS,
    Bench,
    encoded_in,
    kinds,
    only,
)
from volunteer.messages import (
    NothingToContribute,
    OwnWork,
    Rebased,
    SaveSnapshot,
    SnapshotSaved,
    Stepped,
    StopTrainer,
)
from volunteer.training.genesis import build_genesis
from volunteer.training.module_blobs import ModuleBlobs
from volunteer.training.state import SharedState, write_state


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


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
        ["TrainerStarted", "Rebased", "MicroBatchChosen"]
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
    quantised_P = ModuleBlobs(bench.store, SPEC, "dense", "me").load_quantised(work)
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


def test_snapshots_are_taken_by_the_clock(bench: Bench) -> None:
    bench.checkpoint_every_s = 10.0
    events = bench.run(bench.rebase(), script={40: StopTrainer()})
    steps = [e.inner_step for e in events if isinstance(e, SnapshotSaved)]
    # A step takes 1.0 s here, and so does the trial before the first; the last is the stop's.
    assert steps == [9, 19, 29, 39, 40]
    assert kinds(events)[-2:] == ["Stopping", "SnapshotSaved"]


def test_progress_is_told_at_most_twice_a_second_and_covers_every_step(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from volunteer.training import training_loop

    monkeypatch.setattr(training_loop, "STEPPED_EVERY_S", 3.0)
    events = bench.run(bench.rebase(), script={4: StopTrainer()})
    told = [e for e in events if isinstance(e, Stepped)]
    # A step takes 1.0 s here, and so does the trial before the first.
    assert [e.inner_step for e in told] == [2, 5, 8, 11]
    assert told[-1].tokens_per_s == pytest.approx(STEP_TOKENS / 0.75)
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


def test_the_loop_rests_between_steps_and_a_stop_ends_the_rest(bench: Bench) -> None:
    bench.duty_fraction = 0.5
    events = bench.run(bench.rebase(), script={4: StopTrainer()})
    assert kinds(events)[-2:] == ["Stopping", "SnapshotSaved"]
    # As long as each step took; the last one was cut short by the stop in the queue.
    assert bench.rests == [pytest.approx(0.75)] * 4
