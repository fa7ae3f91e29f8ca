"""Gives back the memory in which the system keeps files that nobody will read soon.

Runs in: agent. A round leaves some hundred megabytes in the page cache: the blobs that its commit
lists, and the state that the commit was built on. They would push the owner's files out, and each
new page of the next round costs a virtual machine a fault of its host, ten times the copy. What is
freed is back with the host after two seconds. So what this member writes itself when the round
closes is made room for then, the other blobs go as those of the next round come
(p2p/page_cache.py), and the state while the next but one is written (training/state.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from p2p.blobstore import BlobStore
from volunteer.rounds.machine import Machine
from volunteer.run import RunSpec

_EXACT_CODECS = ("fp32",)
"""They leave no error feedback, so no note of it is written (training/contribution_note.py)."""


def settled_blobs(machine: Machine) -> list[str]:
    """Return the ids of the blobs that the commit at the tip was made of.

    A peer that is behind may still fetch them: they are then read from the disk.
    """
    if machine.tip is None:
        return []
    contributions = machine.known.contributions
    return [contributions[i].blob_id for i in sorted(machine.known.facts[machine.tip].listed)]


def written_at_close_bytes(spec: RunSpec, num_parameters: int) -> int:
    """Return what the trainer writes when a round closes: its blob, and the error feedback."""
    blob_bytes = int(spec.codec.bytes_per_parameter * num_parameters)
    return blob_bytes + (0 if spec.codec.id in _EXACT_CODECS else 4 * num_parameters)


def let_go(store: BlobStore, blob_ids: Iterable[str], num_bytes_now: int) -> None:
    """Have the system forget these files of `store`: so much at once, the rest bit by bit.

    Blocks for a moment.
    """
    store.settled.add([store.file_of(blob_id) for blob_id in blob_ids])
    store.settled.drop(num_bytes_now)
