"""What the last commit was made of leaves the memory of the system, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from p2p import page_cache
from p2p.blobstore import BlobStore
from tests.volunteer.rounds.desk import desk_at
from volunteer.agent.cached_files import let_go, settled_blobs, written_at_close_bytes
from volunteer.data.builtin import load_builtin_run
from volunteer.run import CodecSpec


def test_the_blobs_of_the_tip_are_settled() -> None:
    _, tip, desk = desk_at(0)
    machine = desk.machine
    listed = machine.known.facts[tip].listed
    assert listed
    assert set(settled_blobs(machine)) == {machine.known.contributions[i].blob_id for i in listed}


def test_what_is_let_go_is_only_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlobStore(tmp_path)
    first, second = store.add_bytes(b"data"), store.add_bytes(b"more data")
    dropped: list[tuple[Path, int, int]] = []
    monkeypatch.setattr(page_cache, "forget_cached", lambda *piece: dropped.append(piece))
    let_go(store, [first, "0" * 64, second], 6)
    assert dropped == [(store.file_of(first), 0, 4), (store.file_of(second), 0, 2)]
    store.settled.drop(100)
    assert dropped[2:] == [(store.file_of(second), 2, 9)]
    let_go(store, [first], 1)
    let_go(store, [], 0)
    file = store.file_of(first)
    assert dropped[3:] == [(file, 0, 1), (file, 1, 4)], "of what nothing came after, the rest too"
    monkeypatch.undo()
    let_go(store, [first, "0" * 64, second], 100)
    assert store.verify(first)
    assert store.verify(second)


@pytest.mark.parametrize(
    ("codec", "expected"), [("fp32", 4000), ("fp16", 2000 + 4000), ("int8", 1000 + 4000)]
)
def test_the_trainer_writes_its_blob_and_what_the_codec_left(codec: str, expected: int) -> None:
    spec = msgspec.structs.replace(load_builtin_run("demo"), codec=CodecSpec(id=codec))
    written = written_at_close_bytes(spec, 1000)
    assert expected <= written <= expected * 1.1
