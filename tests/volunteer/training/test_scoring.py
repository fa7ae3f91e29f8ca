"""What scorers measure: honest work lowers the loss, its opposite raises it, and it gives way."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from p2p.blobstore import BlobStore
from tests.volunteer.training.synthetic_run import blob_key
from tests.volunteer.training.tiny_run import CPU, never, tiny_spec, tiny_weights_P, tiny_windows
from volunteer.messages import ContributionsScored, ListedWork, ScoreContributions
from volunteer.rounds.scoring import is_harmful
from volunteer.run import RunSpec
from volunteer.training.aggregator import Aggregator
from volunteer.training.compression import EncodedGradient, encode
from volunteer.training.contribution_blob import write_contribution_blob
from volunteer.training.data import load_corpus
from volunteer.training.diloco import fresh_state, train
from volunteer.training.scoring import NUM_WINDOWS, Scored, score, scoring_windows
from volunteer.training.state import SharedState, write_state

COMMIT, OTHER_COMMIT = "ab" * 32, "cd" * 32


@pytest.fixture(scope="module")
def spec() -> RunSpec:
    return tiny_spec()


@pytest.fixture(scope="module")
def pseudo_gradient_P(spec: RunSpec) -> Tensor:
    """What a few honest inner steps give."""
    shared_P = tiny_weights_P(spec)
    state = fresh_state(shared_P, spec, CPU)
    for step in range(12):
        windows = tiny_windows(spec, step)
        train(state, windows, spec, micro_batch_sequences=4, device=CPU, should_stop=never)
    return shared_P - state.weights.weights_P.detach()


def measured(spec: RunSpec, *vectors_P: Tensor) -> list[Scored]:
    blobs: list[tuple[EncodedGradient, float]] = [
        (encode(vector_P, spec.codec, 0), 1.0) for vector_P in vectors_P
    ]
    windows = scoring_windows(spec, load_corpus(spec.data), COMMIT)
    return score(spec, tiny_weights_P(spec), blobs, windows, should_stop=never)


def test_honest_work_lowers_the_loss_and_its_opposite_does_harm(
    spec: RunSpec, pseudo_gradient_P: Tensor
) -> None:
    honest, opposed = measured(spec, pseudo_gradient_P, -pseudo_gradient_P)
    assert honest.change < -3 * honest.stderr < 0
    assert not is_harmful(honest.change, honest.stderr, honest.loss)
    assert is_harmful(opposed.change, opposed.stderr, opposed.loss)
    assert honest.loss == opposed.loss == pytest.approx(5.55, abs=0.1)


def test_a_clipped_one_is_measured_as_it_counts(spec: RunSpec, pseudo_gradient_P: Tensor) -> None:
    windows = scoring_windows(spec, load_corpus(spec.data), COMMIT)
    blob = encode(pseudo_gradient_P, spec.codec, 0)
    weights_P = tiny_weights_P(spec)
    before_P = weights_P.clone()
    nothing, all_of_it = score(
        spec, weights_P, [(blob, 0.0), (blob, 1.0)], windows, should_stop=never
    )
    assert (nothing.change, nothing.stderr) == (0.0, 0.0)
    assert all_of_it.change < 0.0
    assert torch.equal(weights_P, before_P)


def test_the_windows_are_drawn_by_the_commit_and_half_held_out(spec: RunSpec) -> None:
    corpus = load_corpus(spec.data)
    one, again, other = (
        scoring_windows(spec, corpus, commit) for commit in (COMMIT, COMMIT, OTHER_COMMIT)
    )
    assert one.shape == (NUM_WINDOWS, spec.model.context_tokens + 1)
    assert torch.equal(one, again)
    half = NUM_WINDOWS // 2
    assert not torch.equal(one[:half], other[:half])
    assert torch.equal(one[half:], other[half:])


@pytest.mark.parametrize(("asked", "num_found"), [(0, 0), (8, 0), (9, 0), (16, 1), (24, 2)])
def test_what_it_has_no_time_for_is_left_out(
    spec: RunSpec, pseudo_gradient_P: Tensor, asked: int, num_found: int
) -> None:
    # Eight batches a measurement: first without any contribution, then with each.
    blob = (encode(pseudo_gradient_P, spec.codec, 0), 1.0)
    windows = scoring_windows(spec, load_corpus(spec.data), COMMIT)
    counter = itertools.count()
    found = score(
        spec,
        tiny_weights_P(spec),
        [blob, blob],
        windows,
        should_stop=lambda: next(counter) >= asked,
    )
    assert len(found) == num_found


def test_the_aggregator_scores_what_a_commit_lists(
    spec: RunSpec, pseudo_gradient_P: Tensor, tmp_path: Path
) -> None:
    store = BlobStore(tmp_path)
    weights_P = tiny_weights_P(spec)
    state = SharedState(weights_P=weights_P, momentum_P=torch.zeros_like(weights_P))
    works = []
    for number, vector_P in enumerate((pseudo_gradient_P, -pseudo_gradient_P)):
        author = f"peer-{number}"
        encoded = encode(vector_P, spec.codec, 0)
        works.append(
            ListedWork(
                contribution_id=f"{number:064x}",
                author=author,
                round_index=0,
                blob_id=store.add_bytes(
                    write_contribution_blob(encoded, blob_key(spec, 0, author))
                ),
                tokens=10,
                is_late=False,
                is_on_probation=False,
            )
        )
    command = ScoreContributions(
        request_id=3,
        commit_id=COMMIT,
        parent_state=write_state(state, store),
        works=tuple(works),
        clip_scales=(1.0, 0.5),
    )
    reply = Aggregator(spec, "dense", store).answer(command)
    assert isinstance(reply, ContributionsScored)
    assert reply.request_id == 3
    assert [one.contribution_id for one in reply.scores] == [w.contribution_id for w in works]
    assert [one.change > 0 for one in reply.scores] == [False, True]
    busy = Aggregator(spec, "dense", store, is_awaited=lambda: True).answer(command)
    assert isinstance(busy, ContributionsScored)
    assert busy.scores == ()
