"""An hour of four agents, one of which loses a part every minute: does anything grow?

    python -m tests.system.soak --minutes 60 --log soak.log

Every 30 s it writes a line: round, heads, and for each agent resident memory, file descriptors,
threads and bytes on disk. The first agent's own process is never killed, so that a slow leak is
seen in it; its children are killed as the others' are. The verdict compares the first and the last
third of what comes after the first ten minutes; what a shorter run has on disk is not judged, since
blobs of the last rounds are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

from tests.system.agents import is_alive, wait_until
from tests.system.swarms import (
    ROUND_S,
    LocalSwarm,
    NodeAgent,
    local_swarm,
    unbalanced,
    wait_contributing,
    wait_one_tip,
)

NUM_AGENTS = 4
KILL_EVERY_S = 60.0
SAMPLE_EVERY_S = 30.0
WARM_UP_S = 600.0
SEED = 60
BACK_S = 120.0
ROUND_DISK_BYTES = 64 * 1024
"""What one round may leave on an agent's disk for good: the signed records of four, and a line in
each of three logs."""


class Figures(NamedTuple):
    """One agent at one moment; None where it, or a child, was just away."""

    agent_rss_bytes: float
    children_rss_bytes: float
    fds: float
    threads: float
    disk_bytes: float


class Sample(NamedTuple):
    """All agents at one moment."""

    at_s: float
    round_index: int
    num_heads: int
    figures: list[Figures | None]


LIMITS: dict[str, tuple[float, float]] = {
    "agent_rss_bytes": (0.10, 8e6),
    "children_rss_bytes": (0.10, 40e6),
    "fds": (0.10, 6.0),
    "threads": (0.10, 6.0),
}
"""What each may grow by between the thirds: a fraction, or that much where it is more."""


def look(swarm: LocalSwarm, at_s: float) -> Sample:
    """Take one sample."""
    statuses = [agent.status_or_none() for agent in swarm.agents]
    known = [status for status in statuses if status is not None]
    return Sample(
        at_s,
        max((status.round_index for status in known), default=0),
        len({status.tip for status in known}),
        [figures_of(agent) for agent in swarm.agents],
    )


def figures_of(agent: NodeAgent) -> Figures | None:
    """Read an agent's figures; None if a part of it is away."""
    try:
        own, *children = agent.family()
        if len(children) < 2:
            return None
        return Figures(
            own.memory_info().rss,
            sum(child.memory_info().rss for child in children),
            own.num_fds(),
            own.num_threads(),
            disk_bytes(agent.home),
        )
    except psutil.NoSuchProcess:
        return None


def disk_bytes(folder: Path) -> int:
    """Return the bytes of all files in `folder`; files come and go meanwhile."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += file.lstat().st_size
    return total


def line_of(sample: Sample) -> str:
    """Return a sample as a line of key=value."""
    parts = [f"t_s={sample.at_s:.0f} round={sample.round_index} heads={sample.num_heads}"]
    for number, figures in enumerate(sample.figures):
        if figures is None:
            parts.append(f"v{number}=away")
            continue
        parts.append(
            f"v{number}=rss_mb:{figures.agent_rss_bytes / 1e6:.1f}"
            f"+{figures.children_rss_bytes / 1e6:.1f},fds:{figures.fds:.0f},"
            f"threads:{figures.threads:.0f},disk_kb:{figures.disk_bytes / 1e3:.0f}"
        )
    return " ".join(parts)


def kill_one(swarm: LocalSwarm, chance: random.Random) -> str:
    """Kill a part of an agent with SIGKILL, and start it again if it is the agent itself."""
    number = chance.randrange(NUM_AGENTS)
    part = chance.choice(
        ["agent", "trainer", "aggregator"] if number else ["trainer", "aggregator"]
    )
    victim = swarm.agents[number]
    status = victim.status_or_none()
    if status is None:
        return f"v{number} is not up: nothing killed"
    if part == "agent":
        children = victim.kill()
        wait_until("no orphan", lambda: not any(map(is_alive, children)), 10)
        victim.spawn()
        return f"killed=agent v{number}"
    pid = status.trainer_pid if part == "trainer" else status.aggregator_pid
    if pid is None:
        return f"v{number} has no {part}: nothing killed"
    psutil.Process(pid).send_signal(signal.SIGKILL)
    return f"killed={part} v{number}"


def problems_of(samples: Sequence[Sample], duration_s: float) -> list[str]:
    """Return a sentence for everything that grew after the warm-up."""
    warm = [s for s in samples if s.at_s >= min(WARM_UP_S, duration_s / 3)]
    third = len(warm) // 3
    if third < 1:
        return ["too short for a verdict"]
    early, late = warm[:third], warm[-third:]
    problems = []
    for number in range(NUM_AGENTS):
        for name, (fraction, least) in LIMITS.items():
            before, after = (_median(part, number, name) for part in (early, late))
            if before is None or after is None:
                problems.append(f"v{number} was away for a whole third")
            elif after > before + max(fraction * before, least):
                problems.append(f"v{number} {name}: {before:.0f} -> {after:.0f}")
        if warm[0].at_s < WARM_UP_S:
            continue
        before, after = (_median(part, number, "disk_bytes") for part in (early, late))
        num_rounds = _median_round(late) - _median_round(early)
        if before and after and after - before > max(2e6, num_rounds * ROUND_DISK_BYTES):
            problems.append(
                f"v{number} disk: {before:.0f} -> {after:.0f} bytes in {num_rounds:.0f} rounds"
            )
    if _median_round(late) <= _median_round(early):
        problems.append("no round was committed")
    return problems


def _median(samples: Sequence[Sample], number: int, name: str) -> float | None:
    values = [getattr(s.figures[number], name) for s in samples if s.figures[number] is not None]
    return median(values) if values else None


def _median_round(samples: Sequence[Sample]) -> float:
    return median(sample.round_index for sample in samples)


def soak(folder: Path, duration_s: float, say: Callable[[str], None]) -> list[str]:
    """Run it; return what is wrong, as sentences."""
    chance = random.Random(SEED)
    samples: list[Sample] = []
    with local_swarm(folder) as swarm:
        lan = swarm.network.add_bridge()
        agents = [swarm.add(lan) for _ in range(NUM_AGENTS)]
        swarm.start(*agents)
        wait_contributing(agents, BACK_S)
        begun_s = time.monotonic()
        kill_at_s, sample_at_s = KILL_EVERY_S, 0.0
        steady = agents[0].process()

        def is_over() -> bool:
            nonlocal kill_at_s, sample_at_s
            now_s = time.monotonic() - begun_s
            if now_s >= sample_at_s:
                samples.append(look(swarm, now_s))
                say(line_of(samples[-1]))
                sample_at_s += SAMPLE_EVERY_S
            # None dies so late that it could not be back at the end.
            if now_s >= kill_at_s and kill_at_s < duration_s - KILL_EVERY_S / 2:
                say(f"t_s={now_s:.0f} {kill_one(swarm, chance)}")
                kill_at_s += KILL_EVERY_S
            return now_s >= duration_s

        wait_until("the time is over", is_over, duration_s + 60)
        problems = problems_of(samples, duration_s)
        wait_contributing(agents, BACK_S)
        say(f"one head {wait_one_tip(agents, 8 * ROUND_S):.1f} s after the end")
        problems += [sentence for agent in agents if (sentence := unbalanced(agent))]
        problems += [f"stray processes: {strays}"] if (strays := swarm.strays()) else []
        if agents[0].process() != steady:
            problems.append("the first agent's process ended")
    return problems


def main() -> None:
    """Run from the command line; exit 1 if something grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--log", type=Path, required=True)
    options = parser.parse_args()
    with options.log.open("w", encoding="utf-8") as log, tempfile.TemporaryDirectory() as folder:

        def say(line: str) -> None:
            for stream in (log, sys.stdout):
                stream.write(line + "\n")
                stream.flush()

        problems = soak(Path(folder), 60.0 * options.minutes, say)
        for problem in problems:
            say(f"problem: {problem}")
        say("verdict: " + ("it grew" if problems else "flat"))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
