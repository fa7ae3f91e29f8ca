"""Finding peers on the local network: on loopback, and between two network namespaces."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import trio
import zeroconf

from p2p import mdns
from p2p.addresses import Address
from p2p.peer_exchange import tag_of
from p2p.swarm import Swarm, open_swarm
from tests.p2p.support import (
    Node,
    is_connected,
    new_identity,
    node,
    quick_config,
    swarm,
    trio_test,
    until,
)

pytestmark = [pytest.mark.slow, pytest.mark.system]


def namespace_of_this_test() -> str:
    """Give a namespace that nobody else on this machine looks for."""
    return f"test {os.getpid()} {os.urandom(4).hex()}"


@trio_test
async def test_peers_on_one_machine_find_those_of_their_namespace() -> None:
    ours, theirs = namespace_of_this_test(), namespace_of_this_test()
    async with (
        swarm(namespace=ours, mdns=True) as one,
        swarm(namespace=ours, mdns=True) as other,
        swarm(namespace=theirs, mdns=True) as stranger,
    ):
        await until(lambda: is_connected(one, other) and is_connected(other, one))
        assert one.statistics().found_peers_by_way["mdns"] >= 1
        assert stranger.peers() == ()


@trio_test
async def test_the_event_loop_is_not_held_up() -> None:
    """Starting and closing libp2p's own mDNS blocks it for more than a second."""
    longest_s = 0.0

    async def watch() -> None:
        nonlocal longest_s
        last_at = trio.current_time()
        while True:
            await trio.lowlevel.checkpoint()
            now = trio.current_time()
            longest_s, last_at = max(longest_s, now - last_at), now

    namespace = namespace_of_this_test()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        async with (
            swarm(namespace=namespace, mdns=True) as one,
            swarm(namespace=namespace, mdns=True) as other,
        ):
            await until(lambda: is_connected(one, other))
        nursery.cancel_scope.cancel()
    assert longest_s < 0.5


def test_an_announcement_that_comes_while_it_closes_is_let_go() -> None:
    """Zeroconf's thread goes on for a moment; it ended with a traceback."""
    told: list[str] = []
    events = mdns._SessionEvents(
        heard=lambda name, text: told.append(name),
        lost=told.append,
        failed=told.append,
        ended=lambda: None,
    )
    session = mdns._Session("00-me", "00-", (), events)
    closed = zeroconf.Zeroconf(interfaces=["127.0.0.1"], ip_version=zeroconf.IPVersion.V4Only)
    closed.close()
    with pytest.raises((AssertionError, zeroconf.Error)):
        session.add_service(closed, mdns.SERVICE, f"00-other.{mdns.SERVICE}")
    session.stop()
    session.add_service(closed, mdns.SERVICE, f"00-other.{mdns.SERVICE}")
    assert told == []


def _address_of(one: Swarm) -> Address:
    return one._keeper.addresses()[0]


def test_a_question_that_nobody_will_come_to_leaves_nothing_behind() -> None:
    lookup = mdns._Lookup(mdns.SERVICE, f"any.{mdns.SERVICE}")
    lookup.give_up()
    asking = lookup.async_request(cast("zeroconf.Zeroconf", None), 1.0)
    lookup.give_up()
    del lookup, asking
    gc.collect()  # a coroutine that was never awaited would be complained of here


@trio_test
async def test_new_addresses_are_announced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdns, "LOOK_AT_INTERFACES_EVERY_S", 0.1)
    async with swarm() as one, trio.open_nursery() as nursery:
        heard: list[list[Address]] = []
        own = [_address_of(one)]
        tag = os.urandom(4)
        announcing = mdns.Mdns(tag, one.peer_id, lambda: own, lambda *_args: None)
        listening = mdns.Mdns(
            tag,
            new_identity().peer_id,
            lambda: [Address("ip4", "127.0.0.1", 9, None)],
            lambda _peer_id, addresses: heard.append(list(addresses)),
        )
        nursery.start_soon(announcing.run)
        nursery.start_soon(listening.run)
        await until(lambda: own in heard)
        own = [*own, Address("ip4", "127.0.0.1", 4001, one.peer_id)]
        await until(lambda: own in heard)
        num_heard = len(heard)
        listening.look_again()
        assert heard[num_heard:] == [own]
        nursery.cancel_scope.cancel()


@trio_test
async def test_a_network_without_multicast_is_said_once_and_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="p2p.mdns")
    monkeypatch.setattr(mdns, "RETRY_EVERY_S", 0.05)

    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr(mdns, "Zeroconf", refuse)
    async with swarm(namespace="x", mdns=True) as one, swarm() as other:
        await until(lambda: len(caplog.records) >= 3)
        levels = [record.levelno for record in caplog.records]
        assert levels.count(logging.WARNING) == 1
        await other.connect(one.listen_addrs[0])
        assert one.statistics().host_restarts == 0


@trio_test
async def test_hostile_announcements_are_survived() -> None:
    namespace = namespace_of_this_test()
    prefix = mdns_prefix(namespace)
    async with swarm(namespace=namespace, mdns=True) as one:
        hostile = await trio.to_thread.run_sync(announce_rubbish, prefix)
        try:
            async with swarm(namespace=namespace, mdns=True) as other:
                await until(lambda: is_connected(one, other))
            assert one.statistics().host_restarts == 0
        finally:
            await trio.to_thread.run_sync(hostile.close)


def mdns_prefix(namespace: str) -> str:
    return tag_of(namespace)[:4].hex() + "-"


def announce_rubbish(prefix: str) -> zeroconf.Zeroconf:
    hostile = zeroconf.Zeroconf(interfaces=["127.0.0.1"])
    texts = [b"", b"\xff" * 300, b"\x08dnsaddr=", b"\xffdnsaddr=" + bytes(254), os.urandom(400)]
    for number, text in enumerate(texts):
        service = zeroconf.ServiceInfo(
            mdns.SERVICE,
            f"{prefix}{number}.{mdns.SERVICE}",
            port=1,
            properties=text,
            server=f"{prefix}{number}.local.",
            parsed_addresses=["127.0.0.1"],
        )
        hostile.register_service(service, cooperating_responders=True)
    return hostile


@trio_test
async def test_closing_does_not_wait_for_the_network() -> None:
    async with swarm(namespace=namespace_of_this_test(), mdns=True):
        pass
    started_at = trio.current_time()
    async with open_swarm(new_identity(), quick_config(namespace="x", mdns=True)):
        opened_after_s = trio.current_time() - started_at
    assert opened_after_s < 0.5
    assert trio.current_time() - started_at < opened_after_s + mdns.GOODBYE_S + 1.0


IP = shutil.which("ip")


def run_ip(*words: str) -> None:
    assert IP is not None
    subprocess.run([IP, *words], check=True, capture_output=True, timeout=10)


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[list[str], list[str]]]:
    """Make two network namespaces on one bridge, which is in a third; gives command prefixes."""
    name = f"alm{os.getpid() % 100_000}"
    spaces = [f"{name}-{letter}" for letter in "abs"]
    try:
        for space in spaces:
            run_ip("netns", "add", space)
            run_ip("-n", space, "link", "set", "lo", "up")
        run_ip("-n", spaces[2], "link", "add", "br0", "type", "bridge")
        run_ip("-n", spaces[2], "link", "set", "br0", "up")
        for number, space in enumerate(spaces[:2], start=1):
            peer = ("peer", "name", f"port{number}", "netns", spaces[2])
            run_ip("-n", space, "link", "add", "eth0", "type", "veth", *peer)
            run_ip("-n", spaces[2], "link", "set", f"port{number}", "master", "br0", "up")
            run_ip("-n", space, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            run_ip("-n", space, "link", "set", "eth0", "up")
        one, other = (["ip", "netns", "exec", space] for space in spaces[:2])
        yield one, other
    finally:
        for space in spaces:
            with contextlib.suppress(subprocess.CalledProcessError):
                run_ip("netns", "del", space)


def can_make_network_namespaces() -> bool:
    if IP is None or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return False
    probe = subprocess.run([IP, "netns", "add", f"alm-probe{os.getpid()}"], capture_output=True)
    if probe.returncode == 0:
        run_ip("netns", "del", f"alm-probe{os.getpid()}")
    return probe.returncode == 0


@pytest.mark.timeout(40)
@pytest.mark.skipif(
    not can_make_network_namespaces(), reason="needs root and Linux network namespaces"
)
def test_two_machines_on_one_network_find_each_other(tmp_path: Path) -> None:
    namespace = namespace_of_this_test()
    with (
        two_machines() as (here, there),
        node("meet", tmp_path, namespace, "/ip4/0.0.0.0/tcp/0", prefix=here) as one,
        node("meet", tmp_path, namespace, "/ip4/0.0.0.0/tcp/0", prefix=there) as other,
    ):
        assert first_connected(one) == other.peer_id
        assert first_connected(other) == one.peer_id


def first_connected(one: Node) -> str:
    assert one.process.stdout is not None
    said: dict[str, str] = json.loads(one.process.stdout.readline())
    return said["connected"]
