"""Measure the agent at rest: its memory and its share of a core, alone and among peers.

PYTHONPATH=. python packaging/benchmarks/bench_rest.py [--seconds 60] [--peers 0 3]

Needs a checkout, Linux and root: the agents run in network namespaces (tests/system/network.py).
*Paused* is by the owner's word, *waiting* is outside the `hours` that are set; both with all the
sensors that this machine has. The first one of the peers contributes, the others are paused, so
that a swarm is on. CPU is that of the agent's process alone: it has no children while it rests.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import psutil

from tests.system.agents import wait_until
from tests.system.swarms import NodeAgent, local_swarm
from volunteer.policy.hours import DAYS

UP_S = 300.0
SETTLE_S = 20.0
"""After the last change: what is done at the start is not rest."""
STATES = ("paused", "waiting")


@dataclass(frozen=True, slots=True)
class Rest:
    """What one resting agent was seen to take."""

    state: str
    num_peers: int
    cpu_fraction: float
    """Of one core."""
    rss_bytes: int
    """The median of what was seen."""
    num_threads: int


def closed_hours() -> str:
    """Return hours that do not begin within a day."""
    day = DAYS[(datetime.now() + timedelta(days=3)).weekday()]
    return f'hours = ["{day} 00:00-01:00"]\n'


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds that a process has taken."""
    times = process.cpu_times()
    return times.user + times.system


def pass_time(seconds: float, process: psutil.Process) -> list[int]:
    """Let time pass; return the memory that the process had every second, in bytes."""
    end_s, seen = time.monotonic() + seconds, [process.memory_info().rss]
    while (left_s := end_s - time.monotonic()) > 0.0:
        time.sleep(min(1.0, left_s))  # noqa: TID251 - a measurement takes its time
        seen.append(process.memory_info().rss)
    return seen


def measure(agent: NodeAgent, state: str, seconds: float) -> Rest:
    """Watch one agent that is at rest already."""
    process = agent.process()
    status = agent.wait_for(f"it is {state}", lambda s: s.state == state, UP_S)
    pass_time(SETTLE_S, process)
    begun_s, before_s = time.monotonic(), cpu_s(process)
    seen = pass_time(seconds, process)
    used = (cpu_s(process) - before_s) / (time.monotonic() - begun_s)
    status = agent.status()
    assert status.state == state, status
    assert not process.children(recursive=True)
    rss_bytes = int(statistics.median(seen))
    return Rest(state, status.num_peers, used, rss_bytes, process.num_threads())


def rest(num_peers: int, state: str, seconds: float, round_s: float, profile: str) -> Rest:
    """Run one agent at rest among so many peers."""
    with tempfile.TemporaryDirectory() as folder, local_swarm(Path(folder), round_s) as swarm:
        lan = swarm.network.add_bridge()
        resting, *others = [swarm.add(lan) for _ in range(num_peers + 1)]
        resting.flags = [flag for flag in resting.flags if flag != "--ignore-idle"]
        resting.locations.prepare()
        settings = closed_hours() if state == "waiting" else "headless = true\n"
        resting.locations.config_file.write_text(settings, "utf-8")
        if profile:
            resting.program = ("cProfile", "-o", profile, "-m", "volunteer.agent")
        swarm.start(resting, *others)
        if state == "paused":
            resting.ask("pause", object)
        for other in others[1:]:
            other.ask("pause", object)
        for other in others[:1]:
            other.wait_for("it contributes", lambda s: s.state == "contributing", UP_S)
        wait_until("all are there", lambda: resting.status().num_peers == num_peers, UP_S)
        return measure(resting, state, seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table, a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--round-s", type=float, default=600.0)
    parser.add_argument("--peers", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES))
    parser.add_argument("--profile", default="", help="also profile the agent into this file")
    options = parser.parse_args(argv)
    print("state    peers  % of a core  MB     threads")
    for num_peers in options.peers:
        for state in options.states:
            one = rest(num_peers, state, options.seconds, options.round_s, options.profile)
            line = (
                f"{one.state:8} {one.num_peers:5}  {100 * one.cpu_fraction:11.2f}  "
                f"{one.rss_bytes / 1e6:5.1f}  {one.num_threads}"
            )
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
