"""The state file: its hash names it, any reader opens it, hostile ones end in a typed error."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from p2p.blobstore import BlobStore, blob_id_of_file
from tests.volunteer.training.synthetic import gradient
from volunteer.errors import CheckpointCorruptError, StorageFullError, StorageReadOnlyError
from volunteer.training import state as state_file
from volunteer.training.state import (
    SharedState,
    StateSlice,
    read_state,
    state_hash_of,
    state_slices,
    write_state,
    write_state_slices,
)

P = 37


def make_state(num_parameters: int = P) -> SharedState:
    return SharedState(
        weights_P=gradient("weights", num_parameters),
        momentum_P=gradient("momentum", num_parameters),
    )


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def test_a_state_comes_back_and_its_hash_is_its_blob_id(store: BlobStore) -> None:
    state = make_state()
    state_hash = write_state(state, store)
    assert blob_id_of_file(store.file_of(state_hash)) == state_hash
    assert state_hash_of(state_slices(state), P) == state_hash
    read = read_state(store.file_of(state_hash), P)
    assert torch.equal(read.weights_P, state.weights_P)
    assert torch.equal(read.momentum_P, state.momentum_P)
    assert write_state(read, store) == state_hash


def test_any_safetensors_reader_opens_it(store: BlobStore) -> None:
    state = make_state()
    tensors = load_file(store.file_of(write_state(state, store)))
    assert (tensors["weights_P"] == state.weights_P.numpy()).all()
    assert (tensors["momentum_P"] == state.momentum_P.numpy()).all()


def test_the_order_of_slices_does_not_matter(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "_SLICE_ELEMENTS", 5)
    pieces = list(state_slices(make_state()))
    assert len(pieces) == 8
    assert write_state_slices(reversed(pieces), P, store) == write_state(make_state(), store)


def test_a_state_takes_the_place_of_an_older_one_in_memory(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "_SLICE_ELEMENTS", 16)
    dropped: list[tuple[Path, int]] = []
    monkeypatch.setattr(
        state_file, "drop_from_cache", lambda file, end: dropped.append((file, end))
    )
    older = store.directory / "older"
    state_hash = write_state_slices(state_slices(make_state()), P, store, instead_of=older)
    assert state_hash == write_state(make_state(), store)
    assert dropped == [(older, end) for end in (128, 256, 8 * P)]


def test_slices_that_are_no_state_are_our_own_mistake(store: BlobStore) -> None:
    with pytest.raises(ValueError, match="37"):
        write_state_slices([StateSlice(0, torch.zeros(3), torch.zeros(3))], P, store)
    assert list(store.directory.iterdir()) == []


def test_writing_to_what_was_read_leaves_the_file_alone(store: BlobStore) -> None:
    state_hash = write_state(make_state(), store)
    read_state(store.file_of(state_hash), P).weights_P.fill_(5.0)
    assert store.verify(state_hash)


def test_a_bit_more_or_less_is_another_hash(store: BlobStore) -> None:
    state = make_state()
    before = write_state(state, store)
    state.momentum_P[3] = -state.momentum_P[3]
    assert write_state(state, store) != before


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["weights_P", "momentum_P"])
def test_a_state_that_is_not_finite_does_not_come_to_be(
    bad: float, name: str, store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state()
    getattr(state, name)[-1] = bad
    with pytest.raises(CheckpointCorruptError, match="finite"):
        write_state(state, store)
    assert list(store.directory.iterdir()) == []
    monkeypatch.setattr(state_file, "_verify_finite", lambda piece: None)
    state_hash = write_state(state, store)
    monkeypatch.undo()
    with pytest.raises(CheckpointCorruptError, match="finite"):
        read_state(store.file_of(state_hash), P)


def hostile_files() -> dict[str, bytes]:
    header = state_file._header(P)
    body = b"\0" * (8 * P)
    table = json.loads(header[8:])

    def with_table(changed: object) -> bytes:
        text = json.dumps(changed, sort_keys=True, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + body

    assert with_table(table) == header + body  # so that only the change is refused
    shape = {**table, "weights_P": {**table["weights_P"], "shape": [1, P]}}
    dtype = {**table, "weights_P": {**table["weights_P"], "dtype": "I32"}}
    swapped = {**table, "weights_P": table["momentum_P"], "momentum_P": table["weights_P"]}
    version = {**table, "__metadata__": {**table["__metadata__"], "format": "allmende/state/2"}}
    return {
        "empty": b"",
        "huge header": (2**62).to_bytes(8, "little") + header[8:] + body,
        "header alone": header,
        "short": (header + body)[:-1],
        "long": header + body + b"\0",
        "other shape": with_table(shape),
        "other dtype": with_table(dtype),
        "swapped": with_table(swapped),
        "newer version": with_table(version),
        "another tensor": with_table({**table, "x": table["weights_P"]}),
        "nonsense": b"\x10\0\0\0\0\0\0\0" + b"[[[[[[[[[[[[[[[[" + body,
        "a pickle": b"\x80\x04\x95" + body,
    }


@pytest.mark.parametrize("name", hostile_files())
def test_hostile_files_are_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "state"
    file.write_bytes(hostile_files()[name])
    with pytest.raises(CheckpointCorruptError, match="state"):
        read_state(file, P)


def test_a_state_of_another_model_is_refused(store: BlobStore) -> None:
    file = store.file_of(write_state(make_state(), store))
    with pytest.raises(CheckpointCorruptError, match="num_parameters is '37', not '38'"):
        read_state(file, P + 1)


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.ENOSPC, StorageFullError),
        (errno.EROFS, StorageReadOnlyError),
        (errno.EACCES, PermissionError),
    ],
)
def test_a_full_disk_is_named_and_nothing_is_left(
    number: int, told: type[Exception], store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> None:
        raise OSError(number, "injected")

    monkeypatch.setattr(state_file, "_write_at", fail)
    with pytest.raises(told):
        write_state(make_state(), store)
    assert list(store.directory.iterdir()) == []
