"""Which files of a store this process has already found right. Runs in: aggregator.

A listed blob is looked at twice, when it comes and when it is applied, and a state when it is made
and when the next commit builds on it. Hashing and checking it again is a quarter of an apply. What
is remembered ends with the process, and with any change of the file that the system shows: size,
times, or place on the disk.
"""

from __future__ import annotations

import os
from pathlib import Path

from p2p.blobstore import BlobStore, is_blob_id
from p2p.errors import BlobCorruptError, BlobUnavailableError

MAX_SEEN = 256
"""Files remembered; a commit lists 32."""

_Stamp = tuple[int, int, int, int]


class SeenFiles:
    """What was found right, oldest first."""

    def __init__(self, store: BlobStore) -> None:
        """Remember nothing yet of `store`."""
        self._store = store
        self._stamps: dict[str, _Stamp] = {}
        self._checked: dict[str, set[object]] = {}

    def verify(self, blob_id: str) -> None:
        """Check that the blob is here and is what its id says.

        Raises:
            BlobUnavailableError: it is not here.
            BlobCorruptError: the disk has damaged it.

        Cost: one read of it, the first time.
        """
        if not is_blob_id(blob_id) or not self._store.has(blob_id):
            raise BlobUnavailableError(f"{blob_id!r} is not in {self._store.directory}")
        stamp = _stamp_of(self._store.file_of(blob_id))
        if self._stamps.get(blob_id) == stamp:
            return
        self._forget(blob_id)
        if not self._store.verify(blob_id):
            raise BlobCorruptError(
                f"{blob_id} is damaged on the disk", hint="delete it, and it is fetched again"
            )
        self._remember(blob_id, stamp)

    def note_made(self, blob_id: str) -> None:
        """This process has just written the blob, and hashed what it wrote."""
        self._remember(blob_id, _stamp_of(self._store.file_of(blob_id)))

    def is_checked(self, blob_id: str, what_for: object) -> bool:
        """Tell whether the content was found right for something since it was verified."""
        return what_for in self._checked.get(blob_id, ())

    def note_checked(self, blob_id: str, what_for: object) -> None:
        """The content is right for `what_for`."""
        if blob_id in self._stamps:
            self._checked.setdefault(blob_id, set()).add(what_for)

    def _remember(self, blob_id: str, stamp: _Stamp) -> None:
        while len(self._stamps) >= MAX_SEEN:
            self._forget(next(iter(self._stamps)))
        self._stamps[blob_id] = stamp

    def _forget(self, blob_id: str) -> None:
        self._stamps.pop(blob_id, None)
        self._checked.pop(blob_id, None)


def _stamp_of(file: Path) -> _Stamp:
    status = os.stat(file)
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
