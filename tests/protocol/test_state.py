"""Runs, blobs and states: the second implementation reaches the hashes that the program does."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from p2p.blobstore import BlobStore, blob_id_of_bytes
from tests.protocol import second_judgement, second_state, second_wire
from tests.protocol.second_wire import MalformedError
from tests.volunteer.training.synthetic import gradient, make_spec
from volunteer.data.builtin import load_builtin_run
from volunteer.messages import ListedWork
from volunteer.run import GenesisSpec, OuterSpec, RunSpec, format_run_spec, parse_run_spec
from volunteer.training.aggregation import judge, next_state_slices
from volunteer.training.compression import encode
from volunteer.training.contribution_blob import (
    BlobKey,
    parse_contribution_blob,
    write_contribution_blob,
)
from volunteer.training.genesis import build_genesis, write_given_genesis
from volunteer.training.layout import num_parameters
from volunteer.training.state import SharedState, state_hash_of

RUN_IDS = (Path(__file__).parents[1] / "golden" / "run_ids.txt").read_text("utf-8")
ODD = {
    "description": 'Ä "quoted" \\ line\n\tand \x01 and \u2028',
    "contact": "a/b",
}
ODD_NUMBERS = {"lr": 1e-7, "weight_decay": 0.00001, "clip_norm": 123456789.0, "beta1": 2.5e-8}


@pytest.mark.parametrize("line", RUN_IDS.splitlines())
def test_the_second_one_reads_run_ids(line: str) -> None:
    name, run_id = line.split()
    spec = load_builtin_run(name)
    assert second_wire.run_id_of(second_wire.read_spec(format_run_spec(spec))) == run_id


def test_odd_texts_numbers_and_defaults_give_the_same_run_id() -> None:
    spec = make_spec()
    inner = msgspec.structs.replace(spec.inner, **ODD_NUMBERS)
    odd = msgspec.structs.replace(spec, inner=inner, **ODD)
    text = format_run_spec(odd)
    assert second_wire.run_id_of(second_wire.read_spec(text)) == odd.run_id
    bare = "\n".join(
        line for line in text.split("\n") if not line.startswith(("rope_base", "quorum"))
    ).replace("round_s = 600.0", "round_s = 600")
    assert parse_run_spec(bare, source="test").run_id == odd.run_id
    assert second_wire.run_id_of(second_wire.read_spec(bare)) == odd.run_id


def plain(spec: RunSpec) -> second_state.Spec:
    return second_wire.read_spec(format_run_spec(spec))


def test_the_second_one_makes_the_genesis() -> None:
    spec = make_spec()
    genesis = second_state.genesis(plain(spec))
    assert genesis.state_hash() == spec.genesis.state_hash


def test_the_second_one_knows_a_given_genesis(tmp_path: Path) -> None:
    made = make_spec()
    num = num_parameters(made.model)
    weights_P = gradient("weights that exist", num)
    state_hash = write_given_genesis(weights_P, BlobStore(tmp_path))
    genesis = GenesisSpec(source="weights", seed=0, state_hash=state_hash)
    spec = msgspec.structs.replace(made, genesis=genesis)
    theirs = plain(spec)
    assert second_wire.run_id_of(theirs) == spec.run_id
    right = second_state.State(weights_P.tolist(), [0.0] * num)
    assert second_state.given_genesis(theirs, right) is right
    for wrong in (
        second_state.State(weights_P.tolist(), [0.0] * (num - 1) + [1e-30]),
        second_state.State([*weights_P.tolist()[:-1], 0.0], [0.0] * num),
        second_state.State([*weights_P.tolist(), 0.0], [0.0] * (num + 1)),
    ):
        with pytest.raises(MalformedError):
            second_state.given_genesis(theirs, wrong)
    with pytest.raises(MalformedError):
        second_state.genesis(theirs)


WORKS = [
    # author, tokens, is late, is on probation
    ("a", 1000, False, False),
    ("b", 50, False, True),
    ("c", 9000, True, False),
    ("d", 1200, False, False),
    ("e", 900, False, False),
    ("f", 1100, False, True),
    ("a", 1300, True, False),
    ("g", 1000, False, False),
    ("h", 1000, False, False),
    ("i", 1000, False, False),
    ("j", 1000, False, True),
]
NOISE, EXCLUDED, STALE, COPY = 7, 8, 9, 10


def blobs_of(spec: RunSpec, num_works: int) -> list[bytes]:
    """Return contributions: one is against all others, one far too long, one is as the first."""
    num = num_parameters(spec.model)
    blobs = []
    for i, (author, *_) in enumerate(WORKS[:num_works]):
        sign, size = (-1.0 if i == 4 else 1.0), (30.0 if i == 3 else 1.0)
        own_P = gradient(f"own {0 if i == COPY else i}", num)
        common_P = gradient("common", num)
        x_P = own_P if i == NOISE else sign * size * (common_P + 0.3 * own_P)
        blobs.append(write_contribution_blob(encode(x_P, spec.codec, i), key_of(spec, author, i)))
    return blobs


def key_of(spec: RunSpec, author: str, round_index: int) -> BlobKey:
    return BlobKey(
        run_id=spec.run_id,
        module_id="dense",
        author=author,
        round_index=round_index,
        codec=spec.codec,
        num_elements=num_parameters(spec.model),
    )


@pytest.mark.slow
@pytest.mark.parametrize("codec_id", ["int4", "int8", "fp16", "fp32", "topk2"])
@pytest.mark.parametrize("num_works", [1, 3, 7, 11])
def test_the_second_one_reaches_the_same_states(codec_id: str, num_works: int) -> None:
    early = OuterSpec(momentum_warmup_rounds=1, warmup_momentum=0.25)
    trimmed = OuterSpec(aggregation="trimmed_mean")
    outer_of = {"int8": early, "fp16": trimmed, "fp32": trimmed}
    spec = make_spec(codec_id=codec_id, outer=outer_of.get(codec_id))
    num, works = num_parameters(spec.model), WORKS[:num_works]
    ours = build_genesis(spec)
    theirs = second_state.genesis(plain(spec))
    raw = blobs_of(spec, num_works)
    keys = [key_of(spec, author, i) for i, (author, *_) in enumerate(works)]
    listed = [
        ListedWork(
            contribution_id=str(i),
            author=author,
            round_index=i,
            blob_id=blob_id_of_bytes(raw[i]),
            tokens=tokens,
            is_late=is_late,
            is_on_probation=is_on_probation,
            is_excluded=i == EXCLUDED,
            is_stale=i == STALE,
        )
        for i, (author, tokens, is_late, is_on_probation) in enumerate(works)
    ]
    parsed = [parse_contribution_blob(data, key) for data, key in zip(raw, keys, strict=True)]
    outcomes = judge(parsed, listed)
    read = [
        second_state.read_blob(
            data, plain(spec), second_state.blob_metadata(plain(spec), spec.run_id, author, i)
        )
        for i, (data, (author, *_)) in enumerate(zip(raw, works, strict=True))
    ]
    for height in range(2):  # the second one has a momentum to begin with
        outer = spec.outer.at_round(height)
        slices = list(next_state_slices(ours, parsed, outcomes, outer))
        state_hash = state_hash_of(slices, num)
        (whole,) = slices
        ours = SharedState(weights_P=whole.weights_S, momentum_P=whole.momentum_S)
        second = [
            second_state.Listed(*work, is_excluded=i == EXCLUDED, is_stale=i == STALE)
            for i, work in enumerate(works)
        ]
        theirs = second_state.after_commit(theirs, read, second, plain(spec), height)
        assert theirs.state_hash() == state_hash
    _, marked, _ = second_judgement.judged(read, second)
    assert marked == [i for i, outcome in enumerate(outcomes) if outcome.is_marked]
    if num_works == 11:
        refused = {i for i, outcome in enumerate(outcomes) if outcome.refused_reason}
        # A sparse one of another round keeps fewer elements, and is no copy any more.
        assert refused == {4, NOISE, EXCLUDED, STALE} | ({COPY} if codec_id != "topk2" else set())
        assert marked == [4, STALE], "a quarter of nine"
    if num_works == 7:
        assert any(o.refused_reason for o in outcomes), "the cosine rule took part"
        assert any(o.clip_scale < 1.0 for o in outcomes), "and the clip"


@pytest.mark.parametrize("codec_id", ["int4", "int8", "fp16", "fp32", "topk2"])
def test_the_second_one_refuses_what_is_not_due(codec_id: str) -> None:
    spec = make_spec(codec_id=codec_id)
    (data,) = blobs_of(spec, 1)
    due = second_state.blob_metadata(plain(spec), spec.run_id, "a", 0)
    assert second_state.read_blob(data, plain(spec), due).blob_id == blob_id_of_bytes(data)
    for wrong in (data + b"\0", data[:-1], b"\0" + data[1:]):
        with pytest.raises(MalformedError):
            second_state.read_blob(wrong, plain(spec), due)
    with pytest.raises(MalformedError):
        second_state.read_blob(data, plain(spec), due | {"author": "b"})
