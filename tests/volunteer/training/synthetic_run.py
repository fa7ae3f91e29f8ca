"""A whole run without a network or a model: members, commits and states out of an integer stream.

`python -m tests.volunteer.training.synthetic_run` prints its state hashes as JSON: the golden
trajectory, and what processes with other thread counts and kernels must agree on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from p2p.blobstore import blob_id_of_bytes
from tests.volunteer.training.synthetic import gradient, make_spec
from volunteer.messages import ListedWork
from volunteer.run import RunSpec
from volunteer.training.aggregation import judge, next_state_slices
from volunteer.training.contribution_blob import (
    BlobKey,
    parse_contribution_blob,
    write_contribution_blob,
)
from volunteer.training.genesis import build_genesis
from volunteer.training.layout import num_parameters
from volunteer.training.pseudo_gradient import RunCodec, contribute, rebase
from volunteer.training.state import SharedState, state_hash_of, state_slices

LATE_MEMBER, HOSTILE_MEMBER = 2, 4


@dataclass(eq=False)
class SyntheticMember:
    """Takes "inner steps" from the integer stream; keeps its error feedback."""

    index: int
    theta_P: Tensor
    base_P: Tensor
    residual_P: Tensor

    def make_blob(self, spec: RunSpec, round_index: int) -> bytes:
        num = len(self.theta_P)
        common_P = gradient(f"common-{round_index}", num)
        own_P = gradient(f"member-{self.index}-{round_index}", num)
        sign = 12.0 if self.index == HOSTILE_MEMBER and round_index % 7 == 3 else -1.0
        self.theta_P = self.theta_P + sign * (common_P + own_P)
        codec = RunCodec(spec.codec, round_index)
        result = contribute(self.theta_P, self.base_P, self.residual_P, codec)
        self.base_P, self.residual_P = self.theta_P, result.residual_P
        return write_contribution_blob(
            result.encoded, blob_key(spec, round_index, f"peer-{self.index}")
        )


@dataclass(frozen=True)
class SyntheticRound:
    """One commit, ready to be applied by anyone."""

    round_index: int
    listed: tuple[ListedWork, ...]
    blobs: tuple[bytes, ...]
    state_hash: str
    """Of the state after it, as computed here."""
    num_refused: int


def blob_key(spec: RunSpec, round_index: int, author: str) -> BlobKey:
    """Return the key of a contribution to this round of the synthetic run."""
    return BlobKey(
        run_id=spec.run_id,
        module_id="dense",
        author=author,
        round_index=round_index,
        codec=spec.codec,
        num_elements=num_parameters(spec.model),
    )


def synthetic_rounds(spec: RunSpec, num_rounds: int, num_members: int) -> Iterator[SyntheticRound]:
    """Yield the commits of a run: some late work, some on probation, now and then a hostile one."""
    state = build_genesis(spec)
    members = [
        SyntheticMember(i, state.weights_P, state.weights_P, torch.zeros_like(state.weights_P))
        for i in range(num_members)
    ]
    for round_index in range(num_rounds):
        blobs = [member.make_blob(spec, round_index) for member in members]
        listed = tuple(
            ListedWork(
                contribution_id=f"{round_index:032x}{index:032x}",
                author=f"peer-{index}",
                round_index=round_index,
                blob_id=blob_id_of_bytes(blob),
                tokens=1000 * (1 + (3 * index + round_index) % 5),
                is_late=index == LATE_MEMBER and round_index % 4 == 1,
                is_on_probation=index == 3 and round_index < 5,
            )
            for index, blob in enumerate(blobs)
        )
        parsed = [
            parse_contribution_blob(blob, blob_key(spec, round_index, f"peer-{index}"))
            for index, blob in enumerate(blobs)
        ]
        outcomes = judge(parsed, listed)
        pieces = list(next_state_slices(state, parsed, outcomes, spec.outer.at_round(round_index)))
        state = SharedState(
            weights_P=torch.cat([piece.weights_S for piece in pieces]),
            momentum_P=torch.cat([piece.momentum_S for piece in pieces]),
        )
        for member in members:
            member.theta_P, member.base_P = rebase(member.theta_P, member.base_P, state.weights_P)
        yield SyntheticRound(
            round_index=round_index,
            listed=listed,
            blobs=tuple(blobs),
            state_hash=state_hash_of(state_slices(state), len(state.weights_P)),
            num_refused=sum(bool(outcome.refused_reason) for outcome in outcomes),
        )


def main() -> None:
    """Print the state hashes of one synthetic run, the genesis first."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--members", type=int, default=6)
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--block-elements", type=int, default=0)
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    spec = make_spec(dim=options.dim, block_elements=options.block_elements, codec_id=options.codec)
    rounds = list(synthetic_rounds(spec, options.rounds, options.members))
    report = {
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
        "num_refused": sum(item.num_refused for item in rounds),
        "state_hashes": [spec.genesis.state_hash, *(item.state_hash for item in rounds)],
    }
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
