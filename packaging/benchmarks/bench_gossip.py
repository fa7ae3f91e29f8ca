"""Measure gossip among hosts in one process: who gets what, when, and what it costs.

PYTHONPATH=. python packaging/benchmarks/bench_gossip.py [--hosts 8] [--messages 60] [--plain]
[--alone]

Messages have a record's size, and as much in them that is new. `--plain`: as stock gossipsub sends
them, neither packed nor held back. `--alone`: all others have just refused one host a place in
their meshes. Afterwards two hosts end without a word, and messages go on among the rest.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import trio
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V12

from p2p import gossip_router, host_setup
from p2p.identity import Identity
from p2p.swarm import Swarm, SwarmConfig, open_swarm

if TYPE_CHECKING:
    from trio_typing import TaskStatus

RUN, BASE = os.urandom(32).hex(), os.urandom(32).hex()
TOPIC: Final = f"allmende/1/{RUN}/dense/records"
FIELDS: Final = "contribution run_id module_id dense round_index author base blob_id content_hash"
EVERY_S: Final = 0.4
SETTLE_S: Final = 5.0  # for meshes to be made, and for the last message to arrive
NUM_AFTER: Final = 20
NUM_ENDING: Final = 2
_CHANCE: Final = secrets.SystemRandom()


@dataclass
class Sent:
    """One message, and when which host had it."""

    author: int
    at_s: float
    arrived_s: dict[int, float] = field(default_factory=dict)


def new_message(author: str, number: int) -> bytes:
    """Make some 570 bytes of which 64 of 192 hex digits and a signature are new each time."""
    hashes = " ".join((RUN, BASE, os.urandom(32).hex(), os.urandom(32).hex()))
    return f"{FIELDS} {author} {hashes} ".encode() + os.urandom(64) + number.to_bytes(4, "big")


def router_of(swarm: Swarm) -> Any:  # noqa: ANN401 -- libp2p is untyped
    """Return what decides to whom messages go."""
    assert swarm._host is not None
    return swarm._host.pubsub.router


async def keep_open(
    bootstrap: tuple[str, ...], *, task_status: TaskStatus[tuple[Swarm, trio.CancelScope]]
) -> None:
    """Run one host until its scope is cancelled."""
    config = SwarmConfig(
        listen=("/ip4/127.0.0.1/tcp/0",), bootstrap=bootstrap, mdns=False, dht=False
    )
    async with open_swarm(Identity(os.urandom(32)), config) as swarm:
        with trio.CancelScope() as scope:
            task_status.started((swarm, scope))
            await trio.sleep_forever()


async def listen(swarm: Swarm, host: int, messages: dict[int, Sent]) -> None:
    """Note what one host hears."""

    async def accept(_author: str, _payload: bytes) -> bool:
        await trio.lowlevel.checkpoint()
        return True

    async def on_message(_author: str, payload: bytes) -> None:
        await trio.lowlevel.checkpoint()
        messages[int.from_bytes(payload[-4:], "big")].arrived_s[host] = trio.current_time()

    await swarm.subscribe(TOPIC, accept, on_message, max_bytes=4096, purpose="records")


def refuse(swarms: list[Swarm]) -> None:
    """Have everybody refuse the first host a place for a minute."""
    first, *others = swarms
    router = router_of(first)
    for other in others:
        router_of(other).mesh[TOPIC].discard(ID.from_base58(first.peer_id))
        router_of(other)._add_back_off(ID.from_base58(first.peer_id), TOPIC, False)
        router._add_back_off(ID.from_base58(other.peer_id), TOPIC, False)
    router.mesh[TOPIC].clear()


async def publish(
    swarms: list[Swarm], hosts: list[int], messages: dict[int, Sent], num_messages: int
) -> list[Sent]:
    """Send messages, each from one of `hosts`, and wait for the last."""
    for _ in range(num_messages):
        author, number = _CHANCE.choice(hosts), len(messages)
        messages[number] = Sent(author, trio.current_time())
        payload = new_message(swarms[author].peer_id, number)
        await swarms[author].publish(TOPIC, payload, purpose="records")
        await trio.sleep(EVERY_S)  # noqa: TID251 -- a pace
    await trio.sleep(SETTLE_S)  # noqa: TID251 -- nothing tells that nothing will come
    return list(messages.values())[-num_messages:]


def tell(what: str, sent: Iterable[Sent], hosts: list[int]) -> None:
    """Print who of `hosts` got what."""
    pairs = [(one, host) for one in sent for host in hosts if host != one.author]
    num_delivered = sum(host in one.arrived_s for one, host in pairs)
    last_s = [max(one.arrived_s.values()) - one.at_s for one in sent if one.arrived_s]
    sys.stdout.write(
        f"{what}: {num_delivered} of {len(pairs)} delivered; the last host had a message after"
        f" {statistics.median(last_s):.3f} s in the median, {max(last_s):.3f} s at most\n"
    )
    sys.stdout.flush()


async def measure(num_hosts: int, num_messages: int, *, is_alone: bool) -> None:
    """Run the hosts, and print what became of the messages."""
    swarms: list[Swarm] = []
    scopes: list[trio.CancelScope] = []
    messages: dict[int, Sent] = {}
    async with trio.open_nursery() as nursery:
        for _ in range(num_hosts):
            bootstrap = tuple(swarm.listen_addrs[0] for swarm in swarms)
            swarm, scope = await nursery.start(keep_open, bootstrap)
            swarms.append(swarm)
            scopes.append(scope)
        while any(len(swarm.peers()) < num_hosts - 1 for swarm in swarms):  # noqa: ASYNC110 -- once
            await trio.sleep(0.1)  # noqa: TID251 -- polls what has no event
        for host, swarm in enumerate(swarms):
            await listen(swarm, host, messages)
        await trio.sleep(SETTLE_S)  # noqa: TID251 -- the meshes
        if is_alone:
            refuse(swarms)
        hosts = list(range(num_hosts))
        before = sum(swarm.statistics().wire_sent_bytes for swarm in swarms)
        sent = await publish(swarms, hosts, messages, num_messages)
        after = sum(swarm.statistics().wire_sent_bytes for swarm in swarms)
        tell("all", sent, hosts)
        sys.stdout.write(f"{(after - before) / num_messages:.0f} bytes a message on all sockets\n")
        for scope in scopes[:NUM_ENDING]:
            scope.cancel()
        left = hosts[NUM_ENDING:]
        tell(f"{NUM_ENDING} end", await publish(swarms, left, messages, NUM_AFTER), left)
        nursery.cancel_scope.cancel()


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--messages", type=int, default=60)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    if options.plain:
        vars(host_setup)["PACKED_PROTOCOL"] = PROTOCOL_ID_V12
        vars(gossip_router)["HOLD_BACK_S"] = (0.0, 0.0)
    trio.run(lambda: measure(options.hosts, options.messages, is_alone=options.alone))


if __name__ == "__main__":
    main()
