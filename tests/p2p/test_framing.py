"""Frames: what goes in comes out, and hostile bytes raise FramingError and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from p2p.errors import FramingError
from p2p.framing import (
    LENGTH,
    BlobOp,
    BlobRequest,
    ReadSome,
    Status,
    encode_blob_request,
    encode_frame,
    encode_manifest,
    encode_refusal,
    parse_blob_request,
    parse_length,
    parse_manifest,
    read_answer_head,
    read_frame,
    read_reason,
    read_status,
)

HASH = st.binary(min_size=32, max_size=32)


def stream_of(data: bytes, piece_bytes: int) -> tuple[ReadSome, list[int]]:
    """Give a stream of pieces of at most `piece_bytes`, and the list of what was asked for."""
    rest = bytearray(data)
    asked: list[int] = []

    async def read_some(num_bytes: int) -> bytes:
        await trio.lowlevel.checkpoint()
        asked.append(num_bytes)
        taken = min(num_bytes, piece_bytes)
        piece = bytes(rest[:taken])
        del rest[:taken]
        return piece

    return read_some, asked


@given(st.binary(max_size=300), st.integers(1, 50))
def test_a_frame_comes_out_as_it_went_in(payload: bytes, piece_bytes: int) -> None:
    read_some, _ = stream_of(encode_frame(payload), piece_bytes)

    async def read() -> bytes:
        return await read_frame(read_some, max_bytes=300)

    assert trio.run(read) == payload


def test_a_frame_that_is_too_large_is_refused_before_it_is_read() -> None:
    read_some, asked = stream_of(encode_frame(b"x" * 101), 1000)

    async def read() -> bytes:
        return await read_frame(read_some, max_bytes=100)

    with pytest.raises(FramingError, match="101"):
        trio.run(read)
    assert asked == [4]


READERS: dict[str, Callable[[ReadSome], Awaitable[object]]] = {
    "frame": lambda read_some: read_frame(read_some, max_bytes=64),
    "status": read_status,
    "answer head": read_answer_head,
    "reason": read_reason,
}


@pytest.mark.parametrize("name", READERS)
@given(data=st.binary(max_size=300), piece_bytes=st.integers(1, 300))
def test_only_framing_errors_escape_the_readers(name: str, data: bytes, piece_bytes: int) -> None:
    read_some, asked = stream_of(data, piece_bytes)

    async def read() -> None:
        with contextlib.suppress(FramingError):
            await READERS[name](read_some)

    trio.run(read)
    assert max(asked) <= 200


PARSERS: dict[str, Callable[[bytes], object]] = {
    "length": lambda data: parse_length(data, max_bytes=1 << 20),
    "blob_request": parse_blob_request,
    "manifest": parse_manifest,
}


@pytest.mark.parametrize("name", PARSERS)
@given(data=st.binary(max_size=120))
def test_only_framing_errors_escape_the_parsers(name: str, data: bytes) -> None:
    with contextlib.suppress(FramingError):
        PARSERS[name](data)


@given(HASH, st.integers(0, 2**32 - 1))
def test_a_blob_request_comes_out_as_it_went_in(raw_id: bytes, index: int) -> None:
    request = BlobRequest(BlobOp.CHUNK, raw_id.hex(), index)
    assert parse_blob_request(encode_blob_request(request)) == request


def test_a_manifest_request_has_no_index() -> None:
    good = encode_blob_request(BlobRequest(BlobOp.MANIFEST, "ab" * 32, 0))
    assert parse_blob_request(good).op is BlobOp.MANIFEST
    with pytest.raises(FramingError):
        parse_blob_request(good[:-1] + b"\x01")
    with pytest.raises(FramingError):
        parse_blob_request(b"\x03" + good[1:])


@given(st.integers(0, 2**64 - 1), st.lists(HASH, max_size=5))
def test_a_manifest_comes_out_as_it_went_in(size_bytes: int, hashes: list[bytes]) -> None:
    assert parse_manifest(encode_manifest(size_bytes, tuple(hashes))) == (size_bytes, tuple(hashes))


def test_a_refusal_is_cut_and_made_printable() -> None:
    read_some, _ = stream_of(encode_refusal(Status.REFUSED, "no\x1b[31m\n" + "x" * 500), 1000)

    async def read() -> str:
        assert await read_status(read_some) is Status.REFUSED
        return await read_reason(read_some)

    reason = trio.run(read)
    assert reason.startswith("no?[31m?xxx")
    assert len(reason) == 200


@given(st.sampled_from(Status), st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_status_and_length_of_an_answer_come_together(
    status: Status, num_bytes: int, piece_bytes: int
) -> None:
    head = bytes([status]) + LENGTH.pack(num_bytes)
    read_some, _ = stream_of(head + b"rest", piece_bytes)

    async def read() -> tuple[Status, bytes, bytes]:
        return *await read_answer_head(read_some), await read_some(1)

    assert trio.run(read) == (status, LENGTH.pack(num_bytes), b"r")
