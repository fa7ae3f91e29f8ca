"""What a volunteer's training has come to, in numbers: the part of a snapshot that is no tensor.

Runs in: trainer. Pure, no torch.

Invariant: tokens_total == tokens_contributed + tokens_since_contribution + tokens_discarded. Every
trained token is in exactly one of them, whatever is killed when.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from volunteer.messages import Encoded, OwnWork, Rebase

MAX_OWN_BLOBS = 1024
"""Own contributions remembered; a week of rounds. Carried ones are the latest few."""


class OwnBlob(msgspec.Struct, frozen=True, kw_only=True):
    """One own contribution, as the trainer knows it before and after it is signed."""

    blob_id: str
    new_tokens: int
    """Tokens whose work it was the first to contain; 0 if only the agent's records know it."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Counters and names; each change makes a new value."""

    inner_step: int = 0
    """Inner steps ever taken: the position in the data stream and Adam's step count."""
    tokens_total: int = 0
    """Tokens ever trained."""
    tokens_since_contribution: int = 0
    """Of them, in the weights and in no contribution yet."""
    tokens_contributed: int = 0
    """Of them, in contributions."""
    tokens_discarded: int = 0
    """Of them, given up because a damaged snapshot would have sent their work twice."""
    base_commit: str = ""
    """The commit that the weights stand on; empty before the first Rebase."""
    round_index: int = 0
    """Height of `base_commit`."""
    carried: tuple[OwnWork, ...] = ()
    """Own contributions whose new part is in the local weights again, sorted by id."""
    last_contribution: Encoded | None = None
    own_blobs: tuple[OwnBlob, ...] = ()
    """Own contributions whose work is *not* in the displacement, the oldest first."""


def after_step(progress: Progress, *, num_tokens: int) -> Progress:
    """Return the progress after one inner step on `num_tokens` tokens."""
    return msgspec.structs.replace(
        progress,
        inner_step=progress.inner_step + 1,
        tokens_total=progress.tokens_total + num_tokens,
        tokens_since_contribution=progress.tokens_since_contribution + num_tokens,
    )


def tokens_to_contribute(progress: Progress) -> int:
    """Return the tokens that a contribution made now contains, those of carried work included."""
    new_tokens = {blob.blob_id: blob.new_tokens for blob in progress.own_blobs}
    return progress.tokens_since_contribution + sum(
        new_tokens.get(work.blob_id, 0) or work.new_tokens for work in progress.carried
    )


def unknown_carried(progress: Progress) -> tuple[str, ...]:
    """Return the carried contributions whose tokens are not known any more, and count as none."""
    known = {blob.blob_id for blob in progress.own_blobs if blob.new_tokens}
    return tuple(
        work.contribution_id
        for work in progress.carried
        if work.blob_id not in known and not work.new_tokens
    )


def carried_ids(progress: Progress) -> tuple[str, ...]:
    """Return the ids of the contributions whose new part is in the local weights, sorted."""
    return tuple(work.contribution_id for work in progress.carried)


def after_contribution(progress: Progress, encoded: Encoded) -> Progress:
    """Return the progress once all that is in the weights is in `encoded`."""
    own_blob = OwnBlob(blob_id=encoded.blob_id, new_tokens=progress.tokens_since_contribution)
    return msgspec.structs.replace(
        progress,
        tokens_since_contribution=0,
        tokens_contributed=progress.tokens_contributed + progress.tokens_since_contribution,
        carried=(),
        last_contribution=encoded,
        own_blobs=(*progress.own_blobs, own_blob)[-MAX_OWN_BLOBS:],
    )


def is_superseded(progress: Progress, known_contributions: Sequence[str]) -> bool:
    """Tell whether a contribution was signed that this progress does not know.

    Then the weights, which come from an older snapshot, still hold work that was sent. (A
    contribution known here and not in the records is fine: it is announced again.)

    Args:
        progress: as loaded.
        known_contributions: blob ids of all own signed contributions, the newest last.
    """
    own = {blob.blob_id for blob in progress.own_blobs}
    return bool(known_contributions) and known_contributions[-1] not in own


def after_discard(progress: Progress, known_contributions: Sequence[str]) -> Progress:
    """Return the progress once the displacement is given up in favour of what was signed."""
    own = {blob.blob_id for blob in progress.own_blobs}
    learned = tuple(
        OwnBlob(blob_id=blob_id, new_tokens=0)
        for blob_id in known_contributions
        if blob_id not in own
    )
    return msgspec.structs.replace(
        progress,
        tokens_since_contribution=0,
        tokens_discarded=progress.tokens_discarded + progress.tokens_since_contribution,
        carried=(),
        own_blobs=(*progress.own_blobs, *learned)[-MAX_OWN_BLOBS:],
    )


def after_rebase(progress: Progress, command: Rebase, works: Mapping[str, OwnWork]) -> Progress:
    """Return the progress once the weights stand on the command's commit and carry its pending.

    Args:
        progress: before.
        command: the commit, and what is pending on it.
        works: own contributions by id, among them all that is pending.
    """
    return msgspec.structs.replace(
        progress,
        base_commit=command.commit_id,
        round_index=command.round_index,
        carried=tuple(works[work_id] for work_id in sorted(set(command.pending))),
    )
