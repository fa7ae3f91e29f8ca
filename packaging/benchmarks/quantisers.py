"""What two bits a kept element lose: top-k of a real run's pseudo-gradients, by several quantisers.

python packaging/benchmarks/quantisers.py [--rounds 12] [--steps 20]

One worker trains the demo's model on its texts. After every round its pseudo-gradient, with an
error feedback of 0.95, is cut into blocks of 4096 and the largest K of each are kept. `lost` is the
share of their energy (sum of squares) that a quantiser loses: one magnitude a block; two, by one
to four steps of Lloyd's method (`topk2` takes two); and SparseLoCo's (arXiv:2508.15706, after its
code): four bins over six sigma around the mean, each standing for its own mean, of a block or of
the whole vector.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from volunteer.lab.training.task import CPU, corpus_of, genesis_of, make_task, windows_of
from volunteer.run import CodecSpec, OuterSpec
from volunteer.training import diloco

BLOCK = 4096
BETA = 0.95
_NUM_BINS = 4
_BIN_SIGMAS = 1.5  # four of them are six sigma


def one_magnitude(kept_RK: Tensor) -> Tensor:
    """Sign, and the block's mean magnitude."""
    return kept_RK.sign() * kept_RK.abs().mean(1, keepdim=True)


def two_magnitudes(kept_RK: Tensor, num_steps: int) -> Tensor:
    """Sign, and one of two means of the block."""
    sizes = kept_RK.abs()
    threshold_R1 = sizes.mean(1, keepdim=True)
    quantised = sizes
    for _ in range(num_steps):
        is_large = sizes > threshold_R1
        high_R1, low_R1 = masked_mean(sizes, is_large), masked_mean(sizes, ~is_large)
        quantised = torch.where(is_large, high_R1, low_R1)
        threshold_R1 = (high_R1 + low_R1) / 2
    return quantised * kept_RK.sign()


def six_sigma(kept_RK: Tensor) -> Tensor:
    """Four bins, over all elements of a row."""
    mean_R1, sigma_R1 = kept_RK.mean(1, keepdim=True), kept_RK.std(1, keepdim=True)
    bins = ((kept_RK - mean_R1) / (_BIN_SIGMAS * sigma_R1)).floor()
    bins = bins.clamp(-_NUM_BINS // 2, _NUM_BINS // 2 - 1)
    quantised = torch.zeros_like(kept_RK)
    for index in range(-_NUM_BINS // 2, _NUM_BINS // 2):
        is_in = bins == index
        quantised = torch.where(is_in, masked_mean(kept_RK, is_in), quantised)
    return quantised


def masked_mean(x_RK: Tensor, mask_RK: Tensor) -> Tensor:
    """Return each row's mean where the mask is set, shape (R, 1); 0 where it is nowhere."""
    return (x_RK * mask_RK).sum(1, keepdim=True) / mask_RK.sum(1, keepdim=True).clamp(min=1)


QUANTISERS: dict[str, Callable[[Tensor], Tensor]] = {
    "one magnitude": one_magnitude,
    "two, 1 step": partial(two_magnitudes, num_steps=1),
    "two, 2 steps": partial(two_magnitudes, num_steps=2),
    "two, 4 steps": partial(two_magnitudes, num_steps=4),
    "six sigma, block": six_sigma,
    "six sigma, vector": lambda kept_RK: six_sigma(kept_RK.view(1, -1)).view_as(kept_RK),
}


def pseudo_gradients(num_rounds: int, num_steps: int) -> list[Tensor]:
    """Return what one worker learns in each round, fp32, shape (P,)."""
    task = make_task(num_steps=num_rounds * num_steps)
    spec = task.run_spec(0, outer=OuterSpec(), codec=CodecSpec())
    corpus = corpus_of(task)
    state = diloco.fresh_state(genesis_of(spec).weights_P, spec, CPU)
    found = []
    for round_index in range(num_rounds):
        before_P = state.theta_P.clone()
        for step in range(num_steps):
            position = round_index * num_steps + step
            diloco.train(
                state,
                windows_of(corpus, spec, stream=b"quantisers", position=position),
                spec,
                micro_batch_sequences=spec.inner.batch_sequences,
                device=CPU,
                should_stop=lambda: False,
            )
        found.append(before_P - state.theta_P)
    return found


def main() -> None:
    """Print a row for every density and round: the share kept, and what each quantiser loses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    gradients = pseudo_gradients(options.rounds, options.steps)
    print("kept of 4096, round, share of energy kept, lost of it:", ", ".join(QUANTISERS))
    for kept in (64, 256, 1024):
        residual_P = torch.zeros_like(gradients[0])
        for round_index, gradient_P in enumerate(gradients):
            x_P = gradient_P + BETA * residual_P
            x_RB = torch.nn.functional.pad(x_P, (0, -len(x_P) % BLOCK)).view(-1, BLOCK)
            indices_RK = x_RB.abs().topk(kept, 1).indices
            kept_RK = x_RB.gather(1, indices_RK)
            energy = float(kept_RK.square().sum())
            lost = [
                float((quantise(kept_RK) - kept_RK).square().sum()) / energy
                for quantise in QUANTISERS.values()
            ]
            share = energy / float(x_RB.square().sum())
            print(kept, round_index, f"{share:.3f}", *(f"{part:.4f}" for part in lost), flush=True)
            sent_RB = torch.zeros_like(x_RB).scatter_(1, indices_RK, two_magnitudes(kept_RK, 2))
            residual_P = x_P - sent_RB.view(-1)[: len(x_P)]


if __name__ == "__main__":
    main()
