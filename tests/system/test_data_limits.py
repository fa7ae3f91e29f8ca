"""What the owner allows the network, with real agents: so much a second, so much a month."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from tests.system.agents import wait_until
from tests.system.network import Network
from tests.system.swarms import (
    CHUNKED_MODEL,
    LocalSwarm,
    NodeAgent,
    local_swarm,
    report,
    tiny_spec,
    unbalanced,
    wait_contributing,
)
from tests.system.test_serving_rates import ROOT, BlobNode
from volunteer.agent.data_budget import seconds_to_next_month, utc_clock
from volunteer.answers import DayTraffic
from volunteer.run import RunSpec

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.full]

LIMIT_BYTES_PER_S = 1_000_000
TOLERANCE = 0.05
MINUTE_S = 60.0
ROUND_S = 6.0
MB = 1_000_000
BUDGET = 6 * MB
SLOW_BYTES_PER_S = 500_000
"""So that a kill finds the budget half used, and not over."""
AT_THE_INTERFACE = 1.15
"""What TCP, IP and Ethernet add at most, with empty answers; and what a kill forgot."""
SILENT_BYTES_PER_S = 200.0
"""Neighbours' address questions, and attempts of others to connect."""


def fp32_spec() -> RunSpec:
    """Return a run whose contributions are 3.7 MB each: more than a limited line carries."""
    spec = tiny_spec(ROUND_S, CHUNKED_MODEL)
    return msgspec.structs.replace(spec, codec=msgspec.structs.replace(spec.codec, id="fp32"))


def limit(agent: NodeAgent, setting: str) -> NodeAgent:
    agent.locations.prepare()
    agent.locations.config_file.write_text(setting + "\n", "utf-8")
    return agent


@pytest.fixture
def puller(tmp_path: Path) -> Iterator[list[BlobNode]]:
    """Holds what is started in a test."""
    started: list[BlobNode] = []
    yield started
    for one in started:
        one.process.kill()
        one.process.communicate()


def start_puller(swarm: LocalSwarm, node_of: NodeAgent) -> BlobNode:
    """Start somebody who takes blobs from one agent."""
    node = swarm.network.add_node(node_of.node.bridge)
    folder = swarm.folder / "puller"
    folder.mkdir()
    process = subprocess.Popen(
        node.argv(sys.executable, "-m", "tests.system.blob_node", str(folder), "0", "0"),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    one = BlobNode(node, folder, process)
    one.addr = one.answer()["addr"]
    return one


@pytest.mark.timeout(400)
def test_limits_hold_over_a_minute_while_the_swarm_goes_on(
    tmp_path: Path, puller: list[BlobNode]
) -> None:
    with local_swarm(tmp_path, spec=fp32_spec()) as swarm:
        lan = swarm.network.add_bridge()
        sender = limit(swarm.add(lan), f"upload_bytes_per_s = {LIMIT_BYTES_PER_S}")
        taker = limit(swarm.add(lan), f"download_bytes_per_s = {LIMIT_BYTES_PER_S}")
        free = swarm.add(lan)
        swarm.start(sender, taker, free)
        wait_contributing([sender, free], 120.0)
        puller.append(start_puller(swarm, sender))
        asked: set[str] = set()
        asked_at_s = [0.0]
        addr = next(a for a in sender.status().listen_addrs if "/127.0.0.1/" not in a)

        def keep_busy() -> None:
            """Ask the limited sender for the newest state as well: 7.5 MB in each round."""
            if time.monotonic() < asked_at_s[0] + 1.0:
                return
            asked_at_s[0] = time.monotonic()
            state = sender.status().state_hash
            if state and state not in asked:
                asked.add(state)
                stdin = puller[0].process.stdin
                assert stdin is not None
                stdin.write(f"{addr} {state} {8 * MB}\n")
                stdin.flush()

        def are_busy() -> bool:
            keep_busy()
            return min(counters(swarm.network, sender, taker)) > 8 * MB

        wait_until("both lines are busy", are_busy, 120.0)
        first, begun_s = counters(swarm.network, sender, taker), time.monotonic()
        rounds = free.status().round_index

        def is_over() -> bool:
            keep_busy()
            return time.monotonic() - begun_s >= MINUTE_S

        wait_until("a minute", is_over, 2 * MINUTE_S)
        seconds = time.monotonic() - begun_s
        last = counters(swarm.network, sender, taker)
        rates = [(after - before) / seconds for before, after in zip(first, last, strict=True)]
        committed = free.status().round_index - rounds
        report(
            f"limits of {LIMIT_BYTES_PER_S} B/s over {seconds:.0f} s: the interfaces sent"
            f" {rates[0]:.0f} B/s and received {rates[1]:.0f} B/s; {committed} rounds committed"
        )
        assert rates[0] == pytest.approx(LIMIT_BYTES_PER_S, rel=TOLERANCE)
        # Nobody can make a member want more than its rounds need: it is below the limit, or at it
        # (a full line: test_serving_rates.py).
        assert rates[1] <= (1 + TOLERANCE) * LIMIT_BYTES_PER_S
        assert committed >= 3


def counters(network: Network, sender: NodeAgent, taker: NodeAgent) -> tuple[int, int]:
    """Return what the interface of one has sent, and of the other received."""
    return network.interface_bytes(sender.node)[0], network.interface_bytes(taker.node)[1]


@pytest.mark.timeout(400)
def test_a_data_budget_stops_all_and_lets_go_on_with_more(tmp_path: Path) -> None:
    with local_swarm(tmp_path, spec=fp32_spec()) as swarm:
        lan = swarm.network.add_bridge()
        poor = limit(
            swarm.add(lan),
            f"monthly_data_budget_bytes = {BUDGET}\nupload_bytes_per_s = {SLOW_BYTES_PER_S}\n"
            f"download_bytes_per_s = {SLOW_BYTES_PER_S}",
        )
        rich = swarm.add(lan)
        swarm.start(poor, rich)
        before = poor.status()
        wait_until("a kill finds it half used", lambda: poor.status().data_used_bytes > MB, 120.0)
        poor.kill()
        used = poor.start().data_used_bytes
        assert used > MB - 256 * 1024
        told = poor.wait_for("it is used up", lambda s: s.state == "waiting", 180.0)
        assert told.reason == (
            "this month's data budget is used up: 6.0 MB (`monthly_data_budget_bytes`)"
        )
        assert told.resumes_when.startswith("the next month begins (in UTC), or you allow more (")
        now = utc_clock()
        resumes_s = (datetime.fromisoformat(told.resumes_at_utc) - now).total_seconds()
        assert resumes_s == pytest.approx(seconds_to_next_month(now), abs=5.0)
        offline = poor.wait_for("it is offline", lambda s: not s.is_online, 30.0)
        assert offline.num_peers == 0
        assert offline.listen_addrs == ()
        assert offline.data_used_bytes <= BUDGET
        wait_until("the other notices", lambda: rich.status().num_peers == 0, 30.0)
        crossed = sum(swarm.network.interface_bytes(poor.node))
        assert crossed <= AT_THE_INTERFACE * BUDGET
        begun_s = time.monotonic()
        wait_until("ten seconds", lambda: time.monotonic() - begun_s >= 10.0, 20.0)
        silent = (sum(swarm.network.interface_bytes(poor.node)) - crossed) / 10.0
        report(
            f"budget {BUDGET}: {offline.data_used_bytes} counted, {crossed} at the interface;"
            f" then {silent:.0f} B/s"
        )
        assert silent <= SILENT_BYTES_PER_S
        (today, *_) = by_day(poor)
        told_bytes = sum(sum(each.values()) for each in today.bytes_by_purpose.values())
        # A chunk that the end of a connection cut short counts whole by purpose.
        assert -64_000 <= told_bytes - offline.data_used_bytes <= 2 * MB
        assert "used this month (UTC); the network is off" in poor.allmende("status").stdout
        poor.allmende("config", "set", "monthly_data_budget_bytes", str(100 * BUDGET))
        again = poor.wait_for("they meet again", lambda s: s.num_peers == 1, 60.0)
        assert again.is_online
        assert again.state != "waiting"  # on its slow line it catches up first
        assert again.listen_addrs == before.listen_addrs
        assert unbalanced(poor) == ""


def by_day(agent: NodeAgent) -> list[DayTraffic]:
    done = agent.allmende("stats", "--days", "1", "--json")
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout, type=list[DayTraffic])
