"""A real agent whose trainer sends something else than it trained: for tests.

    python -m tests.system.poisoner opposed|copied ARGS-OF-THE-AGENT...

`opposed`: its work times -10. `copied`: the content of somebody else's contribution to the same
round, in a blob of its own, a second after that came. All else is as it should be. It is honest
until `START_FILE` lies in its home, and notes the ids of its forged blobs in `FORGED_FILE` there.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from volunteer.agent.__main__ import main
from volunteer.agent.trainer_service import TrainerService
from volunteer.locations import HOME_VARIABLE
from volunteer.training.trainer import end_at_once

if TYPE_CHECKING:
    from volunteer.training.compression import EncodedGradient
    from volunteer.training.module_blobs import ModuleBlobs

START_FILE = "poison"
FORGED_FILE = "forged.txt"
FACTOR = -10.0
COPY_AGE_S = 1.0
"""Others have heard of the original by then, and count what comes half a second later as a copy."""
COPY_DEADLINE_S = 4.0
LOOK_EVERY_S = 0.1
AS_TRAINER = "trainer"
_never = threading.Event()


class _Header(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name="__metadata__")


def forge_in_trainer(kind: str) -> None:
    """Have every agent in this process start this file as its trainer."""
    begin = TrainerService.__init__

    def forged_init(self: TrainerService, *args: object, **kwargs: object) -> None:
        begin(self, *args, **kwargs)  # type: ignore[arg-type]  # passed on as they came
        at = self._argv.index("volunteer.training.trainer")
        self._argv[at : at + 1] = ["tests.system.poisoner", AS_TRAINER, kind]

    TrainerService.__init__ = forged_init  # type: ignore[method-assign]  # the lie


def train_and_forge(kind: str) -> int:
    """Run the trainer, and store forged contributions for its own."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from volunteer.training import trainer
    from volunteer.training.module_blobs import ModuleBlobs

    home = Path(os.environ[HOME_VARIABLE])
    store_truly = ModuleBlobs.store_contribution
    forge = {"opposed": _opposed, "copied": _copied}[kind]

    def store(self: ModuleBlobs, encoded: EncodedGradient, round_index: int) -> tuple[str, int]:
        forged = forge(self, encoded, round_index) if (home / START_FILE).exists() else None
        if forged is None:
            return store_truly(self, encoded, round_index)
        blob_id, size_bytes = store_truly(self, forged, round_index)
        with (home / FORGED_FILE).open("a") as file:
            file.write(blob_id + "\n")
        return blob_id, size_bytes

    ModuleBlobs.store_contribution = store  # type: ignore[method-assign]  # the lie
    return trainer.main()


def _opposed(blobs: ModuleBlobs, encoded: EncodedGradient, round_index: int) -> EncodedGradient:
    from volunteer.training import compression

    forged_P = compression.decode(encoded) * FACTOR
    return compression.encode(forged_P, blobs._spec.codec, round_index)


def _copied(
    blobs: ModuleBlobs, encoded: EncodedGradient, round_index: int
) -> EncodedGradient | None:
    """Wait for somebody else's blob; None where there is none in time."""
    from volunteer.training.contribution_blob import read_contribution_blob

    own_key = blobs._key(round_index)
    end_s = time.monotonic() + COPY_DEADLINE_S
    while time.monotonic() < end_s:
        for blob_id in blobs._store.list_ids():
            file = blobs._store.file_of(blob_id)
            author = _author_of(file, round_index)
            if author in ("", own_key.author) or time.time() - file.stat().st_mtime < COPY_AGE_S:
                continue
            return read_contribution_blob(file, dataclasses.replace(own_key, author=author))
        _never.wait(LOOK_EVERY_S)
    return None


def _author_of(file: Path, round_index: int) -> str:
    """Return whose contribution to a round this is; empty if it is none."""
    with file.open("rb") as stream:
        text = stream.read(int.from_bytes(stream.read(8), "little"))
    said = msgspec.json.decode(text, type=_Header).metadata
    return said.get("author", "") if said.get("round_index") == str(round_index) else ""


if __name__ == "__main__":
    if sys.argv[1] == AS_TRAINER:
        chosen = sys.argv.pop(2)
        del sys.argv[1]
        end_at_once(train_and_forge(chosen))
    else:
        forge_in_trainer(sys.argv[1])
        main(sys.argv[2:])
