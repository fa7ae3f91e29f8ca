"""The note of a contribution: as good as a snapshot, and nothing beside another snapshot."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from tests.volunteer.training.test_snapshot import load, store_in, trained
from tests.volunteer.training.tiny_run import CPU
from volunteer.errors import CheckpointTooNewError
from volunteer.training import contribution_note
from volunteer.training.diloco import LocalState


def contributed(state: LocalState, residual: float) -> LocalState:
    """Do to the state what a contribution does."""
    state.base_P = state.theta_P.clone()
    state.residual_P = torch.full_like(state.base_P, residual)
    state.progress = msgspec.structs.replace(
        state.progress,
        tokens_since_contribution=0,
        tokens_contributed=state.progress.tokens_total,
        base_commit="c1",
    )
    return state


def noted(folder: Path, residual: float) -> tuple[LocalState, LocalState]:
    """Return the state in a snapshot and the one that a note was made of, two steps later."""
    store = store_in(folder)
    store.save(trained(1))
    state = contributed(trained(3), residual)
    store.save_contribution(state)
    return trained(1), state


@pytest.mark.parametrize("residual", [0.0, 0.25])
def test_a_snapshot_and_its_note_hold_the_contribution_and_no_displacement(
    tmp_path: Path, residual: float
) -> None:
    snapshot, state = noted(tmp_path, residual)
    loaded = load(tmp_path)
    assert loaded.progress == msgspec.structs.replace(state.progress, base_commit="")
    assert torch.equal(loaded.residual_P, state.residual_P)
    assert torch.equal(loaded.theta_P, snapshot.theta_P)
    assert torch.equal(loaded.base_P, loaded.theta_P)
    assert torch.equal(loaded.adam.mean_P, snapshot.adam.mean_P)


def test_where_nothing_is_left_over_the_note_is_small(tmp_path: Path) -> None:
    noted(tmp_path, 0.0)
    assert sum(f.stat().st_size for f in (tmp_path / "contributed").iterdir()) < 4096


def test_a_newer_snapshot_stands_alone_and_the_older_one_with_its_note(tmp_path: Path) -> None:
    noted(tmp_path, 0.25)
    store_in(tmp_path).save(trained(5))
    assert load(tmp_path).progress == trained(5).progress
    max(tmp_path.glob("payload-*")).write_bytes(b"damaged")
    assert load(tmp_path).progress.tokens_since_contribution == 0
    assert load(tmp_path).progress.tokens_contributed == trained(3).progress.tokens_total


def test_a_damaged_note_leaves_the_snapshot(tmp_path: Path) -> None:
    noted(tmp_path, 0.25)
    (payload_file,) = (tmp_path / "contributed").glob("payload-*")
    payload_file.write_bytes(payload_file.read_bytes()[:-1])
    assert load(tmp_path).progress == trained(1).progress


def test_without_a_snapshot_there_will_be_one(tmp_path: Path) -> None:
    state = contributed(trained(2), 0.25)
    store_in(tmp_path).save_contribution(state)
    assert load(tmp_path).progress == state.progress
    assert torch.equal(load(tmp_path).theta_P, state.theta_P)


def test_what_was_loaded_is_what_the_next_note_belongs_to(tmp_path: Path) -> None:
    _, state = noted(tmp_path, 0.25)
    store = store_in(tmp_path)
    again = store.load(CPU)
    assert again is not None
    again.residual_P *= 2
    store.save_contribution(again)
    assert torch.equal(load(tmp_path).residual_P, 2 * state.residual_P)


def test_the_note_of_a_newer_version_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(contribution_note, "FORMAT_VERSION", 2)
        noted(tmp_path, 0.25)
    with pytest.raises(CheckpointTooNewError):
        load(tmp_path)
