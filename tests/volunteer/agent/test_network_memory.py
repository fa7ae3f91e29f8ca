"""The port and the bans of the last time outlive the agent."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from p2p.swarm_types import Ban
from tests.fakes.virtual_time import in_nursery, run_threads_inline, run_virtual
from volunteer.agent.network_memory import (
    NetworkFacts,
    bans_of,
    keep_network_facts,
    port_of,
    read_network_facts,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "network.json"


def age(file: Path) -> int:
    return file.stat().st_mtime_ns


def test_what_is_kept_comes_back(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trio.to_thread, "run_sync", run_threads_inline)
    bans: dict[str, Ban] = {"a": Ban("spam" * 200, 5e9)}
    addrs = ["/ip4/127.0.0.1/tcp/4001/p2p/me"]

    async def main(nursery: trio.Nursery, clock: trio.testing.MockClock) -> None:
        nursery.start_soon(keep_network_facts, file, lambda: tuple(addrs), lambda: bans)
        await trio.sleep(1)  # noqa: TID251 - virtual time
        facts = read_network_facts(file)
        assert facts.port == 4001
        assert bans_of(facts) == {"a": Ban(("spam" * 200)[:300], 5e9)}
        first = age(file)
        await trio.sleep(20)  # noqa: TID251 - virtual time
        assert age(file) == first, "nothing has changed"
        bans["b"] = Ban("signed twice", None)
        await trio.sleep(6)  # noqa: TID251 - virtual time
        assert bans_of(read_network_facts(file))["b"] == Ban("signed twice", None)

    run_virtual(in_nursery(main), jumps=True)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"port": 0}',
        b'{"port": 70000}',
        b'{"bans": {"a": {"reason": 5, "until_utc": null}}}',
        b"[" * 20000,
        b'{"port": 4001}' + b" " * 2_000_000,
    ],
    ids=["empty", "list", "binary", "port 0", "big port", "bad ban", "deep", "huge"],
)
def test_a_damaged_file_is_nothing(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    assert read_network_facts(file) == NetworkFacts()


def test_without_a_file_there_is_nothing(file: Path) -> None:
    assert read_network_facts(file) == NetworkFacts()


@pytest.mark.parametrize(
    ("addrs", "port"),
    [
        ((), None),
        (("/ip4/1.2.3.4/udp/5",), None),
        (("/ip4/1.2.3.4/tcp/0/p2p/x",), None),
        (("/ip4/1.2.3.4/tcp/99999",), None),
        (("/ip4/1.2.3.4/tcp/4001/p2p/x", "/ip4/1.2.3.4/tcp/4002"), 4001),
    ],
)
def test_the_port_is_the_first_tcp_one(addrs: tuple[str, ...], port: int | None) -> None:
    assert port_of(addrs) == port
