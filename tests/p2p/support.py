"""What the tests of p2p share: a trio runner, real swarms, and nodes in other processes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import ParamSpec

import trio

from p2p.blobstore import BlobStore
from p2p.identity import Identity
from p2p.swarm import Swarm, SwarmConfig, open_swarm

DEADLINE_S = (
    18.0  # of a whole test: just below pytest's own timeout, so that trio says where it hung
)
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
P = ParamSpec("P")


def trio_test(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run an async test under trio, with a deadline."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def bounded() -> None:
            with trio.fail_after(DEADLINE_S):
                await test(*args, **kwargs)

        trio.run(bounded)

    return run


async def until(condition: Callable[[], object]) -> None:
    """Wait until `condition` holds; the test's deadline ends it."""
    while not condition():  # noqa: ASYNC110 -- the same
        await trio.sleep(0.01)  # noqa: TID251 -- polls what has no event, in one place


def new_identity() -> Identity:
    return Identity(os.urandom(32))


def quick_config(*bootstrap: str) -> SwarmConfig:
    return SwarmConfig(
        listen=LOOPBACK,
        bootstrap=bootstrap,
        redial_every_s=0.2,
        ping_every_s=0.2,
        ping_timeout_s=1.0,
    )


@contextlib.asynccontextmanager
async def swarm(*bootstrap: str) -> AsyncIterator[Swarm]:
    """Open a swarm of one's own on loopback."""
    async with open_swarm(new_identity(), quick_config(*bootstrap)) as opened:
        yield opened


def is_connected(one: Swarm, other: Swarm) -> bool:
    return any(peer.peer_id == other.peer_id for peer in one.peers())


async def double(_peer_id: str, request: bytes) -> bytes:
    return request * 2


async def ask(one: Swarm, peer_id: str, payload: bytes = b"x", *, timeout_s: float = 5.0) -> bytes:
    return await one.request(
        peer_id,
        "/test/double/1",
        payload,
        timeout_s=timeout_s,
        max_response_bytes=100,
        purpose="ask",
    )


def serve_double(one: Swarm) -> None:
    one.serve("/test/double/1", double, max_request_bytes=100, purpose="double")


def serve_store(one: Swarm, store: BlobStore) -> None:
    one.serve_blobs(store, lambda _blob_id: True, lambda _blob_id: "blob")


class Node:
    """A swarm in another process (tests/p2p/node.py), to be stopped or killed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        hello = json.loads(process.stdout.readline())
        self.peer_id: str = hello["peer_id"]
        self.addr: str = hello["listen_addrs"][0]

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)


@contextlib.contextmanager
def node(what: str, directory: Path, *args: str) -> Iterator[Node]:
    """Run a node until the block ends; it is killed then, frozen or not."""
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.p2p.node", what, str(directory), *args],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield Node(process)
        finally:
            process.kill()
