"""A swarm that gives or takes blobs, in a process of its own: for tests on shaped lines.

    python -m tests.system.blob_node DIR UPLOAD DOWNLOAD

UPLOAD and DOWNLOAD are limits in bytes a second, 0 for none. It serves the blobs in DIR/give, those
above 16 MiB in bulk, says its address, and then takes lines from its stdin until that ends:

    ADDR BLOB_ID   fetch a blob from the peer there, and say how many seconds it took
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import trio

from p2p.blobstore import BlobStore
from p2p.flow import Priority
from p2p.swarm import Swarm, SwarmConfig, open_swarm
from tests.p2p.support import new_identity

BULK_BYTES = 16 << 20


def say(words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def priority_of(size_bytes: int) -> Priority:
    return Priority.BULK if size_bytes > BULK_BYTES else Priority.URGENT


async def fetch(swarm: Swarm, store: BlobStore, addr: str, blob_id: str, size: int) -> None:
    await swarm.connect(addr)
    begun_at = trio.current_time()
    await swarm.fetch_blob(
        blob_id,
        max_bytes=1 << 30,
        providers=lambda: [peer.peer_id for peer in swarm.peers()],
        store=store,
        purpose="blob",
        deadline_s=600.0,
        priority=priority_of(size),
    )
    say({"blob_id": blob_id, "seconds": trio.current_time() - begun_at})


async def main(folder: Path, upload: int, download: int) -> None:
    given, taken = BlobStore(folder / "give"), BlobStore(folder / "take")
    config = SwarmConfig(
        mdns=False, dht=False, upload_bytes_per_s=upload, download_bytes_per_s=download
    )
    async with open_swarm(new_identity(), config) as swarm, trio.open_nursery() as nursery:
        swarm.serve_blobs(
            given,
            lambda _blob_id: True,
            lambda _blob_id: "blob",
            lambda blob_id: priority_of(given.size_bytes(blob_id)),
        )
        addrs = [addr for addr in swarm.listen_addrs if "/127.0.0.1/" not in addr]
        say({"addr": addrs[0]})
        async for line in trio.wrap_file(sys.stdin):
            addr, blob_id, size = line.split()
            nursery.start_soon(fetch, swarm, taken, addr, blob_id, int(size))
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
