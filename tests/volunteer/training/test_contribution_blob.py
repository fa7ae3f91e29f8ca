"""The blob's bytes: one form, any reader can open it, and hostile ones end in a sentence."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from p2p.blobstore import blob_id_of_bytes
from tests.volunteer.training.synthetic import gradient
from volunteer.errors import ContributionRejectedError
from volunteer.run import KNOWN_CODECS, CodecSpec
from volunteer.training.compression import decode, encode
from volunteer.training.contribution_blob import (
    BlobKey,
    claimed_round_index,
    parse_contribution_blob,
    read_contribution_blob,
    write_contribution_blob,
)

NUM_ELEMENTS = 101
CODEC = CodecSpec(block_elements=32)
KEY = BlobKey(
    run_id="a" * 64,
    module_id="dense",
    author="me",
    round_index=3,
    codec=CODEC,
    num_elements=NUM_ELEMENTS,
)
X_P = gradient("blob", NUM_ELEMENTS)
BLOB = write_contribution_blob(encode(X_P, CODEC), KEY)
HEADER_BYTES = len(KEY.header)
TOPK2 = CodecSpec(id="topk2", block_elements=64, ladder_kept=(16, 8), ladder_rounds=(0, 2))
KEYS = {
    codec_id: dataclasses.replace(
        KEY, codec=TOPK2 if codec_id == "topk2" else CodecSpec(id=codec_id, block_elements=32)
    )
    for codec_id, _ in KNOWN_CODECS
}
SHAPES = {
    "int4": {"codes": ((51,), np.uint8), "scales": ((4,), np.float32)},
    "int8": {"codes": ((101,), np.int8), "scales": ((4,), np.float32)},
    "fp16": {"values": ((101,), np.float16)},
    "fp32": {"values": ((101,), np.float32)},
    "topk2": {
        "scales": ((2,), np.float32),
        "levels": ((2,), np.uint8),
        "places": ((4,), np.uint8),
        "offsets": ((6,), np.uint8),
        "larges": ((2,), np.uint8),
        "signs": ((2,), np.uint8),
    },
}
GOLDEN_IDS = {
    "int4": "7f89ba49db1cc60b47d8aa13b65427d45d2224370ea1239beb2f1a31142aaea7",
    "int8": "433956ff3c609f747d5de8c14dfa88dbbac9281f7a3e76c342175ecc7dc8aae1",
    "fp16": "c2c4c0195082cd8267f60fb14869708368b08270b4ab702790b932ca04aef851",
    "fp32": "45a8d90b7ee5df4a22b2f7af1f809de796970944961ce1670a80ca8602adc18e",
    "topk2": "c25bace84f470692706aaed7d01f727fdb7755b453039069425fbed6ef2e1d22",
}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_a_blob_holds_what_was_encoded(tmp_path: Path, key: BlobKey) -> None:
    expected_P = decode(encode(X_P, key.codec, key.round_index))
    blob = write_contribution_blob(encode(X_P, key.codec, key.round_index), key)
    assert torch.equal(decode(parse_contribution_blob(blob, key)), expected_P)
    file = tmp_path / "blob"
    file.write_bytes(blob)
    assert torch.equal(decode(read_contribution_blob(file, key)), expected_P)
    assert claimed_round_index(file) == 3
    assert file.read_bytes() == blob


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_the_bytes_are_the_golden_ones(key: BlobKey) -> None:
    """A change of one of them is another version of its codec."""
    blob = write_contribution_blob(encode(X_P, key.codec, key.round_index), key)
    assert blob_id_of_bytes(blob) == GOLDEN_IDS[key.codec.id]


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_any_safetensors_reader_opens_it(key: BlobKey) -> None:
    blob = write_contribution_blob(encode(X_P, key.codec, key.round_index), key)
    found = {name: (array.shape, array.dtype) for name, array in load(blob).items()}
    assert found == SHAPES[key.codec.id]
    assert len(blob) == key.size_bytes


def test_the_spec_says_how_large_a_blob_is() -> None:
    for key in KEYS.values():
        large = dataclasses.replace(key, num_elements=10**6, round_index=0)
        content_bytes = large.size_bytes - len(large.header)
        assert content_bytes == pytest.approx(large.codec.bytes_per_parameter * 10**6, abs=4)


def test_a_blob_of_another_density_is_refused_on_both_sides() -> None:
    key = KEYS["topk2"]
    dense_key = dataclasses.replace(key, round_index=1)
    dense = encode(X_P, TOPK2, dense_key.round_index)
    with pytest.raises(ValueError, match="tensors of"):
        write_contribution_blob(dense, key)
    with pytest.raises(ContributionRejectedError, match="round_index"):
        parse_contribution_blob(write_contribution_blob(dense, dense_key), key)


def test_numbers_are_aligned() -> None:
    assert HEADER_BYTES % 8 == 0


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"run_id": "b" * 64}, "run_id"),
        ({"module_id": "other"}, "module_id"),
        ({"round_index": 4}, "round_index"),
        ({"num_elements": 102}, "num_elements"),
        ({"codec": CodecSpec(block_elements=64)}, "block_elements"),
        ({"codec": CodecSpec(id="fp16", block_elements=32)}, "codec"),
        ({"codec": CodecSpec(version=2, block_elements=32)}, "codec_version"),
    ],
)
def test_a_blob_for_something_else_is_refused(changes: dict[str, object], word: str) -> None:
    key = dataclasses.replace(KEY, **changes)  # type: ignore[arg-type] # one per case
    with pytest.raises(ContributionRejectedError, match=word):
        parse_contribution_blob(BLOB, key)


def with_header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + BLOB[HEADER_BYTES:]


HOSTILE = {
    "empty": b"",
    "one byte": b"{",
    "only a length": (2**63).to_bytes(8, "little"),
    "a huge length": (2**40).to_bytes(8, "little") + BLOB[8:],
    "no length": (0).to_bytes(8, "little") + BLOB[8:],
    "header alone": BLOB[:HEADER_BYTES],
    "a byte short": BLOB[:-1],
    "a byte long": BLOB + b"\x88",
    "an empty table": with_header(b"{}      "),
    "deep nesting": with_header(b"[" * 4000),
    "no UTF-8": with_header(b'{"__metadata__":{"format":"\xff\xfe"}}'),
    "another order": with_header(BLOB[8:HEADER_BYTES].replace(b'"codes"', b'"cedos"')),
    "numbers as metadata": with_header(b'{"__metadata__":{"format":1}}'),
    "blanks": with_header(BLOB[8:HEADER_BYTES] + b" " * 8),
    "duplicate keys": with_header(b'{"__metadata__":{},' + BLOB[9:HEADER_BYTES]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_refused_with_a_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(ContributionRejectedError, match="the blob"):
        parse_contribution_blob(HOSTILE[name], KEY)
    file = tmp_path / "blob"
    file.write_bytes(HOSTILE[name])
    with pytest.raises(ContributionRejectedError, match="the blob"):
        read_contribution_blob(file, KEY)


@pytest.mark.parametrize("claim", ["-1", "1e3", "", "9" * 14, "٣"])
def test_a_claimed_round_is_a_plain_number(claim: str, tmp_path: Path) -> None:
    file = tmp_path / "blob"
    file.write_bytes(with_header(f'{{"__metadata__":{{"round_index":"{claim}"}}}}'.encode()))
    with pytest.raises(ContributionRejectedError):
        claimed_round_index(file)


def test_a_claim_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for name, data in HOSTILE.items():
        if b"round_index" not in data:
            file = tmp_path / name.replace(" ", "-")
            file.write_bytes(data)
            with pytest.raises(ContributionRejectedError):
                claimed_round_index(file)


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
@settings(deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255), at=st.floats(0, 1))
def test_a_damaged_blob_is_refused_or_has_the_one_form(
    key: BlobKey, place: float, byte: int, at: float
) -> None:
    damaged = bytearray(write_contribution_blob(encode(X_P, key.codec, key.round_index), key))
    damaged[int(place * len(damaged))] = byte
    cut = int(at * len(damaged))
    for data in (bytes(damaged), bytes(damaged[:cut]), bytes(damaged[cut:])):
        try:
            blob = parse_contribution_blob(data, key)
        except ContributionRejectedError:
            continue
        assert bool(torch.isfinite(decode(blob)).all())
        assert write_contribution_blob(blob, key) == data


@settings(deadline=None)
@given(st.binary(max_size=600))
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(ContributionRejectedError):
        parse_contribution_blob(data, KEY)


def test_a_writable_array_is_not_copied_and_a_wrong_key_is_our_own_mistake() -> None:
    array = np.frombuffer(BLOB, dtype=np.uint8).copy()
    blob = parse_contribution_blob(array, KEY)
    array[-2] = 0x99
    _scales, codes = blob.tensors
    assert int(codes[-2]) == 0x99
    with pytest.raises(ValueError, match="101"):
        write_contribution_blob(blob, dataclasses.replace(KEY, num_elements=100))
