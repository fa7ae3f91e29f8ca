"""Time the codec and the aggregation, side by side, and print medians.

python packaging/benchmarks/bench_codec.py [--parameters 1000000 100000000] [--contributions 8]

Each size runs in a process of its own, so that its peak memory is its own. Within it the cases take
turns, so that whatever else the machine does falls on all of them alike; `copy` (one fp32 vector)
is the yardstick. GB/s counts the fp32 vectors that a case reads or makes: P * 4 bytes, times the
contributions for `judge` and `apply`.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from p2p.blobstore import BlobStore
from volunteer.messages import ListedWork
from volunteer.run import CodecSpec, OuterSpec
from volunteer.training.aggregation import judge, next_state_slices
from volunteer.training.compression import decode, encode
from volunteer.training.contribution_blob import (
    BlobKey,
    read_contribution_blob,
    write_contribution_blob,
)
from volunteer.training.state import SharedState, read_state, write_state, write_state_slices

CODEC = CodecSpec()


def listed_of(blob_ids: list[str]) -> list[ListedWork]:
    """Return listings with weights of their own."""
    return [
        ListedWork(
            contribution_id=blob_id,
            author="peer",
            round_index=0,
            blob_id=blob_id,
            tokens=1000 + index,
            is_late=False,
            is_on_probation=False,
        )
        for index, blob_id in enumerate(blob_ids)
    ]


def run_size(num_parameters: int, num_contributions: int, num_turns: int, threads: int) -> None:
    """Time all cases at one size and print a table."""
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    x_P = torch.randn(num_parameters, generator=generator) * 1e-3
    key = BlobKey(
        run_id="0" * 64,
        module_id="dense",
        author="peer",
        round_index=0,
        codec=CODEC,
        num_elements=num_parameters,
    )
    with tempfile.TemporaryDirectory() as folder:
        store = BlobStore(Path(folder))
        blob_ids = []
        for index in range(num_contributions):
            shifted_P = x_P.roll(index)
            shifted_P += x_P
            blob = write_contribution_blob(encode(shifted_P, CODEC), key)
            blob_ids.append(store.add_bytes(blob))
        del shifted_P, blob
        listed = listed_of(blob_ids)
        state = SharedState(weights_P=x_P, momentum_P=x_P)
        parent_file = store.file_of(write_state(state, store))
        blob_files = [store.file_of(blob_id) for blob_id in blob_ids]
        built: list[str] = []

        def parse() -> None:
            read_contribution_blob(blob_files[0], key)

        def judge_all() -> None:
            judge([read_contribution_blob(file, key) for file in blob_files], listed)

        def apply() -> None:
            parent = read_state(parent_file, num_parameters)
            blobs = [read_contribution_blob(file, key) for file in blob_files]
            slices = next_state_slices(parent, blobs, judge(blobs, listed), OuterSpec())
            built.append(write_state_slices(slices, num_parameters, store))
            store.delete(built[-1])

        encoded = encode(x_P, CODEC)
        del state
        base_mib = peak_mib()
        cases: dict[str, tuple[Callable[[], object], int]] = {
            "copy": (x_P.clone, 1),
            "encode": (lambda: encode(x_P, CODEC), 1),
            "decode": (lambda: decode(encoded), 1),
            "parse": (parse, 1),
            "judge": (judge_all, num_contributions),
            "apply": (apply, num_contributions),
        }
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        cpu_seconds: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(num_turns):
            for name, (case, _vectors) in cases.items():
                start, cpu_start = time.perf_counter(), time.process_time()
                case()
                seconds[name].append(time.perf_counter() - start)
                cpu_seconds[name].append(time.process_time() - cpu_start)
        print(f"{num_parameters:,} parameters, {num_contributions} contributions, {threads} thread")
        for name, (_case, vectors) in cases.items():
            spent = median(seconds[name])
            rate = num_parameters * 4 * vectors / spent / 1e9
            cpu = median(cpu_seconds[name])
            print(f"  {name:8} {spent:9.4f} s  {cpu:9.4f} s CPU  {rate:7.2f} GB/s")
        print(f"  peak RSS {peak_mib():.0f} MiB (before the cases {base_mib:.0f} MiB)", flush=True)


def peak_mib() -> float:
    """Return this process's peak memory so far (Linux counts in KiB, macOS in bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def main() -> None:
    """Run every size in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, nargs="+", default=[1_000_000, 100_000_000])
    parser.add_argument("--contributions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--here", action="store_true", help="in this process")
    options = parser.parse_args()
    for num_parameters in options.parameters:
        if options.here:
            run_size(num_parameters, options.contributions, options.turns, options.threads)
            continue
        arguments = ["--here", "--parameters", str(num_parameters)]
        for name in ("contributions", "turns", "threads"):
            arguments += [f"--{name}", str(getattr(options, name))]
        subprocess.run([sys.executable, __file__, *arguments], check=True)


if __name__ == "__main__":
    main()
