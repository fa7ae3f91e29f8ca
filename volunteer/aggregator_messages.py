"""What the agent asks of the aggregator, and what that answers.

Runs in: agent, aggregator. A part of messages.py, from where it is imported.
"""

from __future__ import annotations

import msgspec

from volunteer.message_base import Message


class ListedWork(msgspec.Struct, frozen=True, kw_only=True):
    """One listed contribution, with all that its weight depends on (DESIGN.md section 4)."""

    contribution_id: str
    author: str
    round_index: int
    """Height of the commit that it was made on; the blob says author and round as well."""
    blob_id: str
    tokens: int
    is_late: bool
    is_on_probation: bool
    is_excluded: bool = False
    """Its author is excluded for bad work in earlier rounds (rounds/exclusion.py)."""
    is_stale: bool = False
    """It repeats what was listed for an earlier base (rounds/bad_work.py)."""


class BuildGenesis(Message, frozen=True, kw_only=True, tag="build_genesis"):
    """Make the state of round 0, or look through a given one (StateBuilt; Failed if it differs)."""

    request_id: int


class ValidateBlob(Message, frozen=True, kw_only=True, tag="validate_blob"):
    """Check a blob against its record: author, round, codec, shape, bounds (BlobValidated)."""

    request_id: int
    blob_id: str
    author: str
    round_index: int
    codec: str
    codec_version: int
    content_hash: str = ""
    """What the record says of the tensors' bytes; empty: nothing."""


class ApplyCommit(Message, frozen=True, kw_only=True, tag="apply_commit"):
    """Aggregate `listed` in order, take the outer step from `parent_state` (answer: StateBuilt)."""

    request_id: int
    round_index: int
    """Of the parent: 0 for the step from the genesis."""
    parent_state: str
    listed: tuple[ListedWork, ...]


class EvaluateState(Message, frozen=True, kw_only=True, tag="evaluate_state"):
    """Measure the held-out loss of a state (answer: StateEvaluated)."""

    request_id: int
    state_hash: str


class VerifyState(Message, frozen=True, kw_only=True, tag="verify_state"):
    """Check that a state's file is what its hash says, and a state of this run (StateVerified)."""

    request_id: int
    state_hash: str


class ScoreContributions(Message, frozen=True, kw_only=True, tag="score_contributions"):
    """Measure what each of `works` alone does to the loss (answer: ContributionsScored)."""

    request_id: int
    commit_id: str
    """The commit that lists them; it draws the windows."""
    parent_state: str
    works: tuple[ListedWork, ...]
    clip_scales: tuple[float, ...]
    """Of their outcomes, in the same order."""


AggregatorCommand = (
    BuildGenesis | ValidateBlob | ApplyCommit | EvaluateState | VerifyState | ScoreContributions
)


class AggregatorStarted(Message, frozen=True, kw_only=True, tag="started"):
    """The process is up."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one listed contribution."""

    contribution_id: str
    weight: float
    """After the one renormalisation; 0 if refused."""
    norm: float
    """Euclidean norm of the decoded pseudo-gradient."""
    clip_scale: float
    """1 unless the norm was clipped."""
    refused_reason: str
    """Empty, or a sentence."""
    is_marked: bool = False
    """Whether the commit has to mark it as bad work (rounds/exclusion.py)."""
    copies: tuple[str, ...] = ()
    """Other listed contributions of the very same direction: they share one weight."""


class StateBuilt(Message, frozen=True, kw_only=True, tag="state_built"):
    """The state is in the blob store under its hash."""

    request_id: int
    state_hash: str
    outcomes: tuple[Outcome, ...]


class BlobValidated(Message, frozen=True, kw_only=True, tag="blob_validated"):
    """The verdict on a blob; `reason` is empty if it is valid."""

    request_id: int
    blob_id: str
    reason: str


class StateEvaluated(Message, frozen=True, kw_only=True, tag="state_evaluated"):
    """Held-out loss, on as many windows as there was time for before something else was asked."""

    request_id: int
    state_hash: str
    held_out_loss: float
    """Nats per byte of text, whatever the tokenizer."""
    loss_stderr: float
    """Its standard error over the windows."""
    num_windows: int
    bytes_per_token: float | None = None
    """Bytes of text that a token of them covers."""


class StateVerified(Message, frozen=True, kw_only=True, tag="state_verified"):
    """The state is here, whole, of this run's shape and finite."""

    request_id: int
    state_hash: str


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What one contribution alone does to the loss, nats per token (training/scoring.py)."""

    contribution_id: str
    change: float
    stderr: float
    loss: float
    """Without it."""


class ContributionsScored(Message, frozen=True, kw_only=True, tag="contributions_scored"):
    """The scores of the first works; of all, unless something else was asked for meanwhile."""

    request_id: int
    scores: tuple[Score, ...]


class AggregatorFailed(Message, frozen=True, kw_only=True, tag="failed"):
    """One request could not be answered; the process goes on."""

    request_id: int
    error: str
    message: str
    hint: str


AggregatorEvent = (
    AggregatorStarted
    | StateBuilt
    | BlobValidated
    | StateEvaluated
    | StateVerified
    | ContributionsScored
    | AggregatorFailed
)
