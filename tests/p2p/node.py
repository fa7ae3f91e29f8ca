"""A swarm in a process of its own, to be frozen or killed: python -m tests.p2p.node WHAT DIR ARGS.

listen                        accept connections and wait
provide NUM_ANSWERS           serve the blobs in DIR; die by SIGKILL at the request after so many
fetch BLOB_ID ADDR            fetch a blob into DIR from the peer at ADDR
hub NAMESPACE                 accept connections of a namespace and wait
meet NAMESPACE LISTEN         look for peers on the local network; say whom it is connected to
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from pathlib import Path

import trio

from p2p.blobstore import BlobStore
from p2p.swarm import Swarm, open_swarm
from tests.p2p.support import new_identity, quick_config


def provide(one: Swarm, directory: Path, num_answers: int) -> None:
    count = itertools.count()

    def may_serve(_blob_id: str) -> bool:
        if next(count) >= num_answers:
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    one.serve_blobs(BlobStore(directory), may_serve, lambda _blob_id: "blob")


async def fetch(one: Swarm, directory: Path, blob_id: str, addr: str) -> None:
    await one.connect(addr)
    peer_id = addr.rpartition("/")[2]
    await one.fetch_blob(
        blob_id,
        max_bytes=1 << 30,
        providers=lambda: [peer_id],
        store=BlobStore(directory),
        purpose="blob",
        deadline_s=60.0,
    )


def say(words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


async def main(what: str, directory: Path, *args: str) -> None:
    config = quick_config()
    if what == "hub":
        config = quick_config(namespace=args[0])
    elif what == "meet":
        config = quick_config(namespace=args[0], listen=(args[1],), mdns=True)
    async with open_swarm(new_identity(), config) as one:
        if what == "provide":
            provide(one, directory, int(args[0]))
        say({"peer_id": one.peer_id, "listen_addrs": one.listen_addrs})
        if what == "meet":
            for peer in one.peers():
                say({"connected": peer.peer_id})
            one.on_peer_connected(lambda peer: say({"connected": peer.peer_id}))
        if what == "fetch":
            await fetch(one, directory, *args)
        else:
            await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main, sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
