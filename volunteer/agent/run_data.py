"""What a run needs beside its RunSpec: the owner's word for its data, tokenizer, first weights.

Runs in: agent.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import trio

from p2p.blobstore import BlobStore, blob_id_of_file
from p2p.errors import P2PError
from p2p.flow import Priority
from p2p.swarm import Swarm
from volunteer.agent.bulk_gate import BulkGate
from volunteer.config import Config
from volunteer.errors import RunSpecError
from volunteer.files import make_private_dir, telling_full_disk
from volunteer.local_data import LocalData, write_local_data
from volunteer.locations import Locations
from volunteer.rounds.records import DENSE_MODULE
from volunteer.run import RunSpec
from volunteer.run_owner import verify_sources
from volunteer.tokenizer_json import MAX_TOKENIZER_BYTES, verify_vocabulary

TOKENIZER_NAME = "tokenizer.json"
FETCH_DEADLINE_S, STALL_S, FETCH_AGAIN_S = 600.0, 60.0, 30.0

log = logging.getLogger(__name__)


def keep_run_data(
    spec: RunSpec, run_file: Path | None, locations: Locations, config: Config, me: str
) -> None:
    """Check what the run reads, and put what it needs of this disk into the run's folder.

    Args:
        spec: the run.
        run_file: where the owner has it from; None: it comes with the package.
        locations: of this volunteer.
        config: the owner's wishes.
        me: own peer id.

    Raises:
        RunSpecError: it names files of this machine, and the owner has not allowed that; or its
            tokenizer is another one, or has more tokens than the model.
        StorageFullError: there is no room.
    """
    verify_sources(spec, config, me)
    blobs_dir = locations.blobs_dir(spec.run_id, DENSE_MODULE)
    make_private_dir(blobs_dir)
    local = LocalData(private_dir=config.private_data, cache_max_bytes=config.data_cache_max_bytes)
    write_local_data(locations.run_dir(spec.run_id), local)
    store, imports_dir = BlobStore(blobs_dir), locations.imports_dir
    if run_file is not None and spec.data.tokenizer_hash:
        _take_tokenizer(spec, run_file.absolute().parent / TOKENIZER_NAME, store)
    if imports_dir.is_dir():
        take_imports(spec, BlobStore(imports_dir), store)
    if spec.data.tokenizer_hash and store.has(spec.data.tokenizer_hash):
        verify_vocabulary(spec, store.file_of(spec.data.tokenizer_hash))


def take_imports(spec: RunSpec, imports: BlobStore, store: BlobStore) -> None:
    """Put what `allmende import` has read for this run into its store, without a second copy.

    Args:
        spec: the run.
        imports: what was imported.
        store: the run's. Once it has a later state, the first one is needed no more.

    Raises:
        StorageFullError: there is no room.
    """
    wanted = [spec.data.tokenizer_hash] if spec.data.tokenizer_hash else []
    genesis = spec.genesis.state_hash
    if spec.genesis.is_given and imports.has(genesis):
        state_bytes = imports.size_bytes(genesis)
        if all(store.size_bytes(blob_id) != state_bytes for blob_id in store.list_ids()):
            wanted.append(genesis)
    for blob_id in wanted:
        if imports.has(blob_id) and not store.has(blob_id):
            _adopt_link(imports.file_of(blob_id), store)


def _adopt_link(file: Path, store: BlobStore) -> None:
    """Have `file` in the store too: one file of two names, or a copy where that cannot be."""
    link = store.directory / f".{file.name}.link"
    link.unlink(missing_ok=True)
    with telling_full_disk(link):
        try:
            os.link(file, link)
        except OSError:  # another file system, or one without links
            shutil.copy(file, link)
    store.adopt_file(link)


def _take_tokenizer(spec: RunSpec, file: Path, store: BlobStore) -> None:
    """Put the tokenizer that lies beside the RunSpec file into the store, if it is the run's.

    Raises:
        RunSpecError: it is another one.
        StorageFullError: there is no room.
    """
    blob_id = spec.data.tokenizer_hash
    if store.has(blob_id) or not file.is_file():
        return
    found = blob_id_of_file(file)
    if found != blob_id or file.stat().st_size > MAX_TOKENIZER_BYTES:
        raise RunSpecError(
            f"{file} is not the tokenizer of run {spec.name}: its hash is {found}",
            hint="take the file away, the right one is fetched from other members; or, in a run of"
            " your own, write that hash into the RunSpec",
        )
    copy = store.directory / f".{TOKENIZER_NAME}"
    with telling_full_disk(copy):
        shutil.copy(file, copy)
    store.adopt_file(copy)


async def fetch_tokenizer(
    spec: RunSpec,
    store: BlobStore,
    swarm: Swarm,
    gate: BulkGate,
    on_here: Callable[[], None],
) -> None:
    """Have the run's tokenizer from whoever has it, as a state is fetched, and tell `on_here`."""
    blob_id = spec.data.tokenizer_hash
    if not blob_id or store.has(blob_id):
        return

    def providers() -> Sequence[str]:
        return sorted(peer.peer_id for peer in swarm.peers())

    while not store.has(blob_id):
        try:
            await gate.run(
                lambda: swarm.fetch_blob(
                    blob_id,
                    max_bytes=MAX_TOKENIZER_BYTES,
                    providers=providers,
                    store=store,
                    purpose="states",
                    deadline_s=FETCH_DEADLINE_S,
                    stall_s=STALL_S,
                    priority=Priority.BULK,
                )
            )
        except P2PError as error:
            log.info("tokenizer=%s not here yet: %s", blob_id[:12], error)
            await trio.sleep(FETCH_AGAIN_S)  # noqa: TID251 - asked again at once otherwise
    log.info("tokenizer=%s fetched", blob_id[:12])
    on_here()
