"""Time every codec at every size: encode, decode, check, aggregate; CSV to the standard output.

python packaging/benchmarks/bench_codec.py [--parameters 1000000 10000000 100000000]
    [--codecs int4 topk2/64] [--contributions 8] [--turns 5] [--threads 2]

A codec at a size has a process of its own, so that its peak memory is its own. In it the cases take
turns, so that whatever else the machine does falls on all of them alike; `copy` (one fp32 vector)
is the yardstick. Seconds are medians. GB/s counts the fp32 vectors that a case reads or makes:
4 bytes a parameter, times the contributions for `aggregate`. `peak_mib` is what the process took at
most above the two vectors that are there before, the parameters and the decoded ones: it holds the
blob, and for `aggregate` two different blobs.
"""

from __future__ import annotations

import argparse
import csv
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from volunteer.messages import Outcome
from volunteer.run import CodecSpec
from volunteer.training.aggregation import combine
from volunteer.training.child_process import keep_freed_memory
from volunteer.training.compression import decode_into, encode
from volunteer.training.contribution_blob import (
    BlobKey,
    contribution_parts,
    parse_contribution_blob,
)

CODECS = ("int4", "int8", "fp16", "fp32", "topk2/1024", "topk2/256", "topk2/64")
COLUMNS = (
    *("codec", "parameters", "threads", "contributions", "turns", "bytes_per_parameter"),
    *("times_fewer_than_fp32", "case", "seconds", "cpu_seconds", "gb_per_s", "peak_mib"),
)
_FILL_ELEMENTS = 2**22


def codec_of(name: str) -> CodecSpec:
    """Return the codec; `topk2/K` keeps K of 4096 from the first round on."""
    codec_id, _, kept = name.partition("/")
    if not kept:
        return CodecSpec(id=codec_id)
    return CodecSpec(id=codec_id, ladder_kept=(int(kept),), ladder_rounds=(0,))


def random_vector(num_parameters: int, seed: int) -> Tensor:
    """Return normal elements of the size that pseudo-gradients have."""
    x_P = torch.empty(num_parameters)
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, num_parameters, _FILL_ELEMENTS):
        x_P[start : start + _FILL_ELEMENTS].normal_(0.0, 1e-3, generator=generator)
    return x_P


def run_codec(name: str, num_parameters: int, options: argparse.Namespace) -> None:
    """Time all cases of one codec at one size, and write their rows."""
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    codec, num = codec_of(name), options.contributions
    x_P, out_P = random_vector(num_parameters, 0), torch.zeros(num_parameters)
    key = BlobKey(
        run_id="0" * 64,
        module_id="dense",
        author="peer",
        round_index=0,
        codec=codec,
        num_elements=num_parameters,
    )
    base_mib = peak_mib()
    peaks: dict[str, float] = {}
    encoded = encode(x_P, codec)
    peaks["encode"] = peak_mib() - base_mib
    decode_into(encoded, out_P)
    peaks["decode"] = peak_mib() - base_mib
    blobs = [encoded, encode(out_P, codec)] * (num // 2)
    outcomes = [outcome(1 / len(blobs))] * len(blobs)

    def aggregate() -> None:
        for _slice in combine(blobs, outcomes, num_parameters):
            pass

    aggregate()
    peaks["aggregate"] = peak_mib() - base_mib
    parts = b"".join(contribution_parts(encoded, key))
    raw = torch.frombuffer(bytearray(parts), dtype=torch.uint8).numpy()
    cases: dict[str, Callable[[], object]] = {
        "copy": x_P.clone,
        "encode": lambda: encode(x_P, codec),
        "decode": lambda: decode_into(encoded, out_P),
        "parse": lambda: parse_contribution_blob(raw, key),
        "aggregate": aggregate,
    }
    spent = time_cases(cases, options.turns)
    size_bytes = len(parts) - len(key.header)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    for case, (wall_s, cpu_s) in spent.items():
        vectors = len(blobs) if case == "aggregate" else 1
        writer.writerow(
            (
                *(name, num_parameters, options.threads, len(blobs), options.turns),
                f"{size_bytes / num_parameters:.5f}",
                f"{4 * num_parameters / size_bytes:.1f}",
                *(case, f"{wall_s:.5f}", f"{cpu_s:.5f}"),
                f"{num_parameters * 4 * vectors / wall_s / 1e9:.2f}",
                f"{peaks[case]:.0f}" if case in peaks else "",
            )
        )
    sys.stdout.flush()


def outcome(weight: float) -> Outcome:
    """Return what `judge` says of one of several good contributions."""
    return Outcome(
        contribution_id="0" * 64, weight=weight, norm=1.0, clip_scale=1.0, refused_reason=""
    )


def time_cases(
    cases: Mapping[str, Callable[[], object]], num_turns: int
) -> dict[str, tuple[float, float]]:
    """Run all cases in turns; return the medians of each one's seconds and CPU seconds."""
    wall_s: dict[str, list[float]] = {name: [] for name in cases}
    cpu_s: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(num_turns):
        for name, case in cases.items():
            begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
            case()
            wall_s[name].append(time.perf_counter() - begun_s)
            cpu_s[name].append(time.process_time() - begun_cpu_s)
    return {name: (median(wall_s[name]), median(cpu_s[name])) for name in cases}


def peak_mib() -> float:
    """Return this process's peak memory so far.

    Linux's `ru_maxrss` (in KiB, macOS has bytes) begins with what the parent had, so not that.
    """
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text("ascii", "replace")
        return int(status.partition("VmHWM:")[2].split()[0]) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def main() -> None:
    """Run every codec at every size in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, nargs="+", default=[10**6, 10**7, 10**8])
    parser.add_argument("--codecs", nargs="+", default=list(CODECS))
    parser.add_argument("--contributions", type=int, default=8, help="an even number")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--here", action="store_true", help="in this process, without a heading")
    options = parser.parse_args()
    if options.here:
        run_codec(options.codecs[0], options.parameters[0], options)
        return
    csv.writer(sys.stdout, lineterminator="\n").writerow(COLUMNS)
    sys.stdout.flush()
    for num_parameters in options.parameters:
        for name in options.codecs:
            arguments = ["--here", "--parameters", str(num_parameters), "--codecs", name]
            for key in ("contributions", "turns", "threads"):
                arguments += [f"--{key}", str(getattr(options, key))]
            subprocess.run([sys.executable, __file__, *arguments], check=True)


if __name__ == "__main__":
    main()
