"""Fetching blobs from real peers: liars, the dead, the late, and one's own death."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from p2p.blobstore import CHUNK_BYTES, BlobStore
from p2p.errors import BlobStoreFullError, BlobUnavailableError
from p2p.swarm import Swarm
from tests.p2p.support import new_identity, node, serve_store, swarm, trio_test, until

pytestmark = [pytest.mark.slow, pytest.mark.system]

MIB = CHUNK_BYTES
DATA = os.urandom(5 * MIB)


class ReadingStore(BlobStore):
    """Answers with `read_chunk` alone."""

    def read_cached_chunk(self, blob_id: str, index: int) -> bytearray | None:
        return None


class LyingStore(ReadingStore):
    """Has the right manifest and other chunks."""

    def read_chunk(self, blob_id: str, index: int) -> bytes:
        return bytes(len(super().read_chunk(blob_id, index)))


class LongStore(ReadingStore):
    """Has chunks that are longer than they may be."""

    def read_chunk(self, blob_id: str, index: int) -> bytes:
        return super().read_chunk(blob_id, index) + b"more"


class ShortStore(ReadingStore):
    """Has chunks that are cut."""

    def read_chunk(self, blob_id: str, index: int) -> bytes:
        return super().read_chunk(blob_id, index)[:-1]


class HashLyingStore(BlobStore):
    """Has another manifest than the id stands for."""

    def chunk_hashes(self, blob_id: str) -> tuple[bytes, ...]:
        return tuple(bytes(32) for _ in super().chunk_hashes(blob_id))


async def fetch(
    one: Swarm,
    blob_id: str,
    store: BlobStore,
    *providers: str,
    max_bytes: int = 64 * MIB,
    deadline_s: float = 15.0,
    stall_s: float = math.inf,
    gone_s: float = math.inf,
    ask: Callable[[], list[str]] | None = None,
) -> None:
    await one.fetch_blob(
        blob_id,
        max_bytes=max_bytes,
        providers=ask or (lambda: list(providers)),
        store=store,
        purpose="blob",
        deadline_s=deadline_s,
        stall_s=stall_s,
        gone_s=gone_s,
    )


@trio_test
async def test_a_blob_comes_from_two_peers_at_once(tmp_path: Path) -> None:
    async with swarm() as one, swarm() as other, swarm() as fetcher:
        blob_ids = set()
        for number, server in enumerate((one, other)):
            store = BlobStore(tmp_path / f"{number}")
            blob_ids.add(store.add_bytes(DATA))
            serve_store(server, store)
            await fetcher.connect(server.listen_addrs[0])
        (blob_id,) = blob_ids
        target = BlobStore(tmp_path / "target")
        await fetch(fetcher, blob_id, target, one.peer_id, other.peer_id, fetcher.peer_id)
        assert target.verify(blob_id)
        sent = [server.statistics().sent_bytes_by_purpose["blob"] for server in (one, other)]
        assert min(sent) >= MIB
        assert fetcher.statistics().received_bytes_by_purpose["blob"] >= len(DATA)
        await fetch(fetcher, blob_id, target)  # there already: nobody is asked


@trio_test
async def test_a_liar_and_a_killed_peer_do_not_stop_it(tmp_path: Path) -> None:
    """One provider has corrupt chunks, one is killed -9 after two answers; a third appears late."""
    BlobStore(tmp_path / "dying").add_bytes(DATA)
    with node("provide", tmp_path / "dying", "3") as dying:
        async with swarm() as liar, swarm() as honest, swarm() as fetcher:
            lies, truth = LyingStore(tmp_path / "liar"), BlobStore(tmp_path / "honest")
            blob_id = lies.add_bytes(DATA)
            truth.add_bytes(DATA)
            serve_store(liar, lies)
            serve_store(honest, truth)
            await fetcher.connect(dying.addr)
            await fetcher.connect(liar.listen_addrs[0])
            target = BlobStore(tmp_path / "target")

            def ask() -> list[str]:
                is_late = dying.process.poll() is not None
                return [liar.peer_id, dying.peer_id, *([honest.peer_id] if is_late else [])]

            fetcher.remember(honest.peer_id, honest.listen_addrs)
            await fetch(fetcher, blob_id, target, ask=ask)
            assert target.verify(blob_id)
            assert fetcher.statistics().bad_chunks >= 1
            assert honest.statistics().sent_bytes_by_purpose["blob"] < len(
                DATA
            )  # the dead one's count


@pytest.mark.parametrize("kind", [LongStore, ShortStore])
@trio_test
async def test_who_lies_about_lengths_is_asked_once_and_named_once(
    tmp_path: Path, kind: type[BlobStore], caplog: pytest.LogCaptureFixture
) -> None:
    async with swarm() as liar, swarm(*liar.listen_addrs) as fetcher:
        store, target = kind(tmp_path / "store"), BlobStore(tmp_path / "target")
        blob_id = store.add_bytes(DATA)
        num_asked = 0

        def count(_blob_id: str) -> bool:
            nonlocal num_asked
            num_asked += 1
            return True

        liar.serve_blobs(store, count, lambda _blob_id: "blob")
        with caplog.at_level(logging.WARNING), pytest.raises(BlobUnavailableError):
            await fetch(fetcher, blob_id, target, liar.peer_id, deadline_s=3.0)
        assert num_asked <= 1 + 4, "the manifest, and what was asked for ahead"
        assert fetcher.statistics().misdeeds == 1
        assert [liar.peer_id in record.getMessage() for record in caplog.records] == [True]
        assert not target.has(blob_id)


@trio_test
async def test_what_nobody_has_any_more_is_given_up_early(tmp_path: Path) -> None:
    async with swarm() as server, swarm(*server.listen_addrs) as fetcher:
        serve_store(server, BlobStore(tmp_path / "store"))
        target = BlobStore(tmp_path / "target")
        with pytest.raises(BlobUnavailableError, match="none of 1 peers has"):
            await fetch(fetcher, "ab" * 32, target, server.peer_id, gone_s=0.2)
        with pytest.raises(BlobUnavailableError, match="nobody gave a chunk"):
            await fetch(fetcher, "ab" * 32, target, server.peer_id, stall_s=0.2)
        with pytest.raises(BlobUnavailableError, match="nobody gave a chunk"):
            await fetch(fetcher, "ab" * 32, target, gone_s=0.1, stall_s=0.3)  # nobody is there


@trio_test
async def test_a_download_says_how_far_it_is(tmp_path: Path) -> None:
    async with swarm() as server, swarm(*server.listen_addrs) as fetcher:
        store, target = BlobStore(tmp_path / "store"), BlobStore(tmp_path / "target")
        blob_id = store.add_bytes(DATA)
        num_left = 4  # the manifest and three chunks

        def three_chunks(_blob_id: str) -> bool:
            nonlocal num_left
            num_left -= 1
            return num_left >= 0

        server.serve_blobs(store, three_chunks, lambda _blob_id: "blob")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch, fetcher, blob_id, target, server.peer_id)
            await until(
                lambda: [one.held_bytes for one in fetcher.downloads()] == [3 * MIB] or None
            )
            (view,) = fetcher.downloads()
            assert (view.blob_id, view.size_bytes) == (blob_id, len(DATA))
            assert view.bytes_per_s > 0
            assert target.partial_bytes()[blob_id] == pytest.approx(3 * MIB, abs=65536)
            num_left = 100
        assert fetcher.downloads() == ()
        assert target.partial_bytes() == {}


@pytest.mark.parametrize("kind", [LyingStore, HashLyingStore])
@trio_test
async def test_a_liar_is_asked_once(tmp_path: Path, kind: type[BlobStore]) -> None:
    async with swarm() as liar, swarm(*liar.listen_addrs) as fetcher:
        store, target = kind(tmp_path / "store"), BlobStore(tmp_path / "target")
        blob_id = store.add_bytes(DATA)
        serve_store(liar, store)
        with pytest.raises(BlobUnavailableError):
            await fetch(fetcher, blob_id, target, liar.peer_id, deadline_s=1.5)
        assert fetcher.statistics().bad_chunks == 1
        assert not target.has(blob_id)


@trio_test
async def test_a_killed_fetcher_goes_on_where_it_was(tmp_path: Path) -> None:
    num_chunks, killed_at = 16, 14
    # The manifest and 13 chunks were asked for: 4 are on their way, 4 wait to be written together.
    num_kept = 5
    async with swarm() as server:
        store = BlobStore(tmp_path / "store")
        blob_id = store.add_bytes(os.urandom(num_chunks * MIB))
        target_dir = tmp_path / "target"
        with node("fetch", target_dir, blob_id, server.listen_addrs[0]) as fetching:
            num_asked = 0

            def kill_late(_blob_id: str) -> bool:
                nonlocal num_asked
                num_asked += 1
                if num_asked == killed_at:
                    fetching.process.kill()
                return True

            server.serve_blobs(store, kill_late, lambda _blob_id: "blob")
            await until(lambda: fetching.process.poll() is not None)
            assert num_asked >= killed_at
        assert (target_dir / f"{blob_id}.partial").exists()

        asked_again: list[str] = []

        def count(asked_id: str) -> bool:
            asked_again.append(asked_id)
            return True

        server.serve_blobs(store, count, lambda _blob_id: "blob")
        async with swarm(*server.listen_addrs) as again:
            target = BlobStore(target_dir)
            assert not target.has(blob_id)
            await fetch(again, blob_id, target, server.peer_id)
            assert target.verify(blob_id)
            assert 0 < len(asked_again) <= num_chunks - num_kept
            assert again.statistics().received_bytes_by_purpose["blob"] < num_chunks * MIB


@trio_test
async def test_an_unknown_blob_is_unavailable(tmp_path: Path) -> None:
    async with swarm() as server, swarm(*server.listen_addrs) as fetcher:
        serve_store(server, BlobStore(tmp_path / "store"))
        with pytest.raises(BlobUnavailableError):
            await fetch(
                fetcher, "ab" * 32, BlobStore(tmp_path / "t"), server.peer_id, deadline_s=0.5
            )
        nobody = new_identity().peer_id
        with pytest.raises(BlobUnavailableError):
            await fetch(fetcher, "ab" * 32, BlobStore(tmp_path / "t"), nobody, deadline_s=0.2)
        with pytest.raises(ValueError, match="no blob id"):
            await fetch(fetcher, "../secret", BlobStore(tmp_path / "t"), server.peer_id)
        assert server.statistics().refused_requests >= 1


@trio_test
async def test_what_may_not_be_served_is_not(tmp_path: Path) -> None:
    async with swarm() as server, swarm(*server.listen_addrs) as fetcher:
        store = BlobStore(tmp_path / "store")
        public, private = store.add_bytes(b"public"), store.add_bytes(b"private")
        server.serve_blobs(store, lambda blob_id: blob_id == public, lambda _blob_id: "blob")
        target = BlobStore(tmp_path / "target")
        await fetch(fetcher, public, target, server.peer_id)
        with pytest.raises(BlobUnavailableError):
            await fetch(fetcher, private, target, server.peer_id, deadline_s=0.5)


@trio_test
async def test_a_blob_that_is_too_large_is_refused_at_once(tmp_path: Path) -> None:
    async with swarm() as server, swarm(*server.listen_addrs) as fetcher:
        store, target = BlobStore(tmp_path / "store"), BlobStore(tmp_path / "target")
        blob_id = store.add_bytes(DATA)
        serve_store(server, store)
        with pytest.raises(BlobUnavailableError, match="too many"):
            await fetch(fetcher, blob_id, target, server.peer_id, max_bytes=len(DATA) - 1)
        assert fetcher.statistics().received_bytes_by_purpose["blob"] < 1000
        empty = store.add_bytes(b"")
        await fetch(fetcher, empty, target, server.peer_id, max_bytes=0)
        assert target.size_bytes(empty) == 0


@trio_test
async def test_those_who_fetch_at_once_share_one_download(tmp_path: Path) -> None:
    async with swarm() as server, swarm(*server.listen_addrs) as fetcher:
        store, target = BlobStore(tmp_path / "store"), BlobStore(tmp_path / "target")
        blob_id = store.add_bytes(DATA)
        serve_store(server, store)
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(fetch, fetcher, blob_id, target, server.peer_id)
        assert target.verify(blob_id)
        assert server.statistics().sent_bytes_by_purpose["blob"] < len(DATA) + 1000


@trio_test
async def test_one_who_gives_up_does_not_end_it_for_the_others(tmp_path: Path) -> None:
    async with swarm() as server, swarm(*server.listen_addrs) as fetcher:
        store, target = BlobStore(tmp_path / "store"), BlobStore(tmp_path / "target")
        blob_id = store.add_bytes(DATA)
        may_go_on = False
        server.serve_blobs(store, lambda _blob_id: may_go_on, lambda _blob_id: "blob")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch, fetcher, blob_id, target, server.peer_id)
            with pytest.raises(BlobUnavailableError):
                await fetch(fetcher, blob_id, target, server.peer_id, deadline_s=0.3)
            may_go_on = True
        assert target.verify(blob_id)


@trio_test
async def test_a_full_disk_ends_the_download_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with swarm() as server, swarm(*server.listen_addrs) as fetcher:
        store, target = BlobStore(tmp_path / "store"), BlobStore(tmp_path / "target")
        blob_id = store.add_bytes(DATA)
        serve_store(server, store)
        usage = type("Usage", (), {"free": 0})
        with monkeypatch.context() as patch:
            patch.setattr("p2p.partial_blob.shutil.disk_usage", lambda _directory: usage)
            with pytest.raises(BlobStoreFullError):
                await fetch(fetcher, blob_id, target, server.peer_id)
        await fetch(fetcher, blob_id, target, server.peer_id)
        assert target.verify(blob_id)


@trio_test
async def test_a_frozen_provider_is_replaced(tmp_path: Path) -> None:
    BlobStore(tmp_path / "frozen").add_bytes(DATA)
    with node("provide", tmp_path / "frozen", "1000") as frozen:
        async with swarm() as server, swarm(*server.listen_addrs) as fetcher:
            store, target = BlobStore(tmp_path / "store"), BlobStore(tmp_path / "target")
            blob_id = store.add_bytes(DATA)
            serve_store(server, store)
            await fetcher.connect(frozen.addr)
            frozen.freeze()
            await fetch(fetcher, blob_id, target, frozen.peer_id, server.peer_id)
            assert target.verify(blob_id)
