"""One commit with every filter at work: what processes that differ in everything else agree on.

`python -m tests.volunteer.training.filtered_commit --arrival 3 --threads 2` takes the blobs in
another order, with other threads, and prints outcomes and state hash as JSON.
"""

from __future__ import annotations

import argparse
import random
import sys

import msgspec
import torch

from p2p.blobstore import blob_id_of_bytes
from tests.volunteer.training.synthetic import gradient, make_spec
from tests.volunteer.training.synthetic_run import blob_key
from volunteer.messages import ListedWork, Outcome
from volunteer.run import RunSpec
from volunteer.training.aggregation import judge, next_state_slices
from volunteer.training.compression import encode
from volunteer.training.contribution_blob import (
    parse_contribution_blob,
    write_contribution_blob,
)
from volunteer.training.genesis import build_genesis
from volunteer.training.layout import num_parameters
from volunteer.training.similarity import norm
from volunteer.training.state import state_hash_of

ROLES = (
    *("honest", "late", "newcomer", "long", "tired", "carrier", "honest", "honest"),
    *("twin", "other twin", "original", "copy", "opposed", "noise", "stale", "excluded"),
)
ROUND = 9


class Report(msgspec.Struct, frozen=True):
    """What has to be the same everywhere."""

    outcomes: tuple[Outcome, ...]
    state_hash: str
    trimmed_hash: str
    """Of the state by the trimmed mean of the same."""
    num_threads: int
    kernels: str


def filtered_spec() -> RunSpec:
    """Return a run with enough parameters for several slices, and blocks that are sampled."""
    return make_spec(dim=128, block_elements=256)


def make_commit(spec: RunSpec) -> tuple[list[ListedWork], list[bytes]]:
    """Return the list and the blobs of a commit in which each contribution has its role."""
    num = num_parameters(spec.model)
    common_P = gradient("common", num)
    listed, blobs = [], []
    for index, role in enumerate(ROLES):
        is_second = role in ("other twin", "copy")
        vector_P = gradient(f"own {index - is_second}", num)
        if role == "opposed":
            vector_P = -10.0 * common_P
        elif role != "noise":
            vector_P = vector_P + common_P
        if role in ("long", "carrier"):
            vector_P = 5.0 * vector_P
        author = f"peer-{index}"
        round_index = ROUND - (role == "late")
        key = blob_key(spec, round_index, author)
        blobs.append(write_contribution_blob(encode(vector_P, spec.codec), key))
        listed.append(
            ListedWork(
                contribution_id=f"{index:064x}",
                author=author,
                round_index=round_index,
                blob_id=blob_id_of_bytes(blobs[-1]),
                tokens={"tired": 10, "carrier": 3000}.get(role, 1000 + index),
                is_late=role == "late",
                is_on_probation=role in ("newcomer", "copy"),
                is_stale=role == "stale",
                is_excluded=role == "excluded",
            )
        )
    return listed, blobs


def apply(spec: RunSpec, arrival: int) -> Report:
    """Parse and measure in an order of one's own, then judge and apply as the list says."""
    listed, blobs = make_commit(spec)
    places = list(range(len(listed)))
    random.Random(arrival).shuffle(places)
    parsed, norms = {}, {}
    for place in places:
        work = listed[place]
        key = blob_key(spec, work.round_index, work.author)
        parsed[place] = parse_contribution_blob(blobs[place], key)
        norms[work.blob_id] = norm(parsed[place])
    in_order = [parsed[place] for place in range(len(listed))]
    outcomes = judge(in_order, listed, norms)
    parent, mean = build_genesis(spec), spec.outer.at_round(ROUND)
    trimmed = msgspec.structs.replace(mean, aggregation="trimmed_mean")
    state_hash, trimmed_hash = (
        state_hash_of(
            next_state_slices(parent, in_order, outcomes, outer), num_parameters(spec.model)
        )
        for outer in (mean, trimmed)
    )
    return Report(
        outcomes=outcomes,
        state_hash=state_hash,
        trimmed_hash=trimmed_hash,
        num_threads=torch.get_num_threads(),
        kernels=torch.backends.cpu.get_cpu_capability(),
    )


def main() -> None:
    """Print the report of one process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arrival", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sys.stdout.buffer.write(msgspec.json.encode(apply(filtered_spec(), options.arrival)))


if __name__ == "__main__":
    main()
