"""What a run's data needs from the agent: the owner's word, and the tokenizer's file."""

from __future__ import annotations

import contextlib
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
from volunteer.agent.run_data import FETCH_AGAIN_S, fetch_tokenizer, keep_run_data
from volunteer.config import Config
from volunteer.data.builtin import load_builtin_run
from volunteer.errors import RunSpecError
from volunteer.local_data import LocalData, read_local_data
from volunteer.locations import HOME_VARIABLE, Locations
from volunteer.rounds.records import DENSE_MODULE
from volunteer.run import GenesisSpec, RunSpec
from volunteer.run_owner import verify_sources
from volunteer.tokenizer_json import num_tokens_of

TOKENIZER = b'{"a": "tokenizer"}'


def spec_with(*sources: str, publisher: str = "", tokenizer: str = "bytes") -> RunSpec:
    spec = load_builtin_run("demo")
    data = msgspec.structs.replace(spec.data, sources=sources, tokenizer=tokenizer)
    return msgspec.structs.replace(spec, data=data, publisher=publisher)


NAMED = f"json:{blob_id_of_bytes(TOKENIZER)}"


@pytest.mark.parametrize("source", ["file:/home/me/letters/*.txt", "hf:/home/me/set"])
@pytest.mark.parametrize(
    ("publisher", "whose"), [("stranger", "a stranger's"), ("", "signed by nobody")]
)
def test_a_run_that_is_not_ones_own_reads_files_only_where_the_owner_allows_it(
    source: str, publisher: str, whose: str
) -> None:
    strange = spec_with("builtin:milton", source, publisher=publisher)
    with pytest.raises(RunSpecError, match=rf"is {whose} and would read .*/home/me/") as caught:
        verify_sources(strange, Config(), "me")
    assert "allow_file_sources true" in caught.value.hint
    assert "allmende publish" in caught.value.hint
    verify_sources(strange, Config(allow_file_sources=True), "me")
    verify_sources(spec_with("builtin:milton", source, publisher="me"), Config(), "me")


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


# ------------------------------------------------------------------------------------- imports

STATE = b"weights, and no momentum"


def given_spec(tokenizer: str = "bytes", vocab_size: int = 256) -> RunSpec:
    spec = spec_with("builtin:milton", tokenizer=tokenizer)
    genesis = GenesisSpec(source="weights", seed=0, state_hash=blob_id_of_bytes(STATE))
    model = msgspec.structs.replace(spec.model, vocab_size=vocab_size)
    return msgspec.structs.replace(spec, genesis=genesis, model=model)


def imported_in(locations: Locations) -> BlobStore:
    imports = BlobStore(locations.imports_dir)
    for content in (STATE, TOKENIZER, b"of another run"):
        imports.add_bytes(content)
    return imports


def test_a_run_has_what_was_imported_for_it_and_no_second_copy(tmp_path: Path) -> None:
    locations, spec = locations_in(tmp_path), given_spec(NAMED)
    store = BlobStore(locations.blobs_dir(spec.run_id, DENSE_MODULE))
    (store.directory / f".{spec.genesis.state_hash}.link").write_bytes(b"left by a kill")
    imports = imported_in(locations)
    for _ in range(2):
        keep_run_data(spec, tmp_path / "run.toml", locations, Config(), "me")
        due = {spec.genesis.state_hash, spec.data.tokenizer_hash}
        assert set(store.list_ids()) == due
    genesis = spec.genesis.state_hash
    assert store.file_of(genesis).samefile(imports.file_of(genesis))
    store.delete(genesis)
    assert imports.verify(genesis)
    later = store.add_bytes(STATE[::-1])
    keep_run_data(spec, None, locations, Config(), "me")
    assert not store.has(genesis), "the run is past its beginning"
    store.delete(later)
    keep_run_data(spec, None, locations, Config(), "me")
    assert store.verify(genesis), "the disk has lost what came later: it begins again"


def test_where_no_file_can_have_two_names_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", cannot)
    locations, spec = locations_in(tmp_path), given_spec()
    imported_in(locations)
    keep_run_data(spec, None, locations, Config(), "me")
    assert BlobStore(locations.blobs_dir(spec.run_id, DENSE_MODULE)).verify(spec.genesis.state_hash)


def test_a_run_that_begins_from_a_seed_takes_no_weights(tmp_path: Path) -> None:
    locations, given = locations_in(tmp_path), given_spec()
    genesis = msgspec.structs.replace(given.genesis, source="seed")
    spec = msgspec.structs.replace(given, genesis=genesis)
    imported_in(locations)
    keep_run_data(spec, None, locations, Config(), "me")
    assert BlobStore(locations.blobs_dir(spec.run_id, DENSE_MODULE)).list_ids() == ()


@pytest.mark.parametrize(
    ("content", "num_tokens"),
    [
        (b'{"model": {"vocab": {"a": 0, "b": 299}}}', 300),
        (b'{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 299}]}', 300),
        (b'{"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": []}', 2),
        (b'{"model": {}}', 0),
        (b'{"model": {"vocab": {"a": "b"}}}', 0),
        (b"[" * 9999, 0),
        (b"\xff", 0),
    ],
)
def test_a_vocabulary_without_room_is_found_at_the_start(
    content: bytes, num_tokens: int, tmp_path: Path
) -> None:
    assert num_tokens_of(content) == num_tokens
    (tmp_path / "tokenizer.json").write_bytes(content)
    locations = locations_in(tmp_path / "home")
    for vocab_size in (299, 300):
        spec = given_spec(f"json:{blob_id_of_bytes(content)}", vocab_size)
        with contextlib.ExitStack() as expecting:
            if num_tokens > vocab_size:
                told = pytest.raises(RunSpecError, match=r"has 300 tokens.*vocab_size is 299")
                expecting.enter_context(told)
            keep_run_data(spec, tmp_path / "run.toml", locations, Config(), "me")
