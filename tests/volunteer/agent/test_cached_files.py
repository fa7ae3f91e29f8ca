"""What the last commit was made of leaves the memory of the system, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p.blobstore import BlobStore
from tests.volunteer.rounds.desk import desk_at
from volunteer.agent import cached_files
from volunteer.agent.cached_files import drop_all, settled_blobs


def test_the_blobs_of_the_tip_are_settled() -> None:
    _, tip, desk = desk_at(0)
    machine = desk.machine
    listed = machine.known.facts[tip].listed
    assert listed
    assert set(settled_blobs(machine)) == {machine.known.contributions[i].blob_id for i in listed}


def test_what_is_dropped_is_only_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlobStore(tmp_path)
    blob_id, gone = store.add_bytes(b"data"), "0" * 64
    dropped: list[Path] = []
    monkeypatch.setattr(cached_files, "drop_from_cache", dropped.append)
    drop_all(store, [blob_id, gone])
    assert dropped == [store.file_of(blob_id), store.file_of(gone)]
    monkeypatch.undo()
    drop_all(store, [blob_id, gone])
    assert store.verify(blob_id)
