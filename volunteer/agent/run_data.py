"""What a run's data needs from the agent: the owner's word for it, and the tokenizer's file.

Runs in: agent.
"""

from __future__ import annotations

import logging
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
from volunteer.data.sources import sources_on_disk
from volunteer.errors import RunSpecError
from volunteer.files import make_private_dir, telling_full_disk
from volunteer.local_data import LocalData, write_local_data
from volunteer.locations import Locations
from volunteer.rounds.records import DENSE_MODULE
from volunteer.run import RunSpec

TOKENIZER_NAME = "tokenizer.json"
MAX_TOKENIZER_BYTES = 32 * 1024 * 1024
FETCH_DEADLINE_S, STALL_S, FETCH_AGAIN_S = 600.0, 60.0, 30.0

log = logging.getLogger(__name__)


def keep_run_data(
    spec: RunSpec, run_file: Path | None, locations: Locations, config: Config, me: str
) -> None:
    """Check what the run reads, and put what the trainer needs into the run's folder.

    Args:
        spec: the run.
        run_file: where the owner has it from; None: it comes with the package.
        locations: of this volunteer.
        config: the owner's wishes.
        me: own peer id.

    Raises:
        RunSpecError: it names files of this machine, and the owner has not allowed that.
        StorageFullError: there is no room.
    """
    verify_sources(spec, config, me)
    blobs_dir = locations.blobs_dir(spec.run_id, DENSE_MODULE)
    make_private_dir(blobs_dir)
    local = LocalData(private_dir=config.private_data, cache_max_bytes=config.data_cache_max_bytes)
    write_local_data(locations.run_dir(spec.run_id), local)
    if run_file is not None and spec.data.tokenizer_hash:
        _take_tokenizer(spec, run_file.absolute().parent / TOKENIZER_NAME, BlobStore(blobs_dir))


def verify_sources(spec: RunSpec, config: Config, me: str) -> None:
    """Check that a stranger's run does not read files of this machine unasked.

    What is trained on goes into weights that everyone gets. A RunSpec that names no publisher, or
    oneself, is the owner's own: he gave it on the command line.

    Raises:
        RunSpecError: it does, and the config does not allow it.
    """
    named = sources_on_disk(spec.data.sources)
    if named and spec.publisher not in ("", me) and not config.allow_file_sources:
        raise RunSpecError(
            f"run {spec.name} is a stranger's and would read {', '.join(named)} on this machine:"
            " what is in there could be read out of the weights",
            hint="if that is what you want, set `allow_file_sources = true` in the settings",
        )


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
