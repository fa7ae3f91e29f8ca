"""What a run's data needs from the agent: the owner's word, and the tokenizer's file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from p2p.blobstore import BlobStore, blob_id_of_bytes
from p2p.errors import BlobUnavailableError
from tests.fakes.virtual_time import in_nursery, run_virtual
from volunteer.agent.bulk_gate import BulkGate
from volunteer.agent.run_data import FETCH_AGAIN_S, fetch_tokenizer, keep_run_data, verify_sources
from volunteer.config import Config
from volunteer.data.builtin import load_builtin_run
from volunteer.errors import RunSpecError
from volunteer.local_data import LocalData, read_local_data
from volunteer.locations import HOME_VARIABLE, Locations
from volunteer.rounds.records import DENSE_MODULE
from volunteer.run import RunSpec

TOKENIZER = b'{"a": "tokenizer"}'


def spec_with(*sources: str, publisher: str = "", tokenizer: str = "bytes") -> RunSpec:
    spec = load_builtin_run("demo")
    data = msgspec.structs.replace(spec.data, sources=sources, tokenizer=tokenizer)
    return msgspec.structs.replace(spec, data=data, publisher=publisher)


NAMED = f"json:{blob_id_of_bytes(TOKENIZER)}"


@pytest.mark.parametrize("source", ["file:/home/me/letters/*.txt", "hf:/home/me/set"])
def test_a_strangers_run_reads_files_only_where_the_owner_allows_it(source: str) -> None:
    strange = spec_with("builtin:milton", source, publisher="stranger")
    with pytest.raises(RunSpecError, match=r"would read .*/home/me/") as caught:
        verify_sources(strange, Config(), "me")
    assert "allow_file_sources = true" in caught.value.hint
    verify_sources(strange, Config(allow_file_sources=True), "me")
    for own in ("", "me"):
        verify_sources(spec_with("builtin:milton", source, publisher=own), Config(), "me")


@pytest.mark.parametrize("source", ["hf:owner/name", "private:", "builtin:folio"])
def test_what_names_no_file_of_this_machine_needs_no_word(source: str) -> None:
    verify_sources(spec_with("builtin:milton", source, publisher="stranger"), Config(), "me")


def locations_in(folder: Path) -> Locations:
    locations = Locations.from_environment({HOME_VARIABLE: str(folder)})
    locations.prepare()
    return locations


def test_the_trainer_finds_the_owners_wishes_and_the_tokenizer(tmp_path: Path) -> None:
    locations = locations_in(tmp_path / "home")
    spec = spec_with("builtin:milton", tokenizer=NAMED)
    run_file = tmp_path / "run.toml"
    store = BlobStore(locations.blobs_dir(spec.run_id, DENSE_MODULE))
    config = Config(private_data="/home/me/diary", data_cache_max_bytes=2**20)
    keep_run_data(spec, run_file, locations, config, "me")
    due = LocalData(private_dir="/home/me/diary", cache_max_bytes=2**20)
    assert read_local_data(locations.run_dir(spec.run_id)) == due
    assert store.list_ids() == ()  # none is beside the file: it is fetched
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER)
    for _ in range(2):
        keep_run_data(spec, run_file, locations, Config(), "me")
        assert store.file_of(spec.data.tokenizer_hash).read_bytes() == TOKENIZER
    assert (tmp_path / "tokenizer.json").exists()
    assert read_local_data(locations.run_dir(spec.run_id)) == LocalData()


def test_another_tokenizer_is_told_with_its_hash(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    spec = spec_with("builtin:milton", tokenizer=NAMED)
    with pytest.raises(RunSpecError, match=blob_id_of_bytes(b"{}")):
        keep_run_data(spec, tmp_path / "run.toml", locations_in(tmp_path / "h"), Config(), "me")


class Peers:
    """A network whose members have the tokenizer from the third try on."""

    def __init__(self) -> None:
        self.tries: list[float] = []

    def peers(self) -> Sequence[Any]:
        return ()

    async def fetch_blob(
        self, blob_id: str, *, store: BlobStore, max_bytes: int, **_: object
    ) -> None:
        self.tries.append(trio.current_time())
        await trio.lowlevel.checkpoint()
        if len(self.tries) < 3:
            raise BlobUnavailableError("nobody has it")
        assert len(TOKENIZER) <= max_bytes
        assert store.add_bytes(TOKENIZER) == blob_id


@pytest.mark.parametrize(("tokenizer", "num_tries"), [(NAMED, 3), ("bytes", 0)])
def test_the_tokenizer_is_asked_for_until_somebody_has_it(
    tmp_path: Path, tokenizer: str, num_tries: int
) -> None:
    peers, told = Peers(), []
    spec = spec_with("builtin:milton", tokenizer=tokenizer)

    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        store, gate = BlobStore(tmp_path), BulkGate()
        on_here: Callable[[], None] = lambda: told.append(trio.current_time())  # noqa: E731
        begun_s = trio.current_time()
        for _ in range(2):  # once it is here, nobody is asked
            await fetch_tokenizer(spec, store, peers, gate, on_here)  # type: ignore[arg-type]  # a fake
        assert [at_s - begun_s for at_s in peers.tries] == [
            FETCH_AGAIN_S * i for i in range(num_tries)
        ]
        assert len(told) == min(1, num_tries)

    run_virtual(in_nursery(main), jumps=True)
