"""What the tests of p2p share: a trio runner, real swarms, and nodes in other processes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import trio

from p2p.blobstore import BlobStore
from p2p.host import Host
from p2p.identity import Identity
from p2p.swarm import Swarm, SwarmConfig, open_swarm

DEADLINE_S = (
    18.0  # of a whole test: just below pytest's own timeout, so that trio says where it hung
)
TOPIC = "test/topic"
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


def quick_config(*bootstrap: str, **changes: Any) -> SwarmConfig:
    """Give a configuration for loopback in which nothing takes long; nobody is looked for."""
    return dataclasses.replace(
        SwarmConfig(
            listen=LOOPBACK,
            bootstrap=bootstrap,
            redial_every_s=0.2,
            ping_every_s=0.2,
            ping_timeout_s=1.0,
            discover_every_s=0.5,
            discover_alone_every_s=0.3,
            mdns=False,
            dht=False,
        ),
        **changes,
    )


@contextlib.asynccontextmanager
async def swarm(*bootstrap: str, **changes: Any) -> AsyncIterator[Swarm]:
    """Open a swarm of one's own on loopback."""
    async with open_swarm(new_identity(), quick_config(*bootstrap, **changes)) as opened:
        yield opened


def port_of(one: Swarm) -> int:
    return int(one.listen_addrs[0].split("/")[4])


def host_of(one: Swarm) -> Host:
    assert one._host is not None
    return one._host


async def assert_serving(one: Swarm) -> None:
    """Show that the host did not even stumble: a newcomer is served, nothing was restarted."""
    serve_double(one)
    async with swarm() as newcomer:
        await newcomer.connect(one.listen_addrs[0])
        assert await ask(newcomer, one.peer_id) == b"xx"
    assert one.statistics().host_restarts == 0


class Listener:
    """Subscribes a swarm and keeps what it hears; refuses what starts with b"bad"."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, bytes]] = []
        self.judged: list[bytes] = []

    async def subscribe(self, one: Swarm, *, is_lenient: bool = False) -> None:
        async def accept(_author: str, payload: bytes) -> bool:
            self.judged.append(payload)
            return is_lenient or not payload.startswith(b"bad")

        async def on_message(author: str, payload: bytes) -> None:
            self.heard.append((author, payload))

        await one.subscribe(TOPIC, accept, on_message, max_bytes=1000, purpose="talk")


async def publish_until_heard(author: Swarm, payload: bytes, *listeners: Listener) -> None:
    """Publish again and again: gossip promises nothing about one message."""

    def is_heard() -> bool:
        return all(any(said.startswith(payload) for _, said in one.heard) for one in listeners)

    number = 0
    while not is_heard():
        await author.publish(TOPIC, payload + b" %d" % number, purpose="talk")
        number += 1
        with trio.move_on_after(0.3):
            await until(is_heard)


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
def node(what: str, directory: Path, *args: str, prefix: Sequence[str] = ()) -> Iterator[Node]:
    """Run a node until the block ends; it is killed then, frozen or not.

    `prefix` is put before the command line, such as `ip netns exec <name>`.
    """
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", "tests.p2p.node", what, str(directory), *args],
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
