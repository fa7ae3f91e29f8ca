"""Time one commit with every filter at work: read, check, measure, judge, combine, outer step.

python packaging/benchmarks/bench_aggregate.py [--parameters 100000000] [--contributions 16]

Sixteen contributions in int4: eleven honest ones, one of them late and one on probation, whose norm
is clipped; one against all others, one of noise, one that copies, one stale, one by an excluded
author. Each stage's figure is the median of the turns; `all` is their sum, from files to a state's
file, as the aggregator does it for a commit of blobs that it has not seen before. The parts run in
a process of its own, so that its peak memory is its own; the yardstick is a copy of one fp32
vector.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec
import torch
from torch import Tensor

from p2p.blobstore import BlobStore
from volunteer.messages import ListedWork, Outcome
from volunteer.run import CodecSpec, OuterSpec
from volunteer.training import similarity
from volunteer.training.aggregation import judge, next_state_slices
from volunteer.training.compression import EncodedGradient, encode
from volunteer.training.content_hash import content_hash_of
from volunteer.training.contribution_blob import (
    BlobKey,
    read_contribution_blob,
    write_contribution_blob,
)
from volunteer.training.state import SharedState, read_state, write_state, write_state_slices

CODEC = CodecSpec()
NUM_BAD = 5
"""Of the last contributions: opposed, noise, copy, stale, excluded."""


class Commit:
    """A parent's state and a commit's blobs on the disk, and what is made of them."""

    def __init__(self, folder: Path, num_parameters: int, num_contributions: int) -> None:
        """Make them up; a part of each honest contribution is common to all."""
        self.num_parameters = num_parameters
        self.store = BlobStore(folder)
        self.listed: list[ListedWork] = []
        self.keys: list[BlobKey] = []
        common_P = _random(num_parameters, 0)
        for index in range(num_contributions):
            self._add(index, num_contributions - index, common_P)
        state = SharedState(weights_P=common_P, momentum_P=common_P.clone())
        self.parent_id = write_state(state, self.store)
        self.blobs: list[EncodedGradient] = []
        self.norms: dict[str, float] = {}
        self.outcomes: tuple[Outcome, ...] = ()

    def _add(self, index: int, from_end: int, common_P: Tensor) -> None:
        own_P = _random(self.num_parameters, 1 + index)
        if from_end == NUM_BAD:
            own_P = -10.0 * common_P
        elif from_end == 3:
            own_P = common_P + _random(self.num_parameters, 1)  # as the first one
        elif from_end != 4:
            own_P += common_P
        if index == 2:
            own_P *= 3.0
        key = BlobKey(
            run_id="0" * 64,
            module_id="dense",
            author=f"peer-{index}",
            round_index=5 if index else 4,
            codec=CODEC,
            num_elements=self.num_parameters,
        )
        blob_id = self.store.add_bytes(write_contribution_blob(encode(own_P, CODEC), key))
        self.keys.append(key)
        self.listed.append(
            ListedWork(
                contribution_id=blob_id,
                author=key.author,
                round_index=key.round_index,
                blob_id=blob_id,
                tokens=1000 + 50 * index,
                is_late=index == 0,
                is_on_probation=index == 1 or from_end == 3,
                is_stale=from_end == 2,
                is_excluded=from_end == 1,
            )
        )

    def read(self) -> None:
        """Parse the blobs and check their bounds."""
        files = [self.store.file_of(work.blob_id) for work in self.listed]
        both = zip(files, self.keys, strict=True)
        self.blobs = [read_contribution_blob(file, key) for file, key in both]

    def hash_content(self) -> None:
        """Compare each blob's content with its record."""
        for work in self.listed:
            content_hash_of(self.store.file_of(work.blob_id))

    def measure(self) -> None:
        """Take the norms."""
        both = zip(self.listed, self.blobs, strict=True)
        self.norms = {work.blob_id: similarity.norm(blob) for work, blob in both}

    def judge(self) -> None:
        """Take the inner products and apply the rules."""
        self.outcomes = judge(self.blobs, self.listed, self.norms)

    def step(self) -> None:
        """Combine, take the outer step, write the state's file and name it by its hash."""
        parent = read_state(self.store.file_of(self.parent_id), self.num_parameters)
        slices = next_state_slices(parent, self.blobs, self.outcomes, OuterSpec())
        self.store.delete(write_state_slices(slices, self.num_parameters, self.store))


def _random(num_parameters: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_parameters, generator=generator) * 1e-3


def run_here(num_parameters: int, num_contributions: int, num_turns: int, threads: int) -> None:
    """Time the stages and print a table."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        commit = Commit(Path(folder), num_parameters, num_contributions)
        vector_P = torch.zeros(num_parameters)
        base_mib = peak_mib()
        stages: dict[str, Callable[[], object]] = {
            "copy": vector_P.clone,
            "read": commit.read,
            "content": commit.hash_content,
            "norms": commit.measure,
            "judge": commit.judge,
            "step": commit.step,
        }
        seconds: dict[str, list[float]] = {name: [] for name in stages}
        for _ in range(num_turns):
            for name, stage in stages.items():
                start = time.perf_counter()
                stage()
                seconds[name].append(time.perf_counter() - start)
        print(
            f"{num_parameters:,} parameters, {num_contributions} contributions, {threads} threads"
        )
        for name, spent in seconds.items():
            print(f"  {name:8} {median(spent):8.3f} s")
        turns = zip(*(spent for name, spent in seconds.items() if name != "copy"), strict=True)
        print(f"  {'all':8} {median(map(sum, turns)):8.3f} s")
        print(f"  peak RSS {peak_mib():.0f} MiB (before the stages {base_mib:.0f} MiB)")
        for outcome in commit.outcomes:
            told = msgspec.structs.replace(outcome, contribution_id=outcome.contribution_id[:8])
            mark = "marked" if told.is_marked else ""
            print(
                f"  {told.contribution_id} weight {told.weight:.4f} clip {told.clip_scale:.3f} "
                f"{mark} {told.refused_reason}"
            )


def peak_mib() -> float:
    """Return this process's peak memory so far (Linux counts in KiB, macOS in bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def main() -> None:
    """Run it once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--contributions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    run_here(options.parameters, options.contributions, options.turns, options.threads)


if __name__ == "__main__":
    main()
