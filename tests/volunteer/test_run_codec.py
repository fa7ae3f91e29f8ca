"""What a RunSpec may say of its codec and its outer optimizer, and what does not go together."""

from __future__ import annotations

import msgspec
import pytest

from volunteer.data.builtin import load_builtin_run
from volunteer.errors import RunSpecError
from volunteer.run import (
    CodecSpec,
    OuterSpec,
    RunSpec,
    format_run_spec,
    index_bits,
    parse_run_spec,
)

SGD = OuterSpec(lr=1.0, momentum=0.0)
TOPK2 = CodecSpec(id="topk2", error_feedback_beta=0.95)
RUN_ID_BEFORE_LATER_KEYS = "c015259b51dca5afa9b03ce13a957cf1bed92f5e8e284f3f164bf3551eac946e"
"""Of the demo as it was shipped first: `LATER_KEYS` came since, and had their defaults in it."""


def spec_with(codec: CodecSpec, outer: OuterSpec = SGD) -> RunSpec:
    return msgspec.structs.replace(load_builtin_run("demo"), codec=codec, outer=outer)


def parsed(spec: RunSpec) -> RunSpec:
    return parse_run_spec(format_run_spec(spec), source="here")


@pytest.mark.parametrize(
    "codec",
    [
        TOPK2,
        CodecSpec(id="topk2", block_elements=64, ladder_kept=(64,), ladder_rounds=(0,)),
        CodecSpec(id="topk2", ladder_kept=(8, 4096), ladder_rounds=(0, 2**31)),
        CodecSpec(id="int8"),
        CodecSpec(id="int4", block_elements=1000, error_feedback_beta=0.95),
    ],
)
def test_what_goes_together_is_read_back(codec: CodecSpec) -> None:
    spec = spec_with(codec)
    assert parsed(spec) == spec
    assert parsed(spec).run_id == spec.run_id


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_elements": 8192}, "power of two up to 4096"),
        ({"block_elements": 1000, "ladder_kept": (8, 8, 8)}, "power of two"),
        ({"block_elements": 512}, "ladder_kept must not be above"),
        ({"ladder_kept": (64,)}, "one length"),
        ({"ladder_rounds": (1, 2, 3)}, "begin with 0"),
        ({"ladder_rounds": (0, 5, 5)}, "rise"),
        ({"ladder_kept": (1024, 256, 60)}, "multiple of 8"),
        ({"ladder_kept": (1024, 256, 0)}, "8"),
        ({"ladder_kept": ()}, "length"),
        ({"ladder_rounds": (0, 1, -1)}, "0"),
        ({"version": 2}, "codec topk2 2 is unknown"),
    ],
)
def test_a_ladder_that_is_none_is_refused(changes: dict[str, object], said: str) -> None:
    codec = msgspec.structs.replace(TOPK2, **changes)
    with pytest.raises(RunSpecError, match=said):
        parsed(spec_with(codec))


@pytest.mark.parametrize(
    "outer",
    [OuterSpec(momentum=0.5), OuterSpec(momentum=0, momentum_warmup_rounds=2, warmup_momentum=0.1)],
)
def test_a_sparse_codec_goes_with_no_outer_momentum(outer: OuterSpec) -> None:
    with pytest.raises(RunSpecError, match=r"outer\.momentum must be 0"):
        parsed(spec_with(TOPK2, outer))
    assert parsed(spec_with(CodecSpec(id="int8"), outer)).outer == outer


def test_all_problems_of_a_codec_are_told_together() -> None:
    codec = CodecSpec(id="topk2", block_elements=48, ladder_kept=(64,), ladder_rounds=(1, 0))
    with pytest.raises(RunSpecError, match=r"power of two.*above.*one length.*rise.*momentum"):
        parsed(spec_with(codec, OuterSpec()))


def test_a_key_that_came_later_enters_the_id_once_it_says_something() -> None:
    plain = spec_with(CodecSpec(), OuterSpec())
    assert plain.run_id == RUN_ID_BEFORE_LATER_KEYS
    ids = {
        plain.run_id,
        spec_with(CodecSpec(), OuterSpec(momentum_warmup_rounds=1)).run_id,
        spec_with(CodecSpec(), OuterSpec(warmup_momentum=0.1)).run_id,
        spec_with(CodecSpec(ladder_rounds=(0, 1, 2)), OuterSpec()).run_id,
        spec_with(CodecSpec(ladder_kept=(1024, 256, 8)), OuterSpec()).run_id,
    }
    assert len(ids) == 5


def test_the_largest_step_of_the_ladder_says_how_large_a_blob_can_be() -> None:
    rising = CodecSpec(id="topk2", ladder_kept=(64, 1024), ladder_rounds=(0, 10))
    assert rising.bytes_per_parameter == TOPK2.bytes_per_parameter
    assert rising.num_kept(9) == 64
    assert rising.num_kept(10) == 1024


def test_every_row_of_bits_is_whole_bytes() -> None:
    for block in (2**n for n in range(3, 13)):
        for kept in range(8, block + 1, 8):
            offset_bits, place_bits = index_bits(kept, block)
            assert place_bits % 8 == 0
            assert place_bits + offset_bits * kept <= block
            assert (block - 1) >> offset_bits < place_bits - kept or offset_bits == 0
