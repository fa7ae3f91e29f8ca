"""A run of each kind of codec through the aggregator: the round decides density and momentum."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from p2p.blobstore import BlobStore
from tests.volunteer.training.synthetic import gradient, make_spec
from volunteer.messages import (
    ApplyCommit,
    BlobValidated,
    BuildGenesis,
    ListedWork,
    OwnWork,
    StateBuilt,
    ValidateBlob,
)
from volunteer.run import OuterSpec, RunSpec
from volunteer.training.aggregator import Aggregator
from volunteer.training.content_hash import content_hash_of
from volunteer.training.layout import num_parameters
from volunteer.training.module_blobs import ModuleBlobs
from volunteer.training.pseudo_gradient import RunCodec, contribute
from volunteer.training.state import SharedState, read_state

WARMING_UP = OuterSpec(lr=0.5, momentum=0.75, momentum_warmup_rounds=2, warmup_momentum=0.25)


class Member:
    """One member's files: what its trainer stores, its aggregator checks and applies."""

    def __init__(self, folder: Path, spec: RunSpec) -> None:
        folder.mkdir()
        self.spec = spec
        self.store = BlobStore(folder)
        self.blobs = ModuleBlobs(self.store, spec, "dense", "peer-0")
        self.aggregator = Aggregator(spec, "dense", self.store)
        built = self.aggregator.answer(BuildGenesis(request_id=1))
        assert isinstance(built, StateBuilt)
        self.head = built.state_hash

    def contribute(self, round_index: int, codec_round: int) -> str:
        num = num_parameters(self.spec.model)
        zeros_P = torch.zeros(num)
        theta_P = -gradient(f"codec round {round_index}", num)
        codec = RunCodec(self.spec.codec, codec_round)
        encoded = contribute(theta_P, zeros_P, zeros_P, codec).encoded
        return self.blobs.store_contribution(encoded, round_index)[0]

    def validate(self, blob_id: str, round_index: int) -> str:
        answer = self.aggregator.answer(
            ValidateBlob(
                request_id=2,
                blob_id=blob_id,
                author="peer-0",
                round_index=round_index,
                codec=self.spec.codec.id,
                codec_version=1,
                content_hash=content_hash_of(self.store.file_of(blob_id)),
            )
        )
        assert isinstance(answer, BlobValidated)
        return answer.reason

    def apply(self, round_index: int, blob_id: str) -> SharedState:
        work = ListedWork(
            contribution_id=f"{round_index:064x}",
            author="peer-0",
            round_index=round_index,
            blob_id=blob_id,
            tokens=1000,
            is_late=False,
            is_on_probation=False,
        )
        answer = self.aggregator.answer(
            ApplyCommit(
                request_id=3, round_index=round_index, parent_state=self.head, listed=(work,)
            )
        )
        assert isinstance(answer, StateBuilt)
        self.head = answer.state_hash
        return self.state()

    def state(self) -> SharedState:
        return read_state(self.store.file_of(self.head), num_parameters(self.spec.model))


@pytest.mark.parametrize("codec_id", ["int4", "int8", "fp16", "fp32", "topk2"])
def test_a_run_goes_down_its_ladder_and_its_momentum_warms_up(
    tmp_path: Path, codec_id: str
) -> None:
    outer = OuterSpec(lr=0.5, momentum=0.0) if codec_id == "topk2" else WARMING_UP
    member = Member(tmp_path / "member", make_spec(codec_id=codec_id, outer=outer))
    sizes = []
    for round_index in range(4):
        blob_id = member.contribute(round_index, round_index)
        sizes.append(member.store.file_of(blob_id).stat().st_size)
        assert member.validate(blob_id, round_index) == ""
        sent_P = member.blobs.load_quantised(
            OwnWork(contribution_id="x", blob_id=blob_id, carries=())
        )
        before = member.state()
        after = member.apply(round_index, blob_id)
        momentum = 0.0 if codec_id == "topk2" else 0.25 if round_index < 2 else 0.75
        expected_P = before.momentum_P.double() * momentum + sent_P.double()
        assert torch.equal(after.momentum_P, expected_P.float())
        assert not torch.equal(after.weights_P, before.weights_P)
    if codec_id == "topk2":
        assert sizes[0] > sizes[1] > sizes[2] == sizes[3]
    else:
        assert len(set(sizes)) == 1


def test_a_blob_of_the_density_of_another_round_never_leaves_the_trainer(tmp_path: Path) -> None:
    member = Member(tmp_path / "member", make_spec(codec_id="topk2"))
    with pytest.raises(ValueError, match="tensors of"):
        member.contribute(round_index=2, codec_round=0)


def test_a_blob_of_the_density_of_another_round_is_refused(tmp_path: Path) -> None:
    member = Member(tmp_path / "member", make_spec(codec_id="topk2"))
    blob_id = member.contribute(0, 0)
    assert "round_index" in member.validate(blob_id, 1)
