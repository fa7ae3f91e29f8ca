"""From "owner touches the mouse" to "no inner step runs" and "process gone", on a real X server.

    python packaging/benchmarks/bench_pause.py [--times 50] [--json FILE]

An agent trains the built-in run on the CPU while an Xvfb of its own is idle; xdotool moves the
mouse through the server's own input; the agent sees it through the X protocol, as on a desktop.
Needs Debian's packages xvfb and xdotool. Input counts at once, so nothing is taken off for
steadiness. At the end the token ledger must add up over all the pauses.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from tui.client import ControlClient
from volunteer.answers import Stats, Status
from volunteer.errors import ControlError
from volunteer.locations import HOME_VARIABLE, Locations

CONFIG = """
idle_minutes = 0.05
resume_after_s = 1
others_cpu_limit = 1
pause_on_battery = false
"""
WAIT_S = 120.0
_never = threading.Event()
_STOP = re.compile(
    r"^(\S+ \S+) INFO .*trainer stopped: last_step_after_s=([\d.]+) gone_after_s=([\d.]+)", re.M
)
_NOTICED = re.compile(r"^(\S+ \S+) INFO .*not contributing: you are using the machine", re.M)


@dataclass
class Bench:
    """One agent and one display."""

    home: Path
    display: int

    @property
    def locations(self) -> Locations:
        """The agent's folders."""
        return Locations.from_environment({HOME_VARIABLE: str(self.home)})

    def start(self) -> subprocess.Popen[bytes]:
        """Start the agent and return its process."""
        self.locations.prepare()
        self.locations.config_file.write_text(CONFIG, encoding="utf-8")
        command = [sys.executable, "-P", "-m", "volunteer.agent", "--no-mdns", "--no-dht"]
        command += ["--device", "cpu", "--listen", "/ip4/127.0.0.1/tcp/0"]
        return subprocess.Popen(
            command,
            env={**os.environ, HOME_VARIABLE: str(self.home)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def status(self) -> Status | None:
        """Return what the agent says; None while it does not answer."""
        try:
            with ControlClient(self.locations.control_socket, deadline_s=20.0) as client:
                return client.request("status", Status)
        except ControlError:
            return None

    def stats(self) -> Stats:
        """Return the ledger."""
        with ControlClient(self.locations.control_socket, deadline_s=20.0) as client:
            return client.request("stats", Stats)

    def wait_contributing(self, least_step: int) -> int:
        """Wait until it has taken a step more; return the trainer's process id."""
        end_s = time.monotonic() + WAIT_S
        while time.monotonic() < end_s:
            status = self.status()
            if status and status.state == "contributing" and status.inner_step > least_step:
                assert status.trainer_pid is not None
                return status.trainer_pid
            _never.wait(0.05)
        sys.exit(f"it does not contribute: {self.status()}")

    def touch(self) -> float:
        """Move the mouse; return the wall-clock time just before."""
        touched_utc_s = time.time()
        subprocess.run(
            ["xdotool", "mousemove_relative", "--", "5", "2"],
            env={**os.environ, "DISPLAY": f":{self.display}"},
            check=True,
        )
        return touched_utc_s

    def logged(self) -> str:
        """Return the agent's log."""
        return (self.locations.log_dir / "agent.log").read_text("utf-8", errors="replace")


def _seconds(stamp: str) -> float:
    return datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").timestamp()


def measure_one(bench: Bench, number: int, least_step: int) -> dict[str, float]:
    """Touch once; return the seconds until it was noticed, the last step, and the process's end."""
    trainer_pid = bench.wait_contributing(least_step)
    touched_s = bench.touch()
    end_s = time.monotonic() + WAIT_S
    while len(stops := _STOP.findall(bench.logged())) <= number:
        if time.monotonic() > end_s:
            sys.exit("the trainer was not stopped")
        _never.wait(0.02)
    if psutil.pid_exists(trainer_pid):
        sys.exit("the trainer is said to be gone, and is not")
    stamp, last_step_after_s, gone_after_s = stops[number]
    begun_s = _seconds(stamp) - float(gone_after_s)
    noticed_s = _seconds(_NOTICED.findall(bench.logged())[-1])
    return {
        "noticed_s": noticed_s - touched_s,
        "last_step_s": begun_s + float(last_step_after_s) - touched_s,
        "gone_s": begun_s + float(gone_after_s) - touched_s,
    }


def run(times: int) -> dict[str, object]:
    """Measure `times` pauses on a display and an agent of its own."""
    read_end, write_end = os.pipe()
    server = subprocess.Popen(
        ["Xvfb", "-displayfd", str(write_end), "-screen", "0", "640x480x24", "-nolisten", "tcp"],
        pass_fds=[write_end],
        stderr=subprocess.DEVNULL,
    )
    os.close(write_end)
    with tempfile.TemporaryDirectory() as folder, os.fdopen(read_end) as told:
        bench = Bench(Path(folder) / "home", int(told.readline()))
        agent = bench.start()
        try:
            taken = []
            step = 0
            for number in range(times):
                taken.append(measure_one(bench, number, step))
                status = bench.status()
                step = status.inner_step if status else step
                print(number + 1, {k: round(v, 3) for k, v in taken[-1].items()}, flush=True)
            stats = bench.stats()
        finally:
            agent.terminate()
            agent.wait(30)
            server.terminate()
            server.wait(10)
    parts = stats.tokens_confirmed + stats.tokens_in_flight + stats.tokens_pending
    parts += stats.tokens_refused + stats.tokens_dropped
    result: dict[str, object] = {"times": times, "load": os.getloadavg()[1]}
    for name in taken[0]:
        values = [one[name] for one in taken]
        result[name] = {"median": statistics.median(values), "worst": max(values)}
    result["tokens_done"], result["tokens_accounted"] = stats.tokens_done, parts
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for program in ("Xvfb", "xdotool"):
        if shutil.which(program) is None:
            sys.exit(f"needs Debian's package {program.lower()}")
    result = run(options.times)
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
