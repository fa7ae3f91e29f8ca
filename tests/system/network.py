"""A network of our own for system tests: machines, bridges, a router, cables that can be pulled.

    with Network() as network:
        lan = network.add_bridge()
        node = network.add_node(lan)
        subprocess.run(node.argv("ip", "addr"))
        network.cut(node)

Every machine is a network namespace, and so is every bridge and the router: nothing touches the
host's network. All end with the block, with whatever runs inside; what a killed test run has left
behind is removed by the next one, and processes started with `Node.argv` die with the test run.
Needs Linux and root (`require_namespaces` skips where namespaces may not be made).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Final

import psutil
import pytest

_PREFIX: Final = "almd"
_LEFTOVER = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-\d+")
_MAX_BRIDGES: Final = 200
_MAX_HOSTS: Final = 200
_FIRST_HOST: Final = 10  # .1 is the router's
_GONE_DEADLINE_S: Final = 10.0
_names = itertools.count()


class NetworkError(RuntimeError):
    """A command of iproute2 failed."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """One local network: 10.77.<number>.0/24."""

    namespace: str
    number: int

    def address(self, host: int) -> str:
        return f"10.77.{self.number}.{host}"


@dataclass(slots=True)
class Node:
    """One machine: a namespace with `lo` and `eth0`."""

    namespace: str
    bridge: Bridge
    port: str
    """The bridge's end of its cable."""
    address: str

    def argv(self, *command: str) -> list[str]:
        """Return the argument list that runs `command` in there; its pid is the command's own."""
        return [
            *("setpriv", "--pdeathsig", "KILL"),
            *("ip", "netns", "exec", self.namespace),
            *command,
        ]


class Network:
    """The machines of one test."""

    def __init__(self) -> None:
        self._bridges: list[Bridge] = []
        self._nodes: list[Node] = []
        self._router: str | None = None
        self._hosts: dict[Bridge, itertools.count[int]] = {}
        self._namespaces: list[str] = []

    def __enter__(self) -> Network:
        remove_leftovers()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for namespace in reversed(self._namespaces):
            _remove(namespace)

    # -- building

    def add_bridge(self) -> Bridge:
        """Make a local network."""
        assert len(self._bridges) < _MAX_BRIDGES
        bridge = Bridge(self._add_namespace(), len(self._bridges))
        _ip(bridge.namespace, "link add br0 type bridge forward_delay 0 stp_state 0")
        _ip(bridge.namespace, "link set br0 up")
        self._bridges.append(bridge)
        self._hosts[bridge] = itertools.count(_FIRST_HOST)
        return bridge

    def add_node(self, bridge: Bridge) -> Node:
        """Make a machine and plug it in."""
        namespace = self._add_namespace()
        port = f"p{len(self._nodes)}"
        self._plug_in(namespace, "eth0", bridge, port)
        node = Node(namespace, bridge, port, "")
        self.readdress(node)
        self._nodes.append(node)
        return node

    def join(self, *bridges: Bridge) -> None:
        """Route between `bridges`, without carrying multicast or broadcast across."""
        if self._router is None:
            self._router = self._add_namespace()
            forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
            _run("ip", "netns", "exec", self._router, "sh", "-c", forward)
        for bridge in bridges:
            interface = f"eth{bridge.number}"
            self._plug_in(self._router, interface, bridge, f"r{bridge.number}")
            _ip(self._router, f"addr add {bridge.address(1)}/24 dev {interface}")

    def _add_namespace(self) -> str:
        name = f"{_PREFIX}-{os.getpid()}-{_started_at(os.getpid())}-{next(_names)}"
        _run("ip", "netns", "add", name)
        self._namespaces.append(name)
        _ip(name, "link set lo up")
        return name

    def _plug_in(self, namespace: str, interface: str, bridge: Bridge, port: str) -> None:
        # Both ends are born where they belong: the host never sees them.
        _ip(
            bridge.namespace,
            f"link add {port} type veth peer name {interface} netns {namespace}",
        )
        _ip(bridge.namespace, f"link set {port} master br0 up")
        _ip(namespace, f"link set {interface} up")

    # -- trouble

    def cut(self, node: Node) -> None:
        """Pull the cable out of the bridge: no carrier; the address stays."""
        _ip(node.bridge.namespace, f"link set {node.port} down")

    def plug(self, node: Node) -> None:
        """Put the cable back."""
        _ip(node.bridge.namespace, f"link set {node.port} up")

    def part(self, *nodes: Node) -> None:
        """Part `nodes`, all of one bridge, from the others on it: a bridge of their own.

        Every cable keeps its carrier: what does not arrive is only missed.
        """
        namespace = nodes[0].bridge.namespace
        assert all(node.bridge.namespace == namespace for node in nodes)
        _ip(namespace, "link add br1 type bridge forward_delay 0 stp_state 0")
        _ip(namespace, "link set br1 up")
        for node in nodes:
            _ip(namespace, f"link set {node.port} master br1")

    def unite(self, *nodes: Node) -> None:
        """Put parted `nodes` back to the others."""
        namespace = nodes[0].bridge.namespace
        for node in nodes:
            _ip(namespace, f"link set {node.port} master br0")
        _ip(namespace, "link del br1")

    def readdress(self, node: Node) -> str:
        """Give the machine another address, as a new lease does; return it."""
        address = self._new_address(node.bridge)
        if node.address:
            _ip(node.namespace, f"addr del {node.address}/24 dev eth0")
        _ip(node.namespace, f"addr add {address}/24 dev eth0")
        _ip(node.namespace, f"route replace default via {node.bridge.address(1)} dev eth0")
        node.address = address
        return address

    def add_address(self, node: Node) -> str:
        """Give the machine one address more; return it."""
        address = self._new_address(node.bridge)
        _ip(node.namespace, f"addr add {address}/24 dev eth0")
        return address

    def shape(self, node: Node, rate: str) -> None:
        """Let the machine send no faster than `rate`, as tc writes it: `20mbit`."""
        bucket = f"tbf rate {rate} burst 32kbit latency 400ms"
        _run("tc", "-n", node.namespace, *f"qdisc replace dev eth0 root {bucket}".split())

    def unshape(self, node: Node) -> None:
        """Let the machine send as fast as it can again."""
        _run("tc", "-n", node.namespace, *["qdisc", "del", "dev", "eth0", "root"])

    def set_multicast(self, bridge: Bridge, *, is_carried: bool) -> None:
        """Carry multicast between the machines on `bridge`, or drop it as many a wireless one."""
        for node in self._nodes:
            if node.bridge == bridge:
                word = "on" if is_carried else "off"
                _ip(
                    bridge.namespace,
                    f"link set {node.port} type bridge_slave mcast_flood {word}",
                )

    def pids(self, node: Node) -> list[int]:
        """Return the ids of all processes on the machine."""
        return [*map(int, _run("ip", "netns", "pids", node.namespace).split())]

    def received_bytes(self, node: Node) -> dict[str, int]:
        """Return the bytes received over the machine's open TCP connections, by remote address."""
        received: Counter[str] = Counter()
        for line in _run("ss", "-N", node.namespace, "-tinHO").splitlines():
            remote, size = line.split()[4], re.search(r"bytes_received:(\d+)", line)
            received[remote.rpartition(":")[0]] += int(size[1]) if size else 0
        return dict(received)

    def interface_bytes(self, node: Node) -> tuple[int, int]:
        """Return the bytes that the machine has sent and received, in frames of any kind."""
        (link,) = json.loads(_run("ip", "-n", node.namespace, "-s", "-j", "link", "show", "eth0"))
        return link["stats64"]["tx"]["bytes"], link["stats64"]["rx"]["bytes"]

    def multicast_bytes(self, node: Node) -> tuple[int, int]:
        """Return the bytes of IPv4 multicast, headers included, sent and received."""
        text = _run("ip", "netns", "exec", node.namespace, "cat", "/proc/net/netstat")
        names, values = (line.split() for line in text.splitlines() if line.startswith("IpExt:"))
        counts = dict(zip(names[1:], map(int, values[1:]), strict=True))
        return counts["OutMcastOctets"], counts["InMcastOctets"]

    def keep_little_to_send(self, node: Node) -> None:
        """Let the machine's TCP hold back at most 32 kB, so that little of the dead arrives."""
        text = "echo 4096 16384 32768 > /proc/sys/net/ipv4/tcp_wmem"
        _run("ip", "netns", "exec", node.namespace, "sh", "-c", text)

    def _new_address(self, bridge: Bridge) -> str:
        host = next(self._hosts[bridge])
        assert host < _FIRST_HOST + _MAX_HOSTS
        return bridge.address(host)


def require_namespaces() -> None:
    """Skip the test where network namespaces cannot be made."""
    if sys.platform != "linux":
        pytest.skip("network namespaces are Linux's")
    name = f"{_PREFIX}-{os.getpid()}-{_started_at(os.getpid())}-{next(_names)}"
    try:
        _run("ip", "netns", "add", name)
    except NetworkError as error:
        pytest.skip(f"network namespaces may not be made here: {error}")
    _remove(name)


def remove_leftovers() -> list[str]:
    """Remove the namespaces of test runs that have ended without doing so; return their names."""
    removed = []
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        match = _LEFTOVER.fullmatch(name)
        if match and _started_at(int(match[1])) != int(match[2]):
            _remove(name)
            removed.append(name)
    return removed


def _started_at(pid: int) -> int | None:
    """Return when a process was started, which tells it from a later one of that number."""
    try:
        return int(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None


def _remove(namespace: str) -> None:
    """End what runs in `namespace`, and delete it: it is one of ours."""
    with contextlib.suppress(NetworkError):  # gone already
        processes = []
        for pid in map(int, _run("ip", "netns", "pids", namespace).split()):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                processes.append(psutil.Process(pid))
                os.kill(pid, signal.SIGKILL)
        psutil.wait_procs(processes, timeout=_GONE_DEADLINE_S)
        _run("ip", "netns", "del", namespace)


def _ip(namespace: str, command: str) -> None:
    _run("ip", "-n", namespace, *command.split())


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        raise NetworkError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout
