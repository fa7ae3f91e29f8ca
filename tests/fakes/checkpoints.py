"""Checkpoints whose payload tells their step, written through the calls that the fake disk sees."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from volunteer.checkpoint.store import CheckpointStore


def payload_of(step: int) -> bytes:
    return b"%08d" % step * 300


def writer_of(step: int) -> Callable[[Path], None]:
    """Return a writer that goes through `os`, so that the fake disk sees it."""

    def write(file: Path) -> None:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            for start in (0, 1000, 2000):
                rest = payload_of(step)[start : start + 1000]
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)

    return write


def save(folder: Path, step: int) -> None:
    CheckpointStore(folder).save(writer_of(step), {"step": step, "weights": [0.5, None, "é"]})


def loaded_step(folder: Path) -> int | None:
    """Return the step of what `load` gives, after checking that it is no mixture."""
    loaded = CheckpointStore(folder).load()
    if loaded is None:
        return None
    step = loaded.metadata["step"]
    assert isinstance(step, int)
    assert loaded.payload_file.read_bytes() == payload_of(step)
    assert loaded.metadata == {"step": step, "weights": [0.5, None, "é"]}
    return step


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def verify_every_manifest_has_its_payload(folder: Path) -> None:
    manifests = {file.stem[-8:] for file in folder.glob("manifest-*.json")}
    assert manifests <= {file.stem[-8:] for file in folder.glob("payload-*.safetensors")}


def whole_folder(*sequences: int) -> list[str]:
    manifests = [f"manifest-{n:08d}.json" for n in sequences]
    return ["LATEST", *manifests, *(f"payload-{n:08d}.safetensors" for n in sequences)]


def damage_latest(folder: Path) -> None:
    newest = max(folder.glob("payload-*"))
    newest.write_bytes(newest.read_bytes()[:-1])
