"""Measure what the exchange costs: tokens of a contributing agent against the bare inner loop.

python packaging/benchmarks/bench_goodput.py [--turns 10] [--round-s 20]

Three real agents train the built-in run `commons` on the CPU, one thread each. `contributing` and
`partner` exchange every `--round-s`; `bare` is alone in a run whose one round lasts a day, so its
trainer does nothing but inner steps. `contributing` and `bare` are pinned to one core and take
turns: one is measured while the other is stopped (`bare` by SIGSTOP, `contributing` by `allmende
pause`'s verb). `partner` and this program have the other core.

A turn of `contributing` lasts from one commit to the next, so each holds one whole exchange. Both
ends of a measurement lie where the trainer has just reported a step. The real round is longer: what
a round costs is therefore also given in seconds, and as a part of `--real-round-s`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from tui.client import ControlClient
from volunteer.answers import Status
from volunteer.errors import ControlError, NoAgentError
from volunteer.locations import HOME_VARIABLE, Locations

PARTS = ("trainer", "agent", "aggregator")
DEADLINE_S = 120.0
POLL_S = 0.25
"""Seldom, since the answers are the measured agent's work."""
STEP_POLL_S = 0.02
"""Often, for the half a second until the trainer reports."""
BARE_ROUND_S = 86400.0
LISTEN = "/ip4/127.0.0.1/tcp/0"


@dataclass(frozen=True, slots=True)
class Turn:
    """One measurement."""

    wall_s: float
    tokens: int
    cpu_s: dict[str, float]
    """Seconds of CPU by part, user and system together."""

    def wall_us(self) -> float:
        """Return the microseconds that passed for each token."""
        return 1e6 * self.wall_s / self.tokens

    def cpu_us(self, *parts: str) -> float:
        """Return the microseconds of CPU that each token cost."""
        return 1e6 * sum(self.cpu_s[part] for part in parts) / self.tokens


class Volunteer:
    """One agent in a folder of its own, pinned to a core."""

    def __init__(self, home: Path, core: int, *flags: str) -> None:
        """Start it; it is up when this returns."""
        self._locations = Locations.from_environment({HOME_VARIABLE: str(home)})
        self._locations.prepare()
        command = [sys.executable, "-P", "-m", "volunteer.agent", "--ignore-idle", "--no-mdns"]
        command += ["--device", "cpu", "--threads", "1", "--listen", LISTEN, *flags]
        with (self._locations.log_dir / "agent.log").open("ab") as log_file:
            self.process = subprocess.Popen(
                ["taskset", "-c", str(core), *command],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env={**os.environ, HOME_VARIABLE: str(home)},
            )
        self.wait("it is up", lambda s: bool(s.listen_addrs))

    def ask(self, verb: str) -> Status:
        """Ask for something that answers with the status."""
        with ControlClient(self._locations.control_socket, deadline_s=30.0) as client:
            return client.request(verb, Status)

    def wait(self, what: str, check: Callable[[Status], bool], poll_s: float = POLL_S) -> Status:
        """Return the first status that `check` accepts."""
        end_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < end_s and self.process.poll() is None:
            with contextlib.suppress(NoAgentError):
                if check(status := self.ask("status")):
                    return status
            time.sleep(poll_s)  # noqa: TID251 - a measurement takes its time
        raise ControlError(f"not within {DEADLINE_S:g} s: {what}", hint=f"see {self.log_file}")

    @property
    def log_file(self) -> Path:
        """Where the agent's log is."""
        return self._locations.log_dir / "agent.log"

    def wait_step(self) -> Status:
        """Return the status right after a report of the trainer."""
        tokens = self.ask("status").tokens_done
        return self.wait("a step", lambda s: s.tokens_done > tokens, STEP_POLL_S)

    def cpu_s(self, status: Status) -> dict[str, float]:
        """Return the CPU seconds of each part so far."""
        pids = (status.trainer_pid, status.agent_pid, status.aggregator_pid)
        times = [psutil.Process(pid).cpu_times() for pid in pids]
        return {part: t.user + t.system for part, t in zip(PARTS, times, strict=True)}

    def measure(self, wait_end: Callable[[], object]) -> Turn:
        """Measure from now until `wait_end` returns."""
        before = self.wait_step()
        begun_s, cpu_before = time.monotonic(), self.cpu_s(before)
        wait_end()
        after = self.wait_step()
        wall_s, cpu_after = time.monotonic() - begun_s, self.cpu_s(after)
        if (before.trainer_pid, before.aggregator_pid) != (after.trainer_pid, after.aggregator_pid):
            raise ControlError("a child ended while it was measured", hint=f"see {self.log_file}")
        cpu_s = {part: cpu_after[part] - cpu_before[part] for part in PARTS}
        return Turn(wall_s, after.tokens_done - before.tokens_done, cpu_s)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop all its processes while the block runs."""
        agent = psutil.Process(self.process.pid)
        family = [agent, *agent.children(recursive=True)]
        for process in family:
            process.suspend()
        try:
            yield
        finally:
            for process in reversed(family):
                process.resume()

    def end(self) -> None:
        """Stop it."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def run(
    folder: Path, num_turns: int, round_s: float, core: int, other_core: int
) -> list[list[Turn]]:
    """Return the turns of `bare` and of `contributing`."""
    with contextlib.ExitStack() as stack:

        def volunteer(name: str, core: int, *flags: str) -> Volunteer:
            started = Volunteer(folder / name, core, *flags)
            stack.callback(started.end)
            return started

        own = ("--round-s", f"{round_s:g}")
        partner = volunteer("partner", other_core, *own)
        addr = partner.ask("status").listen_addrs[0]
        contributing = volunteer("contributing", core, *own, "--bootstrap", addr)
        bare = volunteer("bare", core, "--round-s", f"{BARE_ROUND_S:g}")
        bare.wait("it trains", lambda s: s.state == "contributing")
        turns: list[list[Turn]] = [[], []]
        for number in range(num_turns):
            contributing.ask("pause")
            turns[0].append(bare.measure(lambda: wait_s(round_s)))
            with bare.frozen():
                contributing.ask("resume")
                turns[1].append(measure_round(contributing))
            print(f"  turn {number + 1}: " + "  ".join(map(shown, (turns[0][-1], turns[1][-1]))))
            sys.stdout.flush()
        return turns


def measure_round(agent: Volunteer) -> Turn:
    """Measure from the first commit that lists the agent's own work of this turn to the next."""
    agent.wait("it trains", lambda s: s.state == "contributing" and s.num_peers == 1)
    first = agent.ask("status").round_index
    agent.wait("a commit", lambda s: s.round_index > first)
    start = agent.wait("it contributes to the next", lambda s: s.state == "contributing")
    turn = agent.measure(
        lambda: agent.wait("one more", lambda s: s.round_index > start.round_index)
    )
    if agent.ask("status").round_index != start.round_index + 1:
        raise ControlError("two commits in one turn", hint="make the rounds longer")
    return turn


def wait_s(duration_s: float) -> None:
    """Let the agent work."""
    time.sleep(duration_s)  # noqa: TID251 - a measurement takes its time


def shown(turn: Turn) -> str:
    """Return a turn in a few words."""
    return f"{turn.tokens / turn.wall_s:,.0f} tokens/s, {turn.cpu_us(*PARTS):.1f} us CPU/token"


def tell(bare: Sequence[Turn], contributing: Sequence[Turn], real_round_s: float) -> None:
    """Print medians, ratios, and what the rest is spent on."""
    columns = (bare, contributing)

    def row(name: str, of: Callable[[Turn], float], unit: str) -> None:
        a, b = (median(map(of, turns)) for turns in columns)
        ratio = f"{b / a:8.3f}" if a > 0 else "       -"
        print(f"  {name:28} {a:12.2f} {b:12.2f} {ratio}  {unit}")

    print(
        f"\n  {'median of ' + str(len(bare)) + ' turns':28} {'bare':>12} {'exchange':>12}    ratio"
    )
    row("tokens/s (wall)", lambda t: t.tokens / t.wall_s, "tokens/s")
    row("wall", Turn.wall_us, "us/token")
    row("CPU, all parts", lambda t: t.cpu_us(*PARTS), "us/token")
    for part in PARTS:
        row(f"CPU, {part}", lambda t, part=part: t.cpu_us(part), "us/token")  # type: ignore[misc]
    row("wall without CPU", lambda t: t.wall_us() - t.cpu_us(*PARTS), "us/token")

    base_us = median(turn.cpu_us("trainer") for turn in bare)
    rest = {
        "trainer, beyond the steps": [
            t.cpu_s["trainer"] - 1e-6 * base_us * t.tokens for t in contributing
        ],
        "agent": [t.cpu_s["agent"] for t in contributing],
        "aggregator": [t.cpu_s["aggregator"] for t in contributing],
    }
    print("\n  CPU seconds that one round costs")
    for name, seconds in rest.items():
        print(f"  {name:28} {median(seconds):12.2f}")
    lost_s = median(
        t.wall_s - t.tokens * 1e-6 * median(map(Turn.wall_us, bare)) for t in contributing
    )
    print(
        f"\n  one exchange takes {lost_s:.2f} s of training from this core: goodput "
        f"{1 - lost_s / median(t.wall_s for t in contributing):.1%} in these rounds, "
        f"{1 - lost_s / real_round_s:.2%} in rounds of {real_round_s:g} s, if it costs as much"
    )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--round-s", type=float, default=20.0)
    parser.add_argument("--real-round-s", type=float, default=600.0)
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1], metavar="CORE")
    options = parser.parse_args()
    core, other_core = options.cores
    os.sched_setaffinity(0, {other_core})
    print(f"one core, {options.turns} turns each, rounds of {options.round_s:g} s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        turns = run(Path(folder), options.turns, options.round_s, core, other_core)
    tell(turns[0], turns[1], options.real_round_s)


if __name__ == "__main__":
    main()
