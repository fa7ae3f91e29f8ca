"""What goes into the round protocol's machine and what comes out of it.

Runs in: agent. Pure values. Events are past tense, actions imperative. The driver (agent or
simulation) verifies signatures before it hands records in, and does what the actions say.
"""

from __future__ import annotations

import msgspec

from volunteer.rounds.records import Commit, Contribution, Record

# ------------------------------------------------------------------------------------- events


class RecordArrived(msgspec.Struct, frozen=True):
    """A record with a verified signature, from a peer, from disk, or our own."""

    record_id: str
    record: Record


class BlobHeld(msgspec.Struct, frozen=True):
    """A contribution's blob is here, valid, and what the record says.

    Of the record, not of the blob: another record may name the same blob wrongly.
    """

    contribution_id: str


class BlobRefused(msgspec.Struct, frozen=True):
    """A contribution's blob is here and is not what the record says, for ever.

    Another author, round, shape, or values out of bounds.
    """

    contribution_id: str
    reason: str


class StateHeld(msgspec.Struct, frozen=True):
    """The shared state after `commit_id` is on disk and its hash is the commit's."""

    commit_id: str


class StateRefused(msgspec.Struct, frozen=True):
    """Applying `commit_id` gave another hash than it states: nobody may stand on it."""

    commit_id: str
    reason: str


class StateDropped(msgspec.Struct, frozen=True):
    """The state file of `commit_id` is no longer on disk; the commit stays verified."""

    commit_id: str


class StatePartHeld(msgspec.Struct, frozen=True):
    """So much of the state file of `commit_id` is on disk: what a fetch that ended has left."""

    commit_id: str
    num_bytes: int


class RequestFailed(msgspec.Struct, frozen=True):
    """An action could not be done (trainer or aggregator ended, nobody has the file): ask again.

    `subject` is the id that the action named: a base, commit, parent or contribution.
    """

    subject: str


class WorkDropped(msgspec.Struct, frozen=True):
    """Read back at a restart: own work that was given up before."""

    contribution_ids: tuple[str, ...]


class ContributionEncoded(msgspec.Struct, frozen=True):
    """The trainer has encoded its work on `base`; blob and snapshot are on disk."""

    base: str
    blob_id: str
    blob_bytes: int
    codec: str
    codec_version: int
    tokens: int
    carries: tuple[str, ...]
    """Sorted ids of own contributions that were folded into the weights."""
    content_hash: str = ""
    """Of the blob's tensors; empty: not known."""


class ProposalComputed(msgspec.Struct, frozen=True):
    """The aggregator has applied `contributions` to the state of `parent`."""

    parent: str
    contributions: tuple[str, ...]
    state_hash: str
    marked: tuple[str, ...] = ()
    """Those of them that the aggregation finds bad, sorted."""


class VerdictReached(msgspec.Struct, frozen=True):
    """As a scorer of `commit_id`, this member finds these of its contributions harmful.

    It goes out with the member's own contribution on that commit (scoring.py).
    """

    commit_id: str
    harmful: tuple[str, ...]
    """Sorted."""


class WorkReported(msgspec.Struct, frozen=True):
    """The trainer's progress: tokens since its last contribution."""

    tokens_since_contribution: int


class TrainerReady(msgspec.Struct, frozen=True):
    """A trainer has started, and what its snapshot had encoded is in the books: place it."""


class ContributingChanged(msgspec.Struct, frozen=True):
    """The owner or the idle policy started or stopped the trainer."""

    is_contributing: bool


class Ticked(msgspec.Struct, frozen=True):
    """Time has passed."""


Event = (
    RecordArrived
    | BlobHeld
    | BlobRefused
    | StateHeld
    | StateRefused
    | StateDropped
    | StatePartHeld
    | RequestFailed
    | WorkDropped
    | ContributionEncoded
    | ProposalComputed
    | VerdictReached
    | WorkReported
    | TrainerReady
    | ContributingChanged
    | Ticked
)

# ------------------------------------------------------------------------------------ actions


class Encode(msgspec.Struct, frozen=True):
    """Have the trainer encode its work on `base` (answer: ContributionEncoded, or nothing)."""

    base: str
    round_index: int


class PublishRecord(msgspec.Struct, frozen=True):
    """Sign `record`, put it on disk (fsync), hand it back as RecordArrived, then send it."""

    record: Record


class FetchBlob(msgspec.Struct, frozen=True):
    """Fetch and validate a contribution's blob (answer: BlobHeld or BlobRefused)."""

    contribution_id: str
    contribution: Contribution


class FetchRecord(msgspec.Struct, frozen=True):
    """A commit lists a record that is not here: ask any peer for it."""

    record_id: str


class ComputeState(msgspec.Struct, frozen=True):
    """Apply `commit` to its parent's state (answer: StateHeld or StateRefused).

    The parent's state is held. `listed` are the contributions in list order.
    """

    commit_id: str
    commit: Commit
    listed: tuple[Listed, ...]


class ComputeProposal(msgspec.Struct, frozen=True):
    """Apply `listed` to the state of `parent` (answer: ProposalComputed)."""

    parent: str
    listed: tuple[Listed, ...]


class FetchState(msgspec.Struct, frozen=True):
    """Fetch the state file of `commit_id` as chunks from several peers (answer: StateHeld)."""

    commit_id: str
    state_hash: str


class MoveTo(msgspec.Struct, frozen=True):
    """The tip is now `commit_id`: rebase the trainer onto its state.

    `pending` are the own contributions whose new part must be in the local weights, now.
    """

    commit_id: str
    round_index: int
    state_hash: str
    pending: tuple[str, ...]


class DropWork(msgspec.Struct, frozen=True):
    """Own work is given up for good; keep the reason (ROUNDS.md rule 29)."""

    contribution_ids: tuple[str, ...]
    reason: str


class Finalise(msgspec.Struct, frozen=True):
    """`commit_id` and all below it are final: credit is due, old files may go."""

    commit_id: str
    round_index: int
    own_listed: tuple[str, ...]
    """Own contributions that this makes final."""


class BanPeer(msgspec.Struct, frozen=True):
    """Proof of double signing: keep both records, cut the peer off."""

    peer: str
    first: str
    second: str
    reason: str


class RaiseAlarm(msgspec.Struct, frozen=True):
    """A final commit would have to be left without a reset: stop and tell (rule 18)."""

    final_commit: str
    other_tip: str


Action = (
    Encode
    | PublishRecord
    | FetchBlob
    | FetchRecord
    | ComputeState
    | ComputeProposal
    | FetchState
    | MoveTo
    | DropWork
    | Finalise
    | BanPeer
    | RaiseAlarm
)


class Listed(msgspec.Struct, frozen=True):
    """One contribution as a commit lists it, with what the chain says about its author."""

    contribution_id: str
    contribution: Contribution
    is_late: bool = False
    """Made on the parent's parent: half weight (rule 5)."""
    is_on_probation: bool = False
    """Its author has been listed in fewer than 5 commits (DESIGN.md section 4)."""
    is_excluded: bool = False
    """Its author is excluded for bad work: weight 0 (exclusion.py)."""
    is_stale: bool = False
    """It repeats what was listed for an earlier base: weight 0, and a mark (bad_work.py)."""
