"""Chunks on their way to the disk: some together, slow ones at once, the last ones always."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest
import trio
from blake3 import blake3
from trio.testing import MockClock

from p2p.blob_hashes import CHUNK_BYTES, blob_id_of_bytes, hashes_of_bytes
from p2p.blobstore import BlobStore
from p2p.chunk_writer import WRITE_AFTER_S, WRITTEN_TOGETHER, ChunkWriter
from p2p.errors import BlobCorruptError
from p2p.flow import Priority
from p2p.partial_blob import PartialBlob

NUM_CHUNKS = 2 * WRITTEN_TOGETHER + 2
DATA = blake3(b"chunks").digest(length=(NUM_CHUNKS - 1) * CHUNK_BYTES + 7)
BLOB_ID = blob_id_of_bytes(DATA)


class Writes(BlobStore):
    """A store that remembers what was written with what."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.groups: list[list[int]] = []
        self.partial = self.open_partial(BLOB_ID, len(DATA), hashes_of_bytes(DATA))

    def write_partial_chunks(
        self, partial: PartialBlob, chunks: Mapping[int, bytes | bytearray]
    ) -> None:
        self.groups.append(list(chunks))
        super().write_partial_chunks(partial, chunks)


def chunk(index: int) -> bytearray:
    return bytearray(DATA[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])


def store_of(writer: ChunkWriter) -> Writes:
    store = writer._store
    assert isinstance(store, Writes)
    return store


def run(
    tmp_path: Path,
    steps: Callable[[ChunkWriter], Awaitable[None]],
    priority: Priority = Priority.URGENT,
) -> Writes:
    """Take steps with a writer, close it, and return where it wrote."""
    store = Writes(tmp_path)

    async def main() -> None:
        writer = ChunkWriter(store, store.partial, priority)
        try:
            await steps(writer)
        finally:
            await writer.close()

    trio.run(main, clock=MockClock())
    return store


def test_what_comes_fast_is_written_together_and_is_whole(tmp_path: Path) -> None:
    async def steps(writer: ChunkWriter) -> None:
        for index in range(NUM_CHUNKS):
            assert await writer.keep(index, chunk(index))
            assert not await writer.keep(index, chunk(index))

    store = run(tmp_path, steps)
    assert store.groups == [[0], [1, 2, 3, 4], [5, 6, 7, 8], [9]]
    assert store.partial.missing == set()
    assert store.resume_partial(BLOB_ID) is not None
    (tmp_path / f"{BLOB_ID}.partial").replace(store.file_of(BLOB_ID))
    assert store.verify(BLOB_ID)


@pytest.mark.parametrize("priority", Priority)
def test_what_comes_slowly_is_written_at_once(tmp_path: Path, priority: Priority) -> None:
    after_s = WRITE_AFTER_S[priority]
    clock_steps = (0.0, after_s, after_s / 2, after_s)

    async def steps(writer: ChunkWriter) -> None:
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, MockClock)
        for index, duration_s in enumerate(clock_steps):
            clock.jump(duration_s)
            await writer.keep(index, chunk(index))

    assert run(tmp_path, steps, priority).groups == [[0], [1], [2, 3]]


@pytest.mark.parametrize(
    ("priority", "groups"),
    [(Priority.BULK, [[0], [1], [2], [3], [4]]), (Priority.URGENT, [[0], [1, 2, 3, 4]])],
)
def test_a_kill_costs_a_state_no_chunk_but_the_one_on_its_way(
    tmp_path: Path, priority: Priority, groups: list[list[int]]
) -> None:
    """At 40 MiB/s."""

    async def steps(writer: ChunkWriter) -> None:
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, MockClock)
        for index in range(5):
            clock.jump(1 / 40)
            await writer.keep(index, chunk(index))
        assert store_of(writer).groups == groups, "before it is closed"

    assert run(tmp_path, steps, priority).groups == groups


def test_what_came_before_a_silence_is_written_in_it(tmp_path: Path) -> None:
    async def steps(writer: ChunkWriter) -> None:
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, MockClock)
        for index in range(3):
            await writer.keep(index, chunk(index))
        await writer.write_old()
        assert store_of(writer).partial.missing == set(range(1, NUM_CHUNKS))
        clock.jump(WRITE_AFTER_S[Priority.URGENT])
        await writer.write_old()
        assert store_of(writer).partial.missing == set(range(3, NUM_CHUNKS))

    assert run(tmp_path, steps).groups == [[0], [1, 2]]


def test_what_is_left_is_written_though_the_download_is_cancelled(tmp_path: Path) -> None:
    async def steps(writer: ChunkWriter) -> None:
        with trio.CancelScope() as scope:
            for index in range(3):
                await writer.keep(index, chunk(index))
            scope.cancel()
            await trio.sleep_forever()

    store = run(tmp_path, steps)
    assert store.groups == [[0], [1, 2]]
    resumed = store.resume_partial(BLOB_ID)
    assert resumed is not None
    assert resumed.missing == set(range(3, NUM_CHUNKS))
    resumed.close()


def test_a_wrong_chunk_is_noticed_at_once_and_never_written(tmp_path: Path) -> None:
    async def steps(writer: ChunkWriter) -> None:
        for index in (0, 1):
            await writer.keep(index, chunk(index))
        with pytest.raises(BlobCorruptError):
            await writer.keep(2, chunk(3))

    store = run(tmp_path, steps)
    assert store.groups == [[0], [1]]
    assert 2 in store.partial.missing


def test_the_last_chunks_wait_for_nobody_else(tmp_path: Path) -> None:
    async def steps(writer: ChunkWriter) -> None:
        async with trio.open_nursery() as nursery:
            for index in range(NUM_CHUNKS):
                nursery.start_soon(writer.keep, index, chunk(index))
        assert store.partial.missing == set(), "without being closed"

    store = Writes(tmp_path)

    async def main() -> None:
        writer = ChunkWriter(store, store.partial, Priority.URGENT)
        await steps(writer)
        await writer.close()

    trio.run(main)
    assert sorted(itertools.chain(*store.groups)) == list(range(NUM_CHUNKS))
