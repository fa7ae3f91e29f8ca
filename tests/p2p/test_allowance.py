"""Where no byte may go any more, a swarm is offline, and it comes back as it was."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

import pytest
import trio

from p2p.allowance import Allowance
from p2p.blobstore import BlobStore
from p2p.swarm import Swarm
from p2p.tcp_stream import SOCKET_READ_BYTES
from tests.p2p.support import ask, is_connected, port_of, serve_double, swarm, trio_test, until

pytestmark = pytest.mark.slow

ALLOWED_BYTES = 1_000_000
BLOB_BYTES = 8 << 20
PIECES = 4
"""That may have been read or written before the connections ended."""


def wire_bytes(one: Swarm) -> int:
    statistics = one.statistics()
    return statistics.wire_sent_bytes + statistics.wire_received_bytes


@trio_test
async def test_a_fetch_stops_within_the_allowance_and_goes_on_with_the_next(tmp_path: Path) -> None:
    async with swarm() as donor, swarm(donor.listen_addrs[0]) as taker:
        store = BlobStore(tmp_path / "give")
        blob_id = store.add_bytes(os.urandom(BLOB_BYTES))
        donor.serve_blobs(store, lambda _: True, lambda _: "blob")
        await until(lambda: is_connected(taker, donor))
        port, begun = port_of(taker), wire_bytes(taker)
        taker.allow(ALLOWED_BYTES)
        async with trio.open_nursery() as nursery:
            done = trio.Event()

            async def fetch() -> None:
                await taker.fetch_blob(
                    blob_id,
                    max_bytes=BLOB_BYTES,
                    providers=lambda: [donor.peer_id],
                    store=BlobStore(tmp_path / "take"),
                    purpose="blob",
                    deadline_s=math.inf,
                )
                done.set()

            nursery.start_soon(fetch)
            await until(lambda: not taker.is_online and not donor.peers())
            assert not taker.peers()
            assert not taker.listen_addrs
            crossed = wire_bytes(taker) - begun
            assert ALLOWED_BYTES <= crossed <= ALLOWED_BYTES + PIECES * SOCKET_READ_BYTES
            taker.allow(None)
            await done.wait()
        assert port_of(taker) == port
        assert taker.statistics().host_restarts == 0


@trio_test
async def test_who_may_send_nothing_opens_offline_and_is_there_once_it_may() -> None:
    async with swarm(allowance_bytes=0) as late, swarm() as other:
        assert not late.listen_addrs
        serve_double(late)
        late.allow(ALLOWED_BYTES)
        await until(lambda: late.listen_addrs and port_of(late))
        await other.connect(late.listen_addrs[0])
        assert await ask(other, late.peer_id) == b"xx"
        late.allow(0)
        await until(lambda: not other.peers())
        with contextlib.suppress(trio.TooSlowError), trio.fail_after(0.5):
            await until(lambda: late.peers() or late.listen_addrs)
            raise AssertionError("it came back by itself")


@trio_test
async def test_what_strangers_send_who_prove_nothing_is_counted_as_well() -> None:
    garbage = b"no handshake " * 100
    async with swarm() as one:
        stream = await trio.open_tcp_stream("127.0.0.1", port_of(one))
        async with stream:
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(garbage)
                await stream.send_eof()
        await until(lambda: one.statistics().wire_received_bytes > 0)
        assert wire_bytes(one) <= 2 * len(garbage)
        assert not one.peers()


def test_it_is_open_while_any_byte_is_left() -> None:
    allowance = Allowance(10)
    allowance.take(9)
    assert allowance.is_open
    allowance.take(1)
    assert not allowance.is_open
    allowance.take(5)  # what was on its way
    allowance.set(None)
    allowance.take(1 << 60)
    assert allowance.is_open
    assert not Allowance(0).is_open
