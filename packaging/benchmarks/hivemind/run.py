"""Compare an exchange with hivemind's: seconds, bytes, CPU, memory, and what a sudden death does.

python packaging/benchmarks/hivemind/run.py [--quick] [--env DIR] [--csv FILE]

Four peers (and two) on this machine, over loopback. A round closes, and the time is taken until the
last peer trains from the new weights. README.md beside this file says what is compared and how.
Needs Linux, and the right to make a network namespace.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from measure import cpu_seconds, loopback_bytes, watching_memory
from ours import OurSwarm
from swarm import Case, StuckError, Swarm
from table import Row, tell, write_csv
from theirs import HivemindSwarm

HIVEMIND = "hivemind==1.1.12"
NAMESPACE_FLAG = "--in-namespace"
PART_BYTES = 2**20
REPETITIONS = {1: 5, 25: 5, 100: 3}
KILL_AT_FRACTION = 0.4
"""Of the median exchange of that swarm: in the middle of the transfer."""
CODECS = {"allmende": ("fp32", "fp16", "int4"), "hivemind": ("fp32", "fp16")}


def make_environment(folder: Path) -> Path:
    """Return the Python of an environment with hivemind, making it where it is missing.

    torch is the one that we run with: the index's own brings gigabytes of CUDA libraries.
    """
    import torch

    python = folder / "bin" / "python"
    if not python.exists():
        say(f"making an environment for hivemind in {folder}")
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", HIVEMIND]
        subprocess.run([*pip, f"torch=={torch.__version__}", "numpy"], check=True)
    return python


def enter_namespace(arguments: Sequence[str]) -> None:
    """Start this program again where the loopback interface is its own."""
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    argv = ["unshare", "--net", *root, sys.executable, __file__, NAMESPACE_FLAG, *arguments]
    os.execvp(argv[0], argv)


def say(text: str) -> None:
    """Tell how it goes."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def make_swarm(side: str, case: Case, python: Path, folder: Path) -> Swarm:
    """Return a swarm of one side, not started."""
    folder = folder / swarm_folder(side, case)
    if side == "allmende":
        return OurSwarm(case, folder)
    return HivemindSwarm(case, python, folder, PART_BYTES)


def measure_once(swarm: Swarm, case: Case, kill_after_s: float | None = None) -> Row:
    """Measure one exchange."""
    swarm.prepare()
    cpu_before, bytes_before = cpu_seconds(swarm.pids()), loopback_bytes()
    exchange = swarm.exchange(kill_after_s=kill_after_s)
    row = Row(
        system=swarm.name,
        case=case,
        exchange=exchange,
        killed=kill_after_s is not None,
        bytes_per_peer=(loopback_bytes() - bytes_before) / case.peers,
        cpu_s={
            role: seconds - cpu_before.get(role, 0.0)
            for role, seconds in cpu_seconds(swarm.pids()).items()
        },
    )
    parts = " ".join(f"{part}={seconds:.2f}" for part, seconds in exchange.parts_s.items())
    say(
        f"{swarm.name} {case.parameters_m}M x {case.peers}{' killed' if row.killed else ''}: "
        f"{exchange.seconds:.2f} s, {row.bytes_per_peer / 1e6:.1f} MB a peer, CPU {row.said_cpu}"
        f" ({parts}); {exchange.note}; {100 * exchange.differing_fraction:.2f} % differ"
    )
    return row


def measure_memory(swarm: Swarm, case: Case) -> float:
    """Return the peak memory of one exchange, in bytes a peer."""
    swarm.prepare()
    with watching_memory(swarm.pids()) as peak:
        swarm.exchange()
    say(f"{swarm.name}: peak {peak.bytes / case.peers / 2**20:.0f} MiB a peer")
    return peak.bytes / case.peers


def measure_case(
    side: str, case: Case, options: argparse.Namespace, python: Path, rows: list[Row]
) -> None:
    """Start a swarm, measure it into `rows`, kill one of its peers at last, stop it."""
    swarm = make_swarm(side, case, python, options.folder)
    say(f"{swarm.name} {case.parameters_m}M x {case.peers}: starting")
    own: list[Row] = []
    try:
        swarm.start()
        # The first exchange after the start warms up as well: it is not timed.
        peak_bytes = measure_memory(swarm, case)
        for _ in range(options.repetitions or REPETITIONS[case.parameters_m]):
            own.append(measure_once(swarm, case))
            own[-1].peak_bytes_per_peer = peak_bytes
            rows.append(own[-1])
        if case.peers > 2 and case.parameters_m in options.kill_parameters:
            median_s = sorted(row.exchange.seconds for row in own)[len(own) // 2]
            rows.append(measure_once(swarm, case, KILL_AT_FRACTION * median_s))
    except StuckError as error:
        say(f"{swarm.name} {case.parameters_m}M x {case.peers}: {error}")
    finally:
        swarm.stop()
        if not options.keep:
            shutil.rmtree(options.folder / swarm_folder(side, case))


def swarm_folder(side: str, case: Case) -> str:
    """Name the folder of a swarm."""
    return f"{side}-{case.codec}-{case.parameters_m}m-{case.peers}"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, two peers: try it out")
    parser.add_argument("--parameters", type=int, nargs="+", default=[25, 100], metavar="MILLIONS")
    parser.add_argument("--peers", type=int, nargs="+", default=[4, 2])
    parser.add_argument("--only", nargs="+", default=[], metavar="SIDE:CODEC")
    parser.add_argument("--repetitions", type=int, default=0, help="0: 5, at 100 M 3")
    parser.add_argument("--kill-parameters", type=int, nargs="*", default=[25], metavar="MILLIONS")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin nothing after that")
    parser.add_argument("--env", type=Path, help="where hivemind's environment is, or is made")
    parser.add_argument("--csv", type=Path, help="every repetition")
    parser.add_argument("--folder", type=Path, help="for the swarms' files; default: temporary")
    parser.add_argument("--keep", action="store_true", help="leave the swarms' files")
    parser.add_argument(NAMESPACE_FLAG, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.parameters, options.peers, options.repetitions = [1], [2], 2
    return options


def main(arguments: Sequence[str]) -> int:
    """Run everything and print the tables."""
    options = parse(arguments)
    if not options.in_namespace:
        enter_namespace(arguments)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    end_s = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as temporary:
        options.folder = options.folder or Path(temporary)
        python = make_environment(options.env or Path(temporary) / "hivemind-env")
        rows: list[Row] = []
        try:
            for side, case in cases(options):
                if time.monotonic() > end_s:
                    say(f"no time left for {side} {case}")
                    continue
                measure_case(side, case, options, python, rows)
                if options.csv:
                    write_csv(rows, options.csv)
        finally:
            tell(rows)
    return 0


def cases(options: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    """Yield what is to be measured: the two sides in turns, at one codec after the other."""
    for peers in options.peers:
        for parameters_m in options.parameters:
            for codec in CODECS["allmende"]:
                for side in ("hivemind", "allmende"):
                    wanted = not options.only or f"{side}:{codec}" in options.only
                    if codec in CODECS[side] and wanted:
                        yield side, Case(peers=peers, parameters_m=parameters_m, codec=codec)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
