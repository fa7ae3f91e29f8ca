"""The messages between our own processes: newline-delimited JSON, typed on both ends.

Runs in: every process. Tensors never travel here: they are files, and messages name them.

Four conversations:
- tui -> agent over the control socket: `ControlRequest` / `ControlReply`;
- agent -> trainer over its pipes: `TrainerCommand` / `TrainerEvent`;
- agent -> aggregator over its pipes: `AggregatorCommand` / `AggregatorEvent`;
- agent -> sampler over its pipes: one `Generate`, one `SamplerEvent`.

Commands are imperative, events past tense. A child reads commands from stdin (end of file: end
yourself) and writes events to stdout; its log is stderr.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

MAX_LINE_BYTES = 1024 * 1024
CONTROL_VERSION = 1
MAX_PROMPT_CHARS = 65536
MAX_SAMPLE_TOKENS = 10_000
MAX_TEMPERATURE = 10.0
DEFAULT_TEMPERATURE = 0.7
"""For readers: at 1, a model that is still learning writes a third fewer real words."""
MAX_SEED = 2**32 - 1


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """One line."""


# ------------------------------------------------------------------------------------ trainer


class OwnWork(msgspec.Struct, frozen=True, kw_only=True):
    """One of our own contributions, as the books name it (ROUNDS.md rule 28)."""

    contribution_id: str
    blob_id: str
    carries: tuple[str, ...]
    new_tokens: int = 0
    """Tokens whose work it was the first to contain; 0: not known."""


class Rebase(_Message, frozen=True, kw_only=True, tag="rebase"):
    """Stand on `commit_id`: theta <- G + (theta - P); P <- G, and carry exactly `pending`.

    `works` holds every own contribution that `pending`, or what the trainer carries now, may need.
    """

    commit_id: str
    round_index: int
    state_hash: str
    pending: tuple[str, ...]
    works: tuple[OwnWork, ...]
    known_contributions: tuple[str, ...]
    """Blob ids of all own signed contributions: a snapshot older than one of them would send its
    work twice, so its displacement is discarded, with that reason."""


class Contribute(_Message, frozen=True, kw_only=True, tag="contribute"):
    """Encode the work since the last contribution (answer: Encoded, or NothingToContribute)."""

    base: str
    round_index: int


class SaveSnapshot(_Message, frozen=True, kw_only=True, tag="save_snapshot"):
    """Put everything on disk now (answer: SnapshotSaved)."""


class StopTrainer(_Message, frozen=True, kw_only=True, tag="stop"):
    """Stop before the next micro-batch, save a snapshot, end (answers: Stopping, SnapshotSaved)."""


TrainerCommand = Rebase | Contribute | SaveSnapshot | StopTrainer


class TrainerStarted(_Message, frozen=True, kw_only=True, tag="started"):
    """The process is up; nothing is trained before the first Rebase."""

    device: str
    """As torch names it, e.g. `cuda:0`."""
    device_name: str
    inner_step: int
    tokens_total: int
    """Tokens ever trained by this volunteer in this run, as the snapshot has it."""
    last_contribution: Encoded | None
    """What the snapshot was last encoded as: announced again if its record was never written."""


class Preparing(_Message, frozen=True, kw_only=True, tag="preparing"):
    """Tokens are being made of the run's data, before `TrainerStarted`; told every few seconds."""


class Rebased(_Message, frozen=True, kw_only=True, tag="rebased"):
    """The trainer stands on `commit_id` and carries `carried`."""

    commit_id: str
    carried: tuple[str, ...]
    discarded_tokens: int
    """Tokens whose work was given up because the snapshot was older than what was sent."""


class Stepped(_Message, frozen=True, kw_only=True, tag="stepped"):
    """Progress, at most about twice a second."""

    inner_step: int
    tokens_total: int
    tokens_since_contribution: int
    tokens_per_s: float
    loss: float
    """Mean training loss since the last message, nats per token."""
    lr: float


class Encoded(_Message, frozen=True, kw_only=True, tag="encoded"):
    """Blob and snapshot are on disk; the record may be signed."""

    base: str
    round_index: int
    blob_id: str
    blob_bytes: int
    codec: str
    codec_version: int
    tokens: int
    carries: tuple[str, ...]


class NothingToContribute(_Message, frozen=True, kw_only=True, tag="nothing_to_contribute"):
    """No inner step was taken since the last contribution."""

    base: str


class SnapshotSaved(_Message, frozen=True, kw_only=True, tag="snapshot_saved"):
    """What a kill cannot take any more."""

    inner_step: int
    tokens_total: int
    tokens_since_contribution: int


class Stopping(_Message, frozen=True, kw_only=True, tag="stopping"):
    """No further inner step is taken."""

    inner_step: int
    tokens_total: int


class TrainerFailed(_Message, frozen=True, kw_only=True, tag="failed"):
    """The trainer cannot go on, and ends."""

    error: str
    """Name of the error class in volunteer.errors."""
    message: str
    hint: str


TrainerEvent = (
    Preparing
    | TrainerStarted
    | Rebased
    | Stepped
    | Encoded
    | NothingToContribute
    | SnapshotSaved
    | Stopping
    | TrainerFailed
)

# --------------------------------------------------------------------------------- aggregator


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


class BuildGenesis(_Message, frozen=True, kw_only=True, tag="build_genesis"):
    """Make the state of round 0 (answer: StateBuilt, or Failed if the spec's hash differs)."""

    request_id: int


class ValidateBlob(_Message, frozen=True, kw_only=True, tag="validate_blob"):
    """Check a blob against its record: author, round, codec, shape, bounds (BlobValidated)."""

    request_id: int
    blob_id: str
    author: str
    round_index: int
    codec: str
    codec_version: int
    content_hash: str = ""
    """What the record says of the tensors' bytes; empty: nothing."""


class ApplyCommit(_Message, frozen=True, kw_only=True, tag="apply_commit"):
    """Aggregate `listed` in order, take the outer step from `parent_state` (answer: StateBuilt)."""

    request_id: int
    round_index: int
    """Of the parent: 0 for the step from the genesis."""
    parent_state: str
    listed: tuple[ListedWork, ...]


class EvaluateState(_Message, frozen=True, kw_only=True, tag="evaluate_state"):
    """Measure the held-out loss of a state (answer: StateEvaluated)."""

    request_id: int
    state_hash: str


class VerifyState(_Message, frozen=True, kw_only=True, tag="verify_state"):
    """Check that a state's file is what its hash says, and a state of this run (StateVerified)."""

    request_id: int
    state_hash: str


AggregatorCommand = BuildGenesis | ValidateBlob | ApplyCommit | EvaluateState | VerifyState


class AggregatorStarted(_Message, frozen=True, kw_only=True, tag="started"):
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


class StateBuilt(_Message, frozen=True, kw_only=True, tag="state_built"):
    """The state is in the blob store under its hash."""

    request_id: int
    state_hash: str
    outcomes: tuple[Outcome, ...]


class BlobValidated(_Message, frozen=True, kw_only=True, tag="blob_validated"):
    """The verdict on a blob; `reason` is empty if it is valid."""

    request_id: int
    blob_id: str
    reason: str


class StateEvaluated(_Message, frozen=True, kw_only=True, tag="state_evaluated"):
    """Held-out loss, on as many windows as there was time for before something else was asked."""

    request_id: int
    state_hash: str
    held_out_loss: float
    """Nats per byte of text, whatever the tokenizer."""
    loss_stderr: float
    """Its standard error over the windows."""
    num_windows: int


class StateVerified(_Message, frozen=True, kw_only=True, tag="state_verified"):
    """The state is here, whole, of this run's shape and finite."""

    request_id: int
    state_hash: str


class AggregatorFailed(_Message, frozen=True, kw_only=True, tag="failed"):
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
    | AggregatorFailed
)

# ------------------------------------------------------------------------------------ sampler


class Generate(_Message, frozen=True, kw_only=True, tag="generate"):
    """Write text with the shared weights (answer: Generated, or SamplerFailed)."""

    prompt: Annotated[str, msgspec.Meta(max_length=MAX_PROMPT_CHARS)] = ""
    """What the text goes on from; the model sees as much of its end as its context holds."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLE_TOKENS)] = 200
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_TEMPERATURE)] = DEFAULT_TEMPERATURE
    """What logits are divided by: 0 takes the likeliest token each time."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEED)] = 0


class Generated(_Message, frozen=True, kw_only=True, tag="generated"):
    """What the model wrote, without the prompt; bytes that are not UTF-8 are replaced."""

    text: str
    num_tokens: int


class SamplerFailed(_Message, frozen=True, kw_only=True, tag="failed"):
    """Nothing could be written; the process ends."""

    message: str
    hint: str


SamplerEvent = Generated | SamplerFailed

# ------------------------------------------------------------------------------------ control


class ControlRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request to the agent.

    Verbs: `status`, `stats`, `peers`, `pause`, `resume`, `stop`, `history`, `sample`, `watch`.
    `sample` takes the fields of `Generate`; `watch` answers with a `ControlReply` a second until
    the client goes.
    """

    version: int = CONTROL_VERSION
    verb: str
    args: dict[str, Any] = msgspec.field(default_factory=dict)


class ControlFault(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request was refused."""

    message: str
    hint: str = ""
    exit_code: int = 1


class ControlReply(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's answer: `result`, or `fault`."""

    version: int = CONTROL_VERSION
    result: Any = None
    fault: ControlFault | None = None


_T = TypeVar("_T")


def encode_line(message: msgspec.Struct) -> bytes:
    """Return `message` as one line of JSON, newline included."""
    return msgspec.json.encode(message) + b"\n"


def parse_line(line: bytes, decoder: msgspec.json.Decoder[_T]) -> _T:
    """Parse one line.

    Raises:
        ValueError: too long or malformed (msgspec's errors are ValueErrors).
    """
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"line of {len(line)} bytes, at most {MAX_LINE_BYTES} allowed")
    try:
        return decoder.decode(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


trainer_command_decoder: msgspec.json.Decoder[TrainerCommand] = msgspec.json.Decoder(TrainerCommand)
trainer_event_decoder: msgspec.json.Decoder[TrainerEvent] = msgspec.json.Decoder(TrainerEvent)
aggregator_command_decoder: msgspec.json.Decoder[AggregatorCommand] = msgspec.json.Decoder(
    AggregatorCommand
)
aggregator_event_decoder: msgspec.json.Decoder[AggregatorEvent] = msgspec.json.Decoder(
    AggregatorEvent
)
generate_decoder = msgspec.json.Decoder(Generate)
sampler_event_decoder: msgspec.json.Decoder[SamplerEvent] = msgspec.json.Decoder(SamplerEvent)
control_request_decoder = msgspec.json.Decoder(ControlRequest)
control_reply_decoder = msgspec.json.Decoder(ControlReply)
