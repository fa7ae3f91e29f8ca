"""What goes into the round protocol's machine and what comes out of it.

Runs in: agent. Pure values. Events are past tense, actions imperative. The driver (agent or
simulation) verifies signatures before it hands records in, and does what the actions say.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from volunteer.rounds.records import Commit, Contribution, Record

# ------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class RecordArrived:
    """A record with a verified signature, from a peer, from disk, or our own."""

    record_id: str
    record: Record


@dataclass(frozen=True, slots=True)
class BlobHeld:
    """A contribution's blob is here, valid, and what the record says.

    Of the record, not of the blob: another record may name the same blob wrongly.
    """

    contribution_id: str


@dataclass(frozen=True, slots=True)
class BlobRefused:
    """A contribution's blob is here and is not what the record says, for ever.

    Another author, round, shape, or values out of bounds.
    """

    contribution_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class StateHeld:
    """The shared state after `commit_id` is on disk and its hash is the commit's."""

    commit_id: str


@dataclass(frozen=True, slots=True)
class StateRefused:
    """Applying `commit_id` gave another hash than it states: nobody may stand on it."""

    commit_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class StateDropped:
    """The state file of `commit_id` is no longer on disk; the commit stays verified."""

    commit_id: str


@dataclass(frozen=True, slots=True)
class StatePartHeld:
    """So much of the state file of `commit_id` is on disk: what a fetch that ended has left."""

    commit_id: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """An action could not be done (trainer or aggregator ended, nobody has the file): ask again.

    `subject` is the id that the action named: a base, commit, parent or contribution.
    """

    subject: str


@dataclass(frozen=True, slots=True)
class WorkDropped:
    """Read back at a restart: own work that was given up before."""

    contribution_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ContributionEncoded:
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


@dataclass(frozen=True, slots=True)
class ProposalComputed:
    """The aggregator has applied `contributions` to the state of `parent`."""

    parent: str
    contributions: tuple[str, ...]
    state_hash: str
    marked: tuple[str, ...] = ()
    """Those of them that the aggregation finds bad, sorted."""


@dataclass(frozen=True, slots=True)
class VerdictReached:
    """As a scorer of `commit_id`, this member finds these of its contributions harmful.

    It goes out with the member's own contribution on that commit (scoring.py).
    """

    commit_id: str
    harmful: tuple[str, ...]
    """Sorted."""


@dataclass(frozen=True, slots=True)
class WorkReported:
    """The trainer's progress: tokens since its last contribution."""

    tokens_since_contribution: int


@dataclass(frozen=True, slots=True)
class TrainerReady:
    """A trainer has started, and what its snapshot had encoded is in the books: place it."""


@dataclass(frozen=True, slots=True)
class ContributingChanged:
    """The owner or the idle policy started or stopped the trainer."""

    is_contributing: bool


@dataclass(frozen=True, slots=True)
class Ticked:
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


@dataclass(frozen=True, slots=True)
class Encode:
    """Have the trainer encode its work on `base` (answer: ContributionEncoded, or nothing)."""

    base: str
    round_index: int


@dataclass(frozen=True, slots=True)
class PublishRecord:
    """Sign `record`, put it on disk (fsync), hand it back as RecordArrived, then send it."""

    record: Record


@dataclass(frozen=True, slots=True)
class FetchBlob:
    """Fetch and validate a contribution's blob (answer: BlobHeld or BlobRefused)."""

    contribution_id: str
    contribution: Contribution


@dataclass(frozen=True, slots=True)
class FetchRecord:
    """A commit lists a record that is not here: ask any peer for it."""

    record_id: str


@dataclass(frozen=True, slots=True)
class ComputeState:
    """Apply `commit` to its parent's state (answer: StateHeld or StateRefused).

    The parent's state is held. `listed` are the contributions in list order.
    """

    commit_id: str
    commit: Commit
    listed: tuple[Listed, ...]


@dataclass(frozen=True, slots=True)
class ComputeProposal:
    """Apply `listed` to the state of `parent` (answer: ProposalComputed)."""

    parent: str
    listed: tuple[Listed, ...]


@dataclass(frozen=True, slots=True)
class FetchState:
    """Fetch the state file of `commit_id` as chunks from several peers (answer: StateHeld)."""

    commit_id: str
    state_hash: str


@dataclass(frozen=True, slots=True)
class MoveTo:
    """The tip is now `commit_id`: rebase the trainer onto its state.

    `pending` are the own contributions whose new part must be in the local weights, now.
    """

    commit_id: str
    round_index: int
    state_hash: str
    pending: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DropWork:
    """Own work is given up for good; keep the reason (ROUNDS.md rule 29)."""

    contribution_ids: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Finalise:
    """`commit_id` and all below it are final: credit is due, old files may go."""

    commit_id: str
    round_index: int
    own_listed: tuple[str, ...]
    """Own contributions that this makes final."""


@dataclass(frozen=True, slots=True)
class BanPeer:
    """Proof of double signing: keep both records, cut the peer off."""

    peer: str
    first: str
    second: str
    reason: str


@dataclass(frozen=True, slots=True)
class RaiseAlarm:
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


@dataclass(frozen=True, slots=True)
class Listed:
    """One contribution as a commit lists it, with what the chain says about its author."""

    contribution_id: str
    contribution: Contribution
    is_late: bool = field(default=False)
    """Made on the parent's parent: half weight (rule 5)."""
    is_on_probation: bool = field(default=False)
    """Its author has been listed in fewer than 5 commits (DESIGN.md section 4)."""
    is_excluded: bool = field(default=False)
    """Its author is excluded for bad work: weight 0 (exclusion.py)."""
    is_stale: bool = field(default=False)
    """It repeats what was listed for an earlier base: weight 0, and a mark (bad_work.py)."""
