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

from volunteer.aggregator_messages import AggregatorCommand as AggregatorCommand
from volunteer.aggregator_messages import AggregatorEvent as AggregatorEvent
from volunteer.aggregator_messages import AggregatorFailed as AggregatorFailed
from volunteer.aggregator_messages import AggregatorStarted as AggregatorStarted
from volunteer.aggregator_messages import ApplyCommit as ApplyCommit
from volunteer.aggregator_messages import BlobValidated as BlobValidated
from volunteer.aggregator_messages import BuildGenesis as BuildGenesis
from volunteer.aggregator_messages import ContributionsScored as ContributionsScored
from volunteer.aggregator_messages import EvaluateState as EvaluateState
from volunteer.aggregator_messages import ListedWork as ListedWork
from volunteer.aggregator_messages import Outcome as Outcome
from volunteer.aggregator_messages import Score as Score
from volunteer.aggregator_messages import ScoreContributions as ScoreContributions
from volunteer.aggregator_messages import StateBuilt as StateBuilt
from volunteer.aggregator_messages import StateEvaluated as StateEvaluated
from volunteer.aggregator_messages import StateVerified as StateVerified
from volunteer.aggregator_messages import ValidateBlob as ValidateBlob
from volunteer.aggregator_messages import VerifyState as VerifyState
from volunteer.message_base import Message
from volunteer.micro_batch import MicroBatchChosen

MAX_LINE_BYTES = 1024 * 1024
CONTROL_VERSION = 1
MAX_PROMPT_CHARS = 65536
MAX_SAMPLE_TOKENS = 10_000
MAX_TEMPERATURE = 10.0
DEFAULT_TEMPERATURE = 0.7
"""For readers: at 1, a model that is still learning writes a third fewer real words."""
MAX_SEED = 2**32 - 1


# ------------------------------------------------------------------------------------ trainer


class OwnWork(msgspec.Struct, frozen=True, kw_only=True):
    """One of our own contributions, as the books name it (ROUNDS.md rule 28)."""

    contribution_id: str
    blob_id: str
    carries: tuple[str, ...]
    new_tokens: int = 0
    """Tokens whose work it was the first to contain; 0: not known."""


class Rebase(Message, frozen=True, kw_only=True, tag="rebase"):
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


class Contribute(Message, frozen=True, kw_only=True, tag="contribute"):
    """Encode the work since the last contribution (answer: Encoded, or NothingToContribute)."""

    base: str
    round_index: int


class SaveSnapshot(Message, frozen=True, kw_only=True, tag="save_snapshot"):
    """Put everything on disk now (answer: SnapshotSaved)."""


class StopTrainer(Message, frozen=True, kw_only=True, tag="stop"):
    """Stop before the next micro-batch, save a snapshot, end (answers: Stopping, SnapshotSaved)."""


TrainerCommand = Rebase | Contribute | SaveSnapshot | StopTrainer


class TrainerStarted(Message, frozen=True, kw_only=True, tag="started"):
    """The process is up; nothing is trained before the first Rebase."""

    device: str
    """As torch names it, e.g. `cuda:0`."""
    device_name: str
    inner_step: int
    tokens_total: int
    """Tokens ever trained by this volunteer in this run, as the snapshot has it."""
    last_contribution: Encoded | None
    """What the snapshot was last encoded as: announced again if its record was never written."""


class Preparing(Message, frozen=True, kw_only=True, tag="preparing"):
    """Tokens are being made of the run's data, before `TrainerStarted`; told every few seconds."""


class Rebased(Message, frozen=True, kw_only=True, tag="rebased"):
    """The trainer stands on `commit_id` and carries `carried`."""

    commit_id: str
    carried: tuple[str, ...]
    discarded_tokens: int
    """Tokens whose work was given up because the snapshot was older than what was sent."""


class Stepped(Message, frozen=True, kw_only=True, tag="stepped"):
    """Progress, at most about twice a second."""

    inner_step: int
    tokens_total: int
    tokens_since_contribution: int
    tokens_per_s: float
    loss: float
    """Mean training loss since the last message, nats per token."""
    lr: float


class Encoded(Message, frozen=True, kw_only=True, tag="encoded"):
    """Blob and snapshot are on disk; the record may be signed."""

    base: str
    round_index: int
    blob_id: str
    blob_bytes: int
    codec: str
    codec_version: int
    tokens: int
    carries: tuple[str, ...]


class NothingToContribute(Message, frozen=True, kw_only=True, tag="nothing_to_contribute"):
    """No inner step was taken since the last contribution."""

    base: str


class SnapshotSaved(Message, frozen=True, kw_only=True, tag="snapshot_saved"):
    """What a kill cannot take any more."""

    inner_step: int
    tokens_total: int
    tokens_since_contribution: int


class Stopping(Message, frozen=True, kw_only=True, tag="stopping"):
    """No further inner step is taken."""

    inner_step: int
    tokens_total: int


class TrainerFailed(Message, frozen=True, kw_only=True, tag="failed"):
    """The trainer cannot go on, and ends."""

    error: str
    """Name of the error class in volunteer.errors."""
    message: str
    hint: str


AGENT_STOOD_STILL_STATUS = 75
"""The trainer's exit status where it has saved and ended because the agent was stopped by a signal
or a debugger; EX_TEMPFAIL of sysexits.h."""

TrainerEvent = (
    Preparing
    | TrainerStarted
    | Rebased
    | MicroBatchChosen
    | Stepped
    | Encoded
    | NothingToContribute
    | SnapshotSaved
    | Stopping
    | TrainerFailed
)

# ------------------------------------------------------------------------------------ sampler


class Generate(Message, frozen=True, kw_only=True, tag="generate"):
    """Write text with the shared weights (answer: Generated, or SamplerFailed)."""

    prompt: Annotated[str, msgspec.Meta(max_length=MAX_PROMPT_CHARS)] = ""
    """What the text goes on from; the model sees as much of its end as its context holds."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLE_TOKENS)] = 200
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_TEMPERATURE)] = DEFAULT_TEMPERATURE
    """What logits are divided by: 0 takes the likeliest token each time."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEED)] = 0


class Generated(Message, frozen=True, kw_only=True, tag="generated"):
    """What the model wrote, without the prompt; bytes that are not UTF-8 are replaced."""

    text: str
    num_tokens: int


class SamplerFailed(Message, frozen=True, kw_only=True, tag="failed"):
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
