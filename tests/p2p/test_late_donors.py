"""Donors that come while a blob is on its way, and the liar that the system tests run."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import trio

from p2p.blobstore import CHUNK_BYTES, BlobStore
from p2p.page_cache import read_cached
from p2p.swarm import Swarm
from tests.p2p.support import serve_store, swarm, trio_test, until
from tests.system.lying_agent import LIES, lying

pytestmark = [pytest.mark.slow, pytest.mark.system]

DATA = os.urandom(5 * CHUNK_BYTES)


async def fetch_from_neighbours(one: Swarm, blob_id: str, store: BlobStore) -> None:
    """Fetch from whoever is connected, as the agent does."""
    await one.fetch_blob(
        blob_id,
        max_bytes=len(DATA),
        providers=lambda: [peer.peer_id for peer in one.peers()],
        store=store,
        purpose="blob",
        deadline_s=15.0,
    )


@pytest.fixture
def never_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a download only what it is told: whom to ask is not looked at now and then."""
    monkeypatch.setattr("p2p.blob_fetch.REASK_EVERY_S", 1000.0)


@pytest.mark.usefixtures("never_looks_again")
@trio_test
async def test_a_donor_is_asked_as_soon_as_it_is_connected(tmp_path: Path) -> None:
    """Nobody is there at first; then one who stops after two chunks; then one who has the rest."""
    async with swarm() as brief, swarm() as late, swarm() as fetcher:
        stores = [BlobStore(tmp_path / name) for name in ("brief", "late")]
        blob_id, _ = [store.add_bytes(DATA) for store in stores]
        target = BlobStore(tmp_path / "target")
        num_left = 3  # the manifest and two chunks

        def two_chunks(_blob_id: str) -> bool:
            nonlocal num_left
            num_left -= 1
            return num_left >= 0

        brief.serve_blobs(stores[0], two_chunks, lambda _blob_id: "blob")
        serve_store(late, stores[1])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch_from_neighbours, fetcher, blob_id, target)
            await until(fetcher.downloads)
            await fetcher.connect(brief.listen_addrs[0])
            await until(lambda: num_left < 0 and not fetcher.downloads()[0].num_peers)
            assert brief.statistics().sent_bytes_by_purpose["blob"] < 3 * CHUNK_BYTES
            await fetcher.connect(late.listen_addrs[0])
        assert target.verify(blob_id)
        assert late.statistics().sent_bytes_by_purpose["blob"] >= 3 * CHUNK_BYTES


@pytest.mark.parametrize("kind", [*LIES])
@trio_test
async def test_the_lying_agent_lies_about_chunks_that_are_in_memory(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once it has told its manifest, chunks are read without a thread: another way out."""
    with lying(kind):
        async with swarm() as liar, swarm(*liar.listen_addrs) as fetcher:
            store = BlobStore(tmp_path / "store")
            blob_id = store.add_bytes(DATA)
            assert store.chunk_hashes(blob_id)
            can_read_cached = read_cached(store.file_of(blob_id), 0, 1) is not None
            assert (store.read_cached_chunk(blob_id, 0) is not None) is can_read_cached
            serve_store(liar, store)
            target = BlobStore(tmp_path / "target")
            with caplog.at_level(logging.WARNING):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(fetch_from_neighbours, fetcher, blob_id, target)
                    await until(lambda: fetcher.statistics().misdeeds)
                    nursery.cancel_scope.cancel()
            assert [liar.peer_id in one.getMessage() for one in caplog.records] == [True]
            assert not target.partial_bytes().get(blob_id)
