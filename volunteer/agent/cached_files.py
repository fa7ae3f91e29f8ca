"""Gives back the memory in which the system keeps files that nobody will read soon.

Runs in: agent. A round leaves some hundred megabytes in the page cache: the blobs that its commit
lists, and the state that the commit was built on. They would push the owner's files out, and each
new page of the next round costs a virtual machine a fault of its host, ten times the copy. So the
blobs go when the next round closes, and the state while the next but one is written
(training/state.py): what comes then takes their place.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2p.blobstore import BlobStore
from volunteer.files import drop_from_cache
from volunteer.rounds.machine import Machine


def settled_blobs(machine: Machine) -> list[str]:
    """Return the ids of the blobs that the commit at the tip was made of.

    A peer that is behind may still fetch them: they are then read from the disk.
    """
    if machine.tip is None:
        return []
    contributions = machine.known.contributions
    return [contributions[i].blob_id for i in sorted(machine.known.facts[machine.tip].listed)]


def drop_all(store: BlobStore, blob_ids: Iterable[str]) -> None:
    """Have the system forget these files of `store`, where they are here. Blocks for a moment."""
    for blob_id in blob_ids:
        drop_from_cache(store.file_of(blob_id))
