"""One whole round against a plain implementation of DESIGN.md section 4, bit for bit."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import pytest
import torch

from tests.volunteer.training.synthetic import gradient, work
from volunteer.messages import ListedWork
from volunteer.run import CodecSpec, OuterSpec
from volunteer.training.aggregation import aggregate, judge, next_state_slices
from volunteer.training.compression import encode
from volunteer.training.contribution_blob import (
    BlobKey,
    parse_contribution_blob,
    write_contribution_blob,
)
from volunteer.training.outer import outer_step
from volunteer.training.state import SharedState

P, BLOCK = 1501, 16
CODEC = CodecSpec(block_elements=BLOCK)
KEY = BlobKey(
    run_id="a" * 64, module_id="dense", author="peer", round_index=0, codec=CODEC, num_elements=P
)
LR, MU = 0.7, 0.5


def fp32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def reference_round(
    blobs: Sequence[bytes], listed: Sequence[ListedWork], g: list[float], m: list[float]
) -> tuple[list[float], list[float], list[float]]:
    """Return the new G and m and the weights; plain Python floats, one element at a time."""
    num_blocks = math.ceil(P / BLOCK)
    decoded, norms = [], []
    for blob in blobs:
        data = blob[8 + int.from_bytes(blob[:8], "little") :]
        scales = struct.unpack(f"<{num_blocks}f", data[: 4 * num_blocks])
        nibbles = [n for byte in data[4 * num_blocks :] for n in (byte % 16, byte // 16)]
        codes = [n - 8 for n in nibbles[:P]]
        decoded.append([fp32(codes[i] * scales[i // BLOCK]) for i in range(P)])
        squares = [
            sum(code * code for code in codes[b * BLOCK : (b + 1) * BLOCK]) * (scale * scale)
            for b, scale in enumerate(scales)
        ]
        norms.append(math.sqrt(math.fsum(squares)))
    kept = list(range(len(blobs)))
    while len(kept) >= 3:
        cosines = []
        for i in kept:
            rest = [sum(decoded[j][e] / norms[j] for j in kept if j != i) for e in range(P)]
            dot = sum(x * y for x, y in zip(decoded[i], rest, strict=True))
            cosines.append(dot / (norms[i] * math.sqrt(sum(y * y for y in rest))))
        if min(cosines) >= -0.2:
            break
        kept.pop(cosines.index(min(cosines)))
    tokens = {i: listed[i].tokens for i in kept}
    median_tokens = sorted(tokens.values())[(len(kept) - 1) // 2]
    median_norm = sorted(norms[i] for i in kept)[(len(kept) - 1) // 2]
    weights = [0.0] * len(blobs)
    clips = [1.0] * len(blobs)
    for i in kept:
        weights[i] = min(max(tokens[i], 0.1 * median_tokens), 4.0 * median_tokens)
        weights[i] *= 0.5 if listed[i].is_late else 1.0
        weights[i] *= 0.25 if listed[i].is_on_probation else 1.0
        limit = median_norm * min(max(tokens[i] / median_tokens, 1.0), 4.0)
        if len(kept) >= 5 and norms[i] > limit:
            clips[i] = limit / norms[i]
    total = math.fsum(weights)
    weights = [weight / total for weight in weights]
    new_g, new_m = [], []
    for e in range(P):
        q = 0.0
        for i in kept:
            q += decoded[i][e] * (weights[i] * clips[i])
        q = fp32(q)
        new_m.append(fp32(MU * m[e] + q))
        new_g.append(fp32(g[e] - LR * (q + MU * new_m[e])))
    return new_g, new_m, weights


def members(num: int, *, attacker: int | None = None) -> list[bytes]:
    """Blobs of members that share a direction, each with noise and a length of its own."""
    blobs = []
    for i in range(num):
        x_P = gradient("common", P) + gradient(f"member-{i}", P) * (1 + i / 3)
        blobs.append(
            write_contribution_blob(encode(-20 * x_P if i == attacker else x_P, CODEC), KEY)
        )
    return blobs


FOUR = [
    work(0, tokens=16_000),
    work(1, tokens=900),
    work(2, tokens=12_345, is_late=True),
    work(3, tokens=99_999, is_on_probation=True),
]
SIX = [work(i, tokens=10_000 + 1000 * i) for i in range(6)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blobs", "listed", "num_refused"),
    [
        (members(4), FOUR, 0),
        (members(4, attacker=1), FOUR, 1),
        (members(6, attacker=4), SIX, 1),
        (members(1), FOUR[:1], 0),
    ],
    ids=["four members", "one of four is hostile", "six, clipped, one hostile", "alone"],
)
def test_a_round_is_the_reference_bit_for_bit(
    blobs: list[bytes], listed: list[ListedWork], num_refused: int
) -> None:
    weights_P, momentum_P = gradient("G", P, scale=0.05), gradient("m", P)
    parsed = [parse_contribution_blob(blob, KEY) for blob in blobs]
    aggregate_P, outcomes = aggregate(parsed, listed, P)
    outer = OuterSpec(lr=LR, momentum=MU)
    new_weights_P, new_momentum_P = outer_step(weights_P, momentum_P, aggregate_P, outer)

    g, m, weights = reference_round(blobs, listed, weights_P.tolist(), momentum_P.tolist())
    assert new_momentum_P.tolist() == m
    assert new_weights_P.tolist() == g
    assert [outcome.weight for outcome in outcomes] == weights
    assert sum(bool(outcome.refused_reason) for outcome in outcomes) == num_refused

    streamed = list(
        next_state_slices(
            SharedState(weights_P=weights_P, momentum_P=momentum_P),
            parsed,
            judge(parsed, listed),
            outer,
        )
    )
    assert torch.equal(torch.cat([piece.weights_S for piece in streamed]), new_weights_P)
    assert torch.equal(torch.cat([piece.momentum_S for piece in streamed]), new_momentum_P)
