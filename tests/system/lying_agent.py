"""A real agent that lies about the chunks of blobs it gives: for tests.

    python -m tests.system.lying_agent KIND ARGS-OF-THE-AGENT...

KIND: `flip` one bit of each chunk, `long` by one byte, `short` by one. All else is as it should be,
manifests included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest import mock

from p2p.blobs import BlobServer
from p2p.framing import BlobOp, BlobRequest
from volunteer.agent.__main__ import main

LIES: dict[str, Callable[[bytes], bytes]] = {
    "flip": lambda chunk: bytes([chunk[0] ^ 1]) + chunk[1:],
    "long": lambda chunk: chunk + b"\0",
    "short": lambda chunk: chunk[:-1],
}


def lying(kind: str) -> AbstractContextManager[object]:
    """Have every chunk that is served be a lie of this kind, wherever it was read, in the block."""
    payload_truly = BlobServer._payload_of

    async def payload_of(server: BlobServer, request: BlobRequest) -> bytes | bytearray | None:
        payload = await payload_truly(server, request)
        if payload is None or request.op is not BlobOp.CHUNK:
            return payload
        return LIES[kind](bytes(payload))

    return mock.patch.object(BlobServer, "_payload_of", payload_of)


if __name__ == "__main__":
    with lying(sys.argv[1]):
        main(sys.argv[2:])
