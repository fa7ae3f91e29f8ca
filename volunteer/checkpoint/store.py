"""Checkpoints of one folder: the new one or the previous one, whatever happens while saving.

Runs in: trainer, the only process that writes to its folder.

A checkpoint is a payload file (the tensors, written by the caller) and a manifest with its size,
hash and metadata; `LATEST` names the one that counts. checkpoint/FORMAT.md has the invariants, the
write order and what a kill leaves after each step.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from volunteer.checkpoint.manifest import (
    JSON,
    MAX_MANIFEST_BYTES,
    Manifest,
    encode_latest,
    encode_manifest,
    hash_file,
    parse_latest,
    parse_manifest,
)
from volunteer.errors import CheckpointCorruptError, StorageFullError
from volunteer.files import (
    drop_from_cache,
    fsync_dir,
    fsync_file,
    make_private_dir,
    move_to_quarantine,
    remove_stale_temps,
    replace_file,
    telling_full_disk,
)

LATEST_NAME = "LATEST"
QUARANTINE_NAME = "quarantine"
MAX_QUARANTINED = 4
"""Files kept there: two checkpoints. Older ones go, so that a bad disk cannot fill itself."""

_FILE_NAMES = {
    "payload": r"payload-(\d{8,18})\.safetensors",
    "manifest": r"manifest-(\d{8,18})\.json",
}
# A read that fails for good on this file, unlike one that lacks memory or permission.
_DAMAGE_ERRNOS = frozenset({errno.EIO, errno.EISDIR, errno.ENOENT, errno.ENOTDIR, errno.EBADMSG})

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """A checkpoint whose hash is right."""

    payload_file: Path
    """Stays until the second save from now."""
    metadata: Mapping[str, JSON]
    sequence: int


class CheckpointStore:
    """The checkpoints in one folder. One thread at a time."""

    def __init__(self, directory: Path, keep: int = 2) -> None:
        """Use `directory`, which is created when first written to.

        Args:
            directory: holds nothing else.
            keep: complete checkpoints to keep, at least 1. One more exists while saving.
        """
        if keep < 1:
            raise ValueError("at least one checkpoint must be kept")
        self._directory = directory
        self._keep = keep

    def save(self, write_payload: Callable[[Path], None], metadata: Mapping[str, JSON]) -> None:
        """Write a checkpoint; once this returns, a power cut cannot take it.

        Args:
            write_payload: writes the file it is given, which does not exist yet. What it raises
                reaches the caller; an OSError of a full disk as StorageFullError.
            metadata: kept in the manifest.

        Raises:
            StorageFullError: the disk is full; the previous checkpoint is still the latest.
            CheckpointTooNewError: the folder belongs to a newer version; nothing is touched.
            ValueError: the metadata is not finite JSON.

        Cost: writes the payload once and reads it once.
        """
        make_private_dir(self._directory)
        latest = self._read_latest()
        self._remove_leftovers(latest)
        sequence = 1 + max([latest or 0, *self._sequences("payload"), *self._sequences("manifest")])
        try:
            self._write(sequence, write_payload, metadata)
        except BaseException:
            # `LATEST` may name the new one already, if only the fsync after it failed.
            with contextlib.suppress(OSError, CheckpointCorruptError):
                self._remove_leftovers(self._peek_latest())
            raise
        self._prune(sequence)

    def load(self) -> LoadedCheckpoint | None:
        """Return the latest checkpoint that is whole; None where there is none.

        Damaged ones are moved to `quarantine/`, with an error in the log, and the one before is
        used.

        Raises:
            CheckpointTooNewError: a newer version wrote it; nothing is moved or deleted.

        Cost: reads the payload once.
        """
        latest = self._read_latest()
        stored = sorted(self._sequences("manifest"), reverse=True)
        # Above `LATEST` lies what was never finished; without `LATEST`, the newest is as good.
        candidates = [n for n in stored if latest is None or n <= latest]
        for sequence in candidates:
            try:
                loaded = self._open(sequence)
            except CheckpointCorruptError as error:
                _log.error("checkpoint damaged dir=%s n=%d: %s", self._directory, sequence, error)
                self._quarantine(self._file("manifest", sequence))
                self._quarantine(self._file("payload", sequence))
                continue
            if sequence != latest:
                self._point_to(sequence)
            return loaded
        if candidates or latest is not None:
            _log.error("no checkpoint is usable dir=%s; starting without one", self._directory)
        return None

    def _write(
        self, sequence: int, write_payload: Callable[[Path], None], metadata: Mapping[str, JSON]
    ) -> None:
        """Write payload, manifest and `LATEST`, each durable before the next."""
        payload_file = self._file("payload", sequence)
        with telling_full_disk(payload_file):
            write_payload(payload_file)
            fsync_file(payload_file)
            fsync_dir(self._directory)
            manifest = Manifest(
                sequence=sequence,
                payload_name=payload_file.name,
                payload_bytes=payload_file.stat().st_size,
                payload_hash=hash_file(payload_file),
                metadata=metadata,
            )
        drop_from_cache(payload_file)
        replace_file(self._file("manifest", sequence), encode_manifest(manifest))
        replace_file(self._directory / LATEST_NAME, encode_latest(sequence))

    def _prune(self, latest: int) -> None:
        """Delete the oldest checkpoints: each manifest durably before its payload."""
        kept = sorted(self._sequences("manifest"), reverse=True)[: self._keep]
        self._remove([n for n in self._sequences("manifest") if n not in kept], "manifest")
        self._remove([n for n in self._sequences("payload") if n not in kept], "payload")
        assert latest in kept

    def _remove_leftovers(self, latest: int | None) -> None:
        """Delete what a killed save left: temporary files, and what `LATEST` does not cover."""
        remove_stale_temps(self._directory)
        manifests = self._sequences("manifest")
        if latest is not None:
            self._remove([n for n in manifests if n > latest], "manifest")
            manifests = [n for n in manifests if n <= latest]
        self._remove([n for n in self._sequences("payload") if n not in manifests], "payload")

    def _remove(self, sequences: list[int], kind: str) -> None:
        for sequence in sequences:
            file = self._file(kind, sequence)
            if file.is_dir():  # not ours, and perhaps not empty
                self._quarantine(file)
            else:
                os.unlink(file)
        if sequences:
            with telling_full_disk(self._directory):
                fsync_dir(self._directory)

    def _open(self, sequence: int) -> LoadedCheckpoint:
        manifest = parse_manifest(_read(self._file("manifest", sequence)))
        payload_file = self._file("payload", sequence)
        if (manifest.sequence, manifest.payload_name) != (sequence, payload_file.name):
            raise CheckpointCorruptError("the manifest is another checkpoint's")
        with _telling_damage(payload_file):
            size_bytes = payload_file.stat().st_size
            if size_bytes != manifest.payload_bytes:
                raise CheckpointCorruptError(
                    f"{payload_file.name} has {size_bytes} bytes, not {manifest.payload_bytes}"
                )
            if hash_file(payload_file) != manifest.payload_hash:
                raise CheckpointCorruptError(f"{payload_file.name} does not match its hash")
        return LoadedCheckpoint(
            payload_file=payload_file, metadata=manifest.metadata, sequence=sequence
        )

    def _peek_latest(self) -> int | None:
        """Return what `LATEST` says; None without it. Raises as `parse_latest`."""
        file = self._directory / LATEST_NAME
        return parse_latest(_read(file)) if os.path.lexists(file) else None

    def _read_latest(self) -> int | None:
        """Like `_peek_latest`; a damaged file is quarantined and as good as none."""
        try:
            return self._peek_latest()
        except CheckpointCorruptError as error:
            _log.error("LATEST damaged dir=%s: %s", self._directory, error)
            self._quarantine(self._directory / LATEST_NAME)
            return None

    def _point_to(self, sequence: int) -> None:
        """Have `LATEST` name the checkpoint in use, so that later loads agree."""
        try:
            replace_file(self._directory / LATEST_NAME, encode_latest(sequence))
        except StorageFullError as error:  # loading needs no space: the next load falls back again
            _log.warning("LATEST not repaired dir=%s: %s", self._directory, error)

    def _quarantine(self, file: Path) -> None:
        """Move `file` away if it is there, and delete the oldest in quarantine."""
        if not os.path.lexists(file):
            return
        quarantine_dir = self._directory / QUARANTINE_NAME
        try:
            with telling_full_disk(file):
                move_to_quarantine(file, quarantine_dir)
                _prune_quarantine(quarantine_dir)
        except StorageFullError as error:
            _log.warning("damaged file stays in place file=%s: %s", file, error)

    def _sequences(self, kind: str) -> list[int]:
        if not self._directory.is_dir():
            return []
        pattern = re.compile(_FILE_NAMES[kind])
        return [int(m[1]) for m in map(pattern.fullmatch, os.listdir(self._directory)) if m]

    def _file(self, kind: str, sequence: int) -> Path:
        suffix = "safetensors" if kind == "payload" else "json"
        return self._directory / f"{kind}-{sequence:08d}.{suffix}"


@contextlib.contextmanager
def _telling_damage(file: Path) -> Iterator[None]:
    """Turn what a damaged file or disk answers into CheckpointCorruptError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DAMAGE_ERRNOS:
            raise
        raise CheckpointCorruptError(f"{file.name} cannot be read: {error.strerror}") from error


def _read(file: Path) -> bytes:
    with _telling_damage(file), file.open("rb") as stream:
        return stream.read(MAX_MANIFEST_BYTES + 1)


def _prune_quarantine(quarantine_dir: Path) -> None:
    entries = sorted(quarantine_dir.iterdir(), key=lambda file: file.lstat().st_ctime_ns)
    for entry in entries[:-MAX_QUARANTINED]:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
