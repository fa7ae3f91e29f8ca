"""A real agent that lies about the chunks of blobs it gives: for tests.

    python -m tests.system.lying_agent KIND ARGS-OF-THE-AGENT...

KIND: `flip` one bit of each chunk, `long` by one byte, `short` by one. All else is as it should be,
manifests included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from p2p import blobs
from p2p.blobstore import BlobStore
from p2p.framing import BlobOp, BlobRequest
from volunteer.agent.__main__ import main

LIES: dict[str, Callable[[bytes], bytes]] = {
    "flip": lambda chunk: bytes([chunk[0] ^ 1]) + chunk[1:],
    "long": lambda chunk: chunk + b"\0",
    "short": lambda chunk: chunk[:-1],
}


def lie(kind: str) -> None:
    """Have every chunk that is served from now on be a lie of this kind."""
    read_truly = blobs._read

    def read(store: BlobStore, request: BlobRequest) -> bytes:
        data = read_truly(store, request)
        return LIES[kind](data) if request.op is BlobOp.CHUNK else data

    blobs._read = read


if __name__ == "__main__":
    lie(sys.argv[1])
    main(sys.argv[2:])
