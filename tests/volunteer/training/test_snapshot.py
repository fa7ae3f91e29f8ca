"""Snapshots: exact resumption, and what is refused."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from tests.volunteer.training.tiny_run import CPU, never, tiny_spec, tiny_weights_P, tiny_windows
from volunteer.errors import CheckpointError, CheckpointTooNewError, StorageFullError
from volunteer.messages import Encoded, OwnWork
from volunteer.run import RunSpec
from volunteer.training import diloco, snapshot
from volunteer.training.diloco import LocalState
from volunteer.training.progress import OwnBlob, Progress
from volunteer.training.snapshot import SnapshotStore

SPEC = tiny_spec()


def store_in(folder: Path, spec: RunSpec = SPEC, module_id: str = "dense") -> SnapshotStore:
    return SnapshotStore(folder, spec, module_id)


def trained(num_steps: int, state: LocalState | None = None) -> LocalState:
    state = state or diloco.fresh_state(tiny_weights_P(SPEC), SPEC, CPU)
    for _ in range(num_steps):
        diloco.train(
            state,
            tiny_windows(SPEC, state.progress.inner_step),
            SPEC,
            micro_batch_sequences=2,
            device=CPU,
            should_stop=never,
        )
    return state


def vectors(state: LocalState) -> tuple[Tensor, ...]:
    return (
        state.weights.weights_P,
        state.base_P,
        state.residual_P,
        state.adam.mean_P,
        state.adam.square_P,
    )


def load(folder: Path) -> LocalState:
    state = store_in(folder).load(CPU)
    assert state is not None
    return state


def test_everything_comes_back(tmp_path: Path) -> None:
    state = trained(2)
    state.residual_P = torch.randn(len(state.base_P))
    state.progress = Progress(
        inner_step=5,
        tokens_total=300,
        tokens_since_contribution=100,
        tokens_contributed=150,
        tokens_discarded=50,
        base_commit="c7",
        round_index=7,
        carried=(OwnWork(contribution_id="c1", blob_id="b1", carries=("c0",)),),
        last_contribution=Encoded(
            base="c6",
            round_index=6,
            blob_id="b2",
            blob_bytes=9,
            codec="int4",
            codec_version=1,
            tokens=150,
            carries=("c0",),
        ),
        own_blobs=(OwnBlob(blob_id="b1", new_tokens=70), OwnBlob(blob_id="b2", new_tokens=80)),
    )
    store_in(tmp_path).save(state)
    loaded = load(tmp_path)
    assert loaded.progress == state.progress
    for loaded_P, saved_P in zip(vectors(loaded), vectors(state), strict=True):
        assert torch.equal(loaded_P, saved_P)


def test_five_steps_a_snapshot_and_five_steps_are_ten_steps(tmp_path: Path) -> None:
    straight = trained(10)
    store_in(tmp_path).save(trained(5))
    resumed = trained(5, load(tmp_path))
    for resumed_P, straight_P in zip(vectors(resumed), vectors(straight), strict=True):
        assert torch.equal(resumed_P, straight_P)
    assert resumed.progress == straight.progress


def test_training_on_does_not_change_what_was_loaded_from(tmp_path: Path) -> None:
    store_in(tmp_path).save(trained(1))
    first = load(tmp_path)
    trained(3, first)
    assert load(tmp_path).progress.inner_step == 1
    assert torch.equal(load(tmp_path).theta_P, trained(1).theta_P)


def test_without_a_snapshot_there_is_none(tmp_path: Path) -> None:
    assert store_in(tmp_path / "none").load(CPU) is None


@pytest.mark.parametrize("pattern", ["payload-*", "manifest-*"])
def test_a_damaged_newest_gives_the_one_before(tmp_path: Path, pattern: str) -> None:
    state = trained(1)
    store_in(tmp_path).save(state)
    store_in(tmp_path).save(trained(1, state))
    newest = max(tmp_path.glob(pattern))
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 0x40
    newest.write_bytes(data)
    assert load(tmp_path).progress.inner_step == 1
    assert len(list((tmp_path / "quarantine").iterdir())) == 2


def test_a_snapshot_of_another_run_or_module_is_refused(tmp_path: Path) -> None:
    store_in(tmp_path).save(trained(1))
    with pytest.raises(CheckpointError, match="belongs to run"):
        store_in(tmp_path, tiny_spec(lr=0.5)).load(CPU)
    with pytest.raises(CheckpointError, match="belongs to run"):
        store_in(tmp_path, module_id="other").load(CPU)


def test_a_snapshot_of_a_newer_version_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(snapshot, "FORMAT_VERSION", 2)
        store_in(tmp_path).save(trained(1))
    before = sorted(file.name for file in tmp_path.iterdir())
    with pytest.raises(CheckpointTooNewError):
        store_in(tmp_path).load(CPU)
    assert sorted(file.name for file in tmp_path.iterdir()) == before


def test_a_full_disk_leaves_the_previous_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = trained(1)
    store_in(tmp_path).save(state)

    def write_to_a_full_disk(_store: SnapshotStore, file: Path, _state: LocalState) -> None:
        file.write_bytes(b"a beginning")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SnapshotStore, "_write_vectors", write_to_a_full_disk)
    with pytest.raises(StorageFullError):
        store_in(tmp_path).save(trained(1, state))
    monkeypatch.undo()
    assert load(tmp_path).progress.inner_step == 1
    assert len(list(tmp_path.glob("payload-*"))) == 1


def test_the_payload_is_a_safetensors_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    state = trained(1)
    store_in(tmp_path).save(state)
    (payload_file,) = tmp_path.glob("payload-*")
    tensors = load_file(payload_file)
    assert torch.equal(tensors["theta"], state.theta_P)
    assert torch.equal(tensors["adam_square"], state.adam.square_P)


def test_the_manifest_holds_the_progress_for_people_to_read(tmp_path: Path) -> None:
    state = trained(2)
    store_in(tmp_path).save(state)
    (manifest_file,) = tmp_path.glob("manifest-*")
    progress = json.loads(manifest_file.read_text().splitlines()[0])["metadata"]["progress"]
    assert msgspec.convert(progress, Progress) == state.progress
    assert progress["tokens_total"] == 2 * 4 * 16
