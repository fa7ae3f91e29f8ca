"""The test network itself: it separates, cuts, readdresses, shapes, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.system.agents import wait_until
from tests.system.network import Network, Node, remove_leftovers, require_namespaces

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(60)]

LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 7000))
print("up", flush=True)
while True:
    connection, _ = server.accept()
    while connection.recv(65536):
        pass
    connection.close()
"""
DIAL = """
import socket, sys, time
begun = time.monotonic()
connection = socket.create_connection((sys.argv[1], 7000), timeout=2)
connection.sendall(bytes(int(sys.argv[2])))
connection.shutdown(socket.SHUT_WR)
connection.settimeout(20)
connection.recv(1)
print(time.monotonic() - begun)
"""
FORSAKE = """
import subprocess, sys
from tests.system.network import Network
network = Network().__enter__()
node = network.add_node(network.add_bridge())
child = subprocess.Popen(node.argv("sleep", "1000"))
print(node.namespace, child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def network() -> Iterator[Network]:
    require_namespaces()
    with Network() as network:
        yield network


@contextlib.contextmanager
def listening(node: Node) -> Iterator[None]:
    argv = node.argv(sys.executable, "-c", LISTEN, "0.0.0.0")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        try:
            yield
        finally:
            process.kill()


def dial(node: Node, address: str, num_bytes: int = 10) -> float | None:
    """Return how many seconds it took, or None where nobody answers."""
    argv = node.argv(sys.executable, "-c", DIAL, address, str(num_bytes))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=40, check=False)
    return float(done.stdout) if done.returncode == 0 else None


def test_machines_meet_are_cut_off_and_move(network: Network) -> None:
    hosts_own = psutil.net_if_addrs()
    near, far = network.add_bridge(), network.add_bridge()
    a, b, c = (network.add_node(bridge) for bridge in (near, near, far))
    with listening(b), listening(c):
        assert dial(a, b.address) is not None
        assert dial(a, c.address) is None, "no router yet"
        network.join(near, far)
        wait_until("the router is found", lambda: dial(a, c.address), 10)

        network.cut(b)
        assert dial(a, b.address) is None
        network.plug(b)
        wait_until("the cable is in again", lambda: dial(a, b.address), 10)

        old = c.address
        assert network.readdress(c) == c.address != old
        assert dial(a, c.address) is not None
        assert dial(a, old) is None

        fast = dial(a, b.address, 500_000)
        network.shape(a, "4mbit")
        slow = dial(a, b.address, 500_000)
        assert fast is not None
        assert slow is not None
        assert fast < 0.3 < 0.5 < slow < 4.0, "500 kB at 4 Mbit/s take a second"
        assert psutil.net_if_addrs() == hosts_own, "nothing touches the host's network"


def test_multicast_stays_on_its_bridge_and_may_be_dropped(network: Network) -> None:
    near, far = network.add_bridge(), network.add_bridge()
    nodes = [network.add_node(bridge) for bridge in (near, near, far)]
    network.join(near, far)
    hear = (
        "import socket, sys, struct\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "s.bind(('', 5353))\n"
        "group = socket.inet_aton('224.0.0.251') + socket.inet_aton(sys.argv[1])\n"
        "s.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)\n"
        "s.settimeout(1.5)\n"
        "print('up', flush=True)\n"
        "try: print(s.recv(99).decode())\n"
        "except TimeoutError: print('')\n"
    )
    say = (
        "import socket, sys\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "s.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(sys.argv[1]))\n"
        "s.sendto(b'hello', ('224.0.0.251', 5353))\n"
    )

    def heard() -> list[str]:
        listeners = []
        for node in nodes[1:]:
            argv = node.argv(sys.executable, "-c", hear, node.address)
            listeners.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
        for listener in listeners:
            assert listener.stdout is not None
            assert listener.stdout.readline() == "up\n"
        speaker = nodes[0].argv(sys.executable, "-c", say, nodes[0].address)
        subprocess.run(speaker, timeout=10, check=True)
        return [listener.communicate(timeout=10)[0].strip() for listener in listeners]

    assert heard() == ["hello", ""]
    network.set_multicast(near, is_carried=False)
    assert heard() == ["", ""]
    network.set_multicast(near, is_carried=True)
    assert heard() == ["hello", ""]


def test_a_killed_test_run_leaves_nothing(network: Network) -> None:
    argv = [sys.executable, "-c", FORSAKE]
    runner = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert runner.stdout is not None
    assert runner.stdin is not None
    namespace, pid = runner.stdout.readline().split()
    assert namespace not in remove_leftovers(), "its run still lives"
    runner.send_signal(signal.SIGKILL)
    runner.wait(10)
    runner.stdout.close()
    runner.stdin.close()

    def is_gone() -> bool:
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return True
        return False

    wait_until("what ran in it died with it", is_gone, 10)
    begun_s = time.monotonic()
    assert namespace in remove_leftovers()
    assert time.monotonic() - begun_s < 5
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert namespace not in listed.stdout
