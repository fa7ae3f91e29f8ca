"""Measure what the owner's program gets of a core on which a trainer computes, in another session.

PYTHONPATH=. python packaging/benchmarks/bench_owner_share.py [--turns 5] [--seconds 4]

Linux. On one core a busy loop of ours stands for the owner's program, and a busy child for the
trainer: without it, with niceness alone, and with what a trainer does. Printed is the median share
of a core that the owner's program gets in each case.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

KINDS = ("alone", "lower_priority", "yield_to_all_sessions")
BUSY = """
import sys
from volunteer.training import child_process, trainer
getattr(child_process, sys.argv[1])(trainer.NICENESS)
print("up", flush=True)
while True:
    pass
"""


def share(kind: str, duration_s: float) -> float:
    """Return the share of a core that this process gets beside a child of a kind."""
    child = None
    if kind != "alone":
        child = subprocess.Popen(
            [sys.executable, "-c", BUSY, kind], stdout=subprocess.PIPE, start_new_session=True
        )
        assert child.stdout is not None
        child.stdout.readline()
    begun_s, begun_cpu_s = time.monotonic(), time.process_time()
    while time.monotonic() < begun_s + duration_s:
        pass
    result = (time.process_time() - begun_cpu_s) / (time.monotonic() - begun_s)
    if child is not None:
        child.kill()
        child.wait()
    return result


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    shares: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(options.turns):
        for kind in KINDS:
            shares[kind].append(share(kind, options.seconds))
    for kind, seen in shares.items():
        print(f"{kind:22} {statistics.median(seen):.2f} of a core")


if __name__ == "__main__":
    main()
