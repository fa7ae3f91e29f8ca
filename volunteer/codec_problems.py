"""What of a RunSpec's codec and outer optimizer cannot go together.

Runs in: every process. Pure.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from volunteer.run import CodecSpec, OuterSpec

MAX_TOPK2_BLOCK = 4096
"""Of the codec `topk2`: an index then takes 12 bits at most."""


def codec_problems(codec: CodecSpec, outer: OuterSpec) -> list[str]:
    """Return each as a sentence."""
    return _topk2_problems(codec, outer) if codec.id == "topk2" else []


def _topk2_problems(codec: CodecSpec, outer: OuterSpec) -> list[str]:
    """Return what of a sparse codec's keys cannot go together."""
    problems = []
    block, kept, rounds = codec.block_elements, codec.ladder_kept, codec.ladder_rounds
    if block > MAX_TOPK2_BLOCK or block.bit_count() != 1:
        problems.append(f"codec.block_elements must be a power of two up to {MAX_TOPK2_BLOCK}")
    if max(kept) > block:
        problems.append("codec.ladder_kept must not be above codec.block_elements")
    if len(kept) != len(rounds):
        problems.append("codec.ladder_kept and codec.ladder_rounds must be of one length")
    if rounds[0] != 0 or any(a >= b for a, b in itertools.pairwise(rounds)):
        problems.append("codec.ladder_rounds must begin with 0 and rise")
    if outer.momentum or (outer.momentum_warmup_rounds and outer.warmup_momentum):
        problems.append(
            "codec topk2 goes with no outer momentum, since its error feedback has that role: "
            "outer.momentum must be 0"
        )
    if outer.aggregation != "mean":
        problems.append(
            "codec topk2 goes with no trimmed mean, since most values are zeros that nobody sent: "
            "outer.aggregation must be mean"
        )
    return problems
