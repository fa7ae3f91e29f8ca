"""What one contribution alone does to the loss: what the scorers of a commit measure.

Runs in: aggregator, on the CPU at the lowest priority, and only while nothing else is asked of it.
The verdict is volunteer/rounds/scoring.py's.

    change = L(G - a c) - L(G), a mean over windows; G: the parent's shared weights, a = SCORE_STEP

Half of the windows are held-out ones, half are drawn by the commit's id from the public training
text: who learned to please the held-out text alone is not spared, and nobody can prepare for the
others.

Paper: arXiv:2505.21684 (Gauntlet), section 3; its LossScore has the other sign. Differs: a small
step, since at the outer learning rate even honest contributions raise the loss alone, now and then
(LOGBOOK.md, 2026-11-30: at 0.7 by up to 5.2 standard errors, at 0.2 by 0.8 at most).

Shape legend: B windows, T1 = context_tokens + 1, P parameters, S a slice of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from volunteer.run import RunSpec
from volunteer.training.compression import EncodedGradient, slices
from volunteer.training.data import Corpus, held_out_windows, load_corpus, training_windows
from volunteer.training.evaluation import nats_of_windows
from volunteer.training.model import weights_of

SCORE_STEP = 0.2
NUM_WINDOWS = 32
BATCH_WINDOWS = 4
"""Between two batches it is looked whether something else is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What was measured, nats per token."""

    change: float
    """Above 0 where the contribution makes the loss worse."""
    stderr: float
    """Standard error of it over the windows."""
    loss: float
    """Without the contribution."""


def scoring_windows(spec: RunSpec, corpus: Corpus, commit_id: str) -> Tensor:
    """Return the windows of one commit: the same for all its scorers, int64, shape (B, T1).

    Args:
        spec: says how long they are.
        corpus: the public texts.
        commit_id: draws those of the training text.

    Raises:
        RunSpecError: the data has no held-out window.
    """
    half, context = NUM_WINDOWS // 2, spec.model.context_tokens
    if not corpus.has_training_windows(context):  # streams: nothing of them is at hand
        all_unseen = held_out_windows(corpus, num_sequences=NUM_WINDOWS, context_tokens=context)
        return torch.from_numpy(all_unseen).long()
    seen = training_windows(
        corpus,
        run_id=spec.run_id,
        peer_seed=b"score" + bytes.fromhex(commit_id),
        inner_step=0,
        num_sequences=half,
        context_tokens=context,
    )
    unseen = held_out_windows(corpus, num_sequences=half, context_tokens=context)
    return torch.from_numpy(np.concatenate([seen, unseen])).long()


def score_run(
    spec: RunSpec,
    weights_P: Tensor,
    blobs: Sequence[tuple[EncodedGradient, float]],
    commit_id: str,
    run_dir: Path | None,
    *,
    should_stop: Callable[[], bool],
) -> list[Scored]:
    """Measure contributions on what the run's folder holds of its public text; see `score`.

    Raises:
        DataUnavailableError: some of it has not been prepared yet.
        RunSpecError: the data has no held-out window.
    """
    corpus = load_corpus(spec.data, run_dir, only_public=True)
    windows_BT1 = scoring_windows(spec, corpus, commit_id)
    return score(spec, weights_P, blobs, windows_BT1, should_stop=should_stop)


def score(
    spec: RunSpec,
    weights_P: Tensor,
    blobs: Sequence[tuple[EncodedGradient, float]],
    windows_BT1: Tensor,
    *,
    should_stop: Callable[[], bool],
) -> list[Scored]:
    """Measure each contribution alone; fewer than all where it has to stop.

    Args:
        spec: the model's shape.
        weights_P: the shared weights that they were made on, fp32, shape (P,), CPU; not changed.
        blobs: each with its clip scale.
        windows_BT1: of `scoring_windows`.
        should_stop: asked after each batch.

    Cost: one vector of P elements.
    """
    before = _losses(spec, weights_P, windows_BT1, should_stop)
    found: list[Scored] = []
    for blob, clip_scale in blobs if before is not None else ():
        moved_P = _moved(weights_P, blob, SCORE_STEP * clip_scale)
        after = _losses(spec, moved_P, windows_BT1, should_stop)
        if before is None or after is None:
            break
        found.append(_compare(before, after))
    return found


def _moved(weights_P: Tensor, blob: EncodedGradient, step: float) -> Tensor:
    moved_P = weights_P.clone()
    for start, stop in slices(blob.num_elements, blob.block_elements):
        decoded_S = torch.empty(stop - start, dtype=torch.float32)
        blob.decode_slice(start, stop, out_S=decoded_S)
        moved_P[start:stop] -= decoded_S.mul_(step)
    return moved_P


def _losses(
    spec: RunSpec, weights_P: Tensor, windows_BT1: Tensor, should_stop: Callable[[], bool]
) -> list[float] | None:
    """Return each window's loss, nats per token; None if told to stop."""
    weights = weights_of(weights_P, spec.model)
    nats: list[float] = []
    with torch.no_grad():
        for batch_BT1 in torch.split(windows_BT1, BATCH_WINDOWS):
            if should_stop():
                return None
            nats += nats_of_windows(weights, batch_BT1, spec.model)
    return [one / spec.model.context_tokens for one in nats]


def _compare(before: Sequence[float], after: Sequence[float]) -> Scored:
    changes = [b - a for a, b in zip(before, after, strict=True)]
    num = len(changes)
    mean = math.fsum(changes) / num
    variance = math.fsum((change - mean) ** 2 for change in changes) / (num - 1)
    return Scored(
        change=mean, stderr=math.sqrt(variance / num), loss=math.fsum(before) / len(before)
    )
