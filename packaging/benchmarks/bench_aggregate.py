"""Time one commit with every filter at work: read, check, measure, judge, combine, outer step.

python packaging/benchmarks/bench_aggregate.py [--parameters 100000000] [--contributions 16]

Sixteen contributions in int4: eleven honest ones, one of them late and one on probation, whose norm
is clipped; one against all others, one of noise, one that copies, one stale, one by an excluded
author. Each stage's figure is the median of the turns; `all` is the sum from files to the new
state's slices, for blobs that were not seen before; `trimmed` is the step with the trimmed mean in
the mean's place, and `all trimmed` the sum with it; `write` takes the mean's step again and writes
the state's file with it. The stages run in a process of its own, so that its peak memory
is its own; the yardstick is a copy of one fp32 vector.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
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
from volunteer.training.state import (
    SharedState,
    StateSlice,
    read_state,
    write_state,
    write_state_slices,
)

CODEC = CodecSpec()
BEFORE_STEP = ("read", "content", "norms", "judge")
SUMS = {"all": (*BEFORE_STEP, "step"), "all trimmed": (*BEFORE_STEP, "trimmed")}
MEAN, TRIMMED = OuterSpec(), OuterSpec(aggregation="trimmed_mean")
NUM_BAD = 5
"""Of the last contributions: opposed, noise, copy, stale, excluded."""


class Manifest(msgspec.Struct):
    """What a commit consists of; its files are in the store."""

    num_parameters: int
    listed: list[ListedWork]
    parent_id: str


class Maker:
    """Makes a parent's state and a commit's blobs up."""

    def __init__(self, store: BlobStore, num_parameters: int) -> None:
        """Write to `store`."""
        self._store = store
        self._num_parameters = num_parameters
        self._listed: list[ListedWork] = []

    def make(self, num_contributions: int) -> Manifest:
        """Write all files; a part of each honest contribution is common to all."""
        common_P = _random(self._num_parameters, 0)
        for index in range(num_contributions):
            self._add(index, num_contributions - index, common_P)
        state = SharedState(weights_P=common_P, momentum_P=common_P.clone())
        return Manifest(self._num_parameters, self._listed, write_state(state, self._store))

    def _add(self, index: int, from_end: int, common_P: Tensor) -> None:
        own_P = _random(self._num_parameters, 1 + index)
        if from_end == NUM_BAD:
            own_P = -10.0 * common_P
        elif from_end == 3:
            own_P = common_P + _random(self._num_parameters, 1)  # as the first one
        elif from_end != 4:
            own_P += common_P
        if index == 2:
            own_P *= 3.0
        key = _key(f"peer-{index}", 5 if index else 4, self._num_parameters)
        blob_id = self._store.add_bytes(write_contribution_blob(encode(own_P, CODEC), key))
        self._listed.append(
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


class Commit:
    """A commit's files, and what is made of them."""

    def __init__(self, store: BlobStore, manifest: Manifest) -> None:
        """Read nothing yet."""
        self.num_parameters, self.parent_id = manifest.num_parameters, manifest.parent_id
        self.store, self.listed = store, manifest.listed
        self.blobs: list[EncodedGradient] = []
        self.norms: dict[str, float] = {}
        self.outcomes: tuple[Outcome, ...] = ()

    def read(self) -> None:
        """Parse the blobs and check their bounds."""
        self.blobs = [
            read_contribution_blob(
                self.store.file_of(work.blob_id),
                _key(work.author, work.round_index, self.num_parameters),
            )
            for work in self.listed
        ]

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

    def next_slices(self, outer: OuterSpec) -> Iterator[StateSlice]:
        """Combine, and take the outer step."""
        parent = read_state(self.store.file_of(self.parent_id), self.num_parameters)
        return next_state_slices(parent, self.blobs, self.outcomes, outer)

    def step(self, outer: OuterSpec = MEAN) -> None:
        """Combine, and take the outer step, and keep nothing."""
        deque(self.next_slices(outer), maxlen=0)

    def write(self) -> None:
        """The same, write the state's file and name it by its hash."""
        slices = self.next_slices(MEAN)
        self.store.delete(write_state_slices(slices, self.num_parameters, self.store))


def _random(num_parameters: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_parameters, generator=generator) * 1e-3


def _key(author: str, round_index: int, num_parameters: int) -> BlobKey:
    return BlobKey(
        run_id="0" * 64,
        module_id="dense",
        author=author,
        round_index=round_index,
        codec=CODEC,
        num_elements=num_parameters,
    )


def run_here(folder: Path, num_turns: int, threads: int) -> None:
    """Time the stages and print a table."""
    torch.set_num_threads(threads)
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)
    commit = Commit(BlobStore(folder / "blobs"), manifest)
    vector_P = torch.zeros(manifest.num_parameters)
    base_mib = peak_mib()
    stages: dict[str, Callable[[], object]] = {
        "copy": vector_P.clone,
        "read": commit.read,
        "content": commit.hash_content,
        "norms": commit.measure,
        "judge": commit.judge,
        "step": commit.step,
        "trimmed": lambda: commit.step(TRIMMED),
        "write": commit.write,
    }
    seconds: dict[str, list[float]] = {name: [] for name in stages}
    for _ in range(num_turns):
        for name, stage in stages.items():
            start = time.perf_counter()
            stage()
            seconds[name].append(time.perf_counter() - start)
    sizes = f"{manifest.num_parameters:,} parameters, {len(manifest.listed)} contributions"
    print(f"{sizes}, {threads} threads")
    for name, spent in seconds.items():
        print(f"  {name:12} {median(spent):8.3f} s")
    for title, counted in SUMS.items():
        turns = zip(*(seconds[name] for name in counted), strict=True)
        print(f"  {title:12} {median(map(sum, turns)):8.3f} s")
    print(f"  peak RSS {peak_mib():.0f} MiB (before the stages {base_mib:.0f} MiB)")
    for outcome in commit.outcomes:
        told = msgspec.structs.replace(outcome, contribution_id=outcome.contribution_id[:8])
        mark = "marked" if told.is_marked else ""
        print(
            f"  {told.contribution_id} weight {told.weight:.4f} clip {told.clip_scale:.3f} "
            f"{mark} {told.refused_reason}"
        )


def peak_mib() -> float:
    """Return this process's peak memory so far; on Linux not that of who started it."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text("ascii").splitlines()
        return float(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # macOS counts bytes


def main() -> None:
    """Run it once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--contributions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--here", type=Path, help="time what lies in this folder")
    options = parser.parse_args()
    if options.here is not None:
        run_here(options.here, options.turns, options.threads)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "blobs").mkdir()
        made = Maker(BlobStore(folder / "blobs"), options.parameters).make(options.contributions)
        (folder / "manifest.json").write_bytes(msgspec.json.encode(made))
        arguments = ["--here", name, "--turns", str(options.turns)]
        arguments += ["--threads", str(options.threads)]
        subprocess.run([sys.executable, __file__, *arguments], check=True)


if __name__ == "__main__":
    main()
