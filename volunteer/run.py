"""The RunSpec: what a run is. Declarative, hashed to `run_id`, never code.

Runs in: every process. Pure, but for `read_run_spec`.

A RunSpec is TOML on disk and canonical JSON where it is hashed and signed. It differs from the
local `Config`: a RunSpec is the same on every member, a Config is one owner's wishes.
"""

from __future__ import annotations

import bisect
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from blake3 import blake3

from volunteer.codec_problems import codec_problems
from volunteer.data.sources import source_problems
from volunteer.errors import RunSpecError
from volunteer.rounds.records import Hash, Name
from volunteer.spec_problems import convert_tables

MAX_SPEC_BYTES = 64 * 1024
_HASH_CONTEXT = b"allmende/run/1\x00"
KNOWN_CODECS = (("int4", 1), ("int8", 1), ("fp16", 1), ("fp32", 1), ("topk2", 1))
"""Id and version."""
LATER_KEYS: dict[str, frozenset[str]] = {
    "model": frozenset({"num_kv_heads", "tied_embeddings"}),
    "genesis": frozenset({"source"}),
    "data": frozenset(),
    "inner": frozenset({"optimizer", "muon_momentum"}),
    "outer": frozenset({"momentum_warmup_rounds", "warmup_momentum", "aggregation"}),
    "codec": frozenset({"ladder_kept", "ladder_rounds"}),
    "evaluation": frozenset({"max_s"}),
}
"""By table, keys that specs of format 1 did not have at first; each has a default."""

Aggregation = Literal["mean", "trimmed_mean"]
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
_Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
_BelowOne = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]
_Positive = Annotated[float, msgspec.Meta(gt=0.0, le=1e9)]
_Kept = Annotated[int, msgspec.Meta(ge=8, le=4096, multiple_of=8)]
_Round = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One TOML table; an unknown key is an error, so that a typing mistake cannot hide."""


class ModelSpec(_Table, frozen=True, kw_only=True):
    """A decoder of Llama's shape: RMSNorm, RoPE, SwiGLU, causal attention, no biases."""

    num_layers: Annotated[int, msgspec.Meta(ge=1, le=256)]
    dim: Annotated[int, msgspec.Meta(ge=8, le=65536)]
    """Width of the residual stream; a multiple of 2 * num_heads (RoPE rotates pairs)."""
    num_heads: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    ffn_dim: Annotated[int, msgspec.Meta(ge=8, le=2**20)]
    """Hidden width of SwiGLU."""
    context_tokens: Annotated[int, msgspec.Meta(ge=8, le=2**20)]
    vocab_size: Annotated[int, msgspec.Meta(ge=2, le=2**20)] = 256
    rope_base: _Positive = 10000.0
    num_kv_heads: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    """Heads of keys and values, of which groups of query heads share one; 0: as many as those."""
    tied_embeddings: bool = True
    """Whether the embedding is the output projection too; else that is a matrix of its own."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_kv_heads or self.num_heads


class GenesisSpec(_Table, frozen=True, kw_only=True):
    """What the weights of round 0 are."""

    source: Literal["seed", "weights"] = "seed"
    """`seed`: an integer stream, which every machine makes alike. `weights`: those of a state that
    exists (`allmende import`), fetched by its hash; its momentum is 0, and so is `seed`."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    state_hash: Hash
    """Hash of the genesis state; verified before anything is trained."""

    @property
    def is_given(self) -> bool:
        """Whether it cannot be computed, and has to come from who has it."""
        return self.source == "weights"


class DataSpec(_Table, frozen=True, kw_only=True):
    """What is trained on."""

    sources: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=64)]
    """`builtin:NAME`, `file:GLOB`, `hf:OWNER/NAME[@CONFIG][:SPLIT]` or `private:`
    (data/sources.py)."""
    held_out_fraction: Annotated[float, msgspec.Meta(gt=0.0, lt=0.5)] = 0.05
    """The last part of each text, or so many of its documents, is for evaluation and is never
    trained on."""
    tokenizer: Annotated[
        str,
        msgspec.Meta(
            pattern=r"^(bytes|json:[0-9a-f]{64})\Z",
            description="bytes, or json: and 64 hex digits in lower case",
        ),
    ] = "bytes"
    """`bytes`, or the blake3 hash of a `tokenizer.json` of Hugging Face's `tokenizers`."""

    @property
    def tokenizer_hash(self) -> str:
        """Return the hash of the tokenizer's file, its blob id; empty where tokens are bytes."""
        return self.tokenizer.partition(":")[2]


class InnerSpec(_Table, frozen=True, kw_only=True):
    """The inner optimizer: linear warm-up, cosine over rounds to a floor."""

    lr: _Positive
    beta1: _BelowOne = 0.9
    beta2: _BelowOne = 0.95
    weight_decay: Annotated[float, msgspec.Meta(ge=0.0, le=10.0)] = 0.1
    clip_norm: _Positive = 1.0
    warmup_steps: Annotated[int, msgspec.Meta(ge=0, le=10**6)] = 20
    """Local inner steps, after each start from nothing."""
    decay_rounds: _Count
    """Rounds after which the learning rate has reached its floor: shared, so by round."""
    floor_fraction: _Fraction = 0.1
    batch_sequences: _Count
    """Sequences of an inner step; split into micro-batches as the device needs."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` makes the updates of hidden matrices orthogonal; what else there is takes AdamW. A
    learning rate that suits the one suits the other."""
    muon_momentum: _BelowOne = 0.95


class OuterSpec(_Table, frozen=True, kw_only=True):
    """The outer optimizer: Nesterov on pseudo-gradients (arXiv:2311.08105, Alg. 1), or SGD."""

    lr: _Positive = 0.7
    momentum: _BelowOne = 0.5
    """0: plain SGD, which is all that a sparse codec goes with."""
    momentum_warmup_rounds: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0
    """Rounds from the genesis on that have `warmup_momentum` instead."""
    warmup_momentum: _BelowOne = 0.0
    """A high momentum pays in long runs alone; in the first rounds it overshoots."""
    aggregation: Aggregation = "mean"
    """`mean`, weighted by tokens; or `trimmed_mean`, the same without the lowest and the highest
    quarter of the values of each element, so that few large ones lead nothing astray. Not with
    `topk2`, of which most values are zeros that nobody sent."""

    def at_round(self, round_index: int) -> OuterSpec:
        """Return what the step of one round is taken with, without a warm-up of its own."""
        is_warming_up = round_index < self.momentum_warmup_rounds
        momentum = self.warmup_momentum if is_warming_up else self.momentum
        return msgspec.structs.replace(
            self, momentum=momentum, momentum_warmup_rounds=0, warmup_momentum=0.0
        )


class CodecSpec(_Table, frozen=True, kw_only=True):
    """How a pseudo-gradient is compressed."""

    id: Name = "int4"
    """`int4`; `int8` (twice the bytes); the floats themselves, `fp16` (4 times) and `fp32` (8);
    or `topk2`, the largest elements alone: at the end of its ladder a 24th of int4's bytes."""
    version: _Count = 1
    block_elements: Annotated[int, msgspec.Meta(ge=16, le=65536)] = 4096
    """Parameters that share a scale; with the floats, that are measured together. With `topk2`, of
    which the largest are kept: a power of two, at most 4096."""
    error_feedback_beta: _Fraction = 1.0
    """How much of what a contribution could not express goes into the next one. With `topk2`, 0.95:
    what waits for long is out of date."""
    ladder_kept: Annotated[tuple[_Kept, ...], msgspec.Meta(min_length=1, max_length=16)] = (
        1024,
        256,
        64,
    )
    """With `topk2`: elements of a block that are kept, stage by stage; multiples of 8. Of 4096:
    25 %, 6.25 %, 1.56 %."""
    ladder_rounds: Annotated[tuple[_Round, ...], msgspec.Meta(min_length=1, max_length=16)] = (
        0,
        100,
        200,
    )
    """With `topk2`: the round with which each stage begins; the first with 0. While weights move
    fast, little of them can wait."""

    def num_kept(self, round_index: int) -> int:
        """Return how many elements of a block a sparse contribution to this round keeps."""
        return self.ladder_kept[bisect.bisect_right(self.ladder_rounds, round_index) - 1]

    @property
    def bytes_per_parameter(self) -> float:
        """Size of a contribution's blob for each parameter, without its header; the largest."""
        if self.id in ("int4", "int8"):
            return {"int4": 0.5, "int8": 1.0}[self.id] + 4 / self.block_elements
        if self.id == "topk2":
            return max(_topk2_bytes(kept, self.block_elements) for kept in self.ladder_kept)
        return {"fp16": 2.0, "fp32": 4.0}[self.id]


def index_bits(kept: int, block: int) -> tuple[int, int]:
    """Return how `topk2` writes down which `kept` elements of a block are kept.

    Returns:
        The low bits of an index that are stored as they are (0: a bitmap is as short), and the bits
        that a block has for the rest.
    """
    if 4 * kept >= block:
        return 0, block
    offset_bits = (block // kept).bit_length() - 1
    return offset_bits, kept + (block >> offset_bits)


def _topk2_bytes(kept: int, block: int) -> float:
    """Return the bytes for each parameter: a scale, a level, indices, and two bits a value."""
    offset_bits, place_bits = index_bits(kept, block)
    return (5 + (place_bits + (offset_bits + 2) * kept) / 8) / block


class RoundSpec(_Table, frozen=True, kw_only=True):
    """Timing and limits of the round protocol (ROUNDS.md, Parameters)."""

    round_s: Annotated[float, msgspec.Meta(ge=1.0, le=86400.0)] = 600.0
    target_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**50)] = 0
    """A member closes early once it has trained this many; 0: never."""
    min_grace_s: Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)] = 2.0
    """Floor of grace and failover; both grow with the measured exchange time."""
    expiry_rounds: Annotated[int, msgspec.Meta(ge=2, le=1024)] = 8
    demote_rounds: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 8
    journal_rounds: Annotated[int, msgspec.Meta(ge=2, le=64)] = 8
    max_contributions: Annotated[int, msgspec.Meta(ge=1, le=256)] = 32
    quorum: Literal["1/2", "2/3"] = "1/2"
    """More than this fraction of both rosters: 1/2 for crash faults, 2/3 where strangers matter."""


class EvaluationSpec(_Table, frozen=True, kw_only=True):
    """How the held-out loss of a shared state is measured."""

    num_sequences: _Count = 64
    """Held-out windows of `context_tokens`, spread evenly over every text; the same every time."""
    max_s: Annotated[float, msgspec.Meta(ge=0.1, le=3600.0)] = 30.0
    """Seconds after which a slow machine is content with the windows that it has measured."""


class HardwareSpec(_Table, frozen=True, kw_only=True):
    """The least that a member needs."""

    ram_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**50)] = 0
    disk_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**50)] = 0


class RunSpec(_Table, frozen=True, kw_only=True):
    """One training effort."""

    format: Literal[1] = 1
    name: Name
    description: Annotated[str, msgspec.Meta(max_length=2000)] = ""
    licence: Annotated[str, msgspec.Meta(max_length=200)] = ""
    contact: Annotated[str, msgspec.Meta(max_length=200)] = ""
    publisher: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """Peer id of the publisher: the genesis roster, whose signature the spec must carry. Empty for
    an open run, whose first commit makes its roster; it comes with the package or is one's own."""
    signature: Annotated[
        str,
        msgspec.Meta(
            pattern=r"^([0-9a-f]{128})?\Z", description="128 hex digits in lower case, or empty"
        ),
    ] = ""
    """The publisher's Ed25519 signature of `signed_bytes`, in hex; not part of `run_id`."""
    model: ModelSpec
    genesis: GenesisSpec
    data: DataSpec
    inner: InnerSpec
    outer: OuterSpec = msgspec.field(default_factory=OuterSpec)
    codec: CodecSpec = msgspec.field(default_factory=CodecSpec)
    rounds: RoundSpec = msgspec.field(default_factory=RoundSpec)
    evaluation: EvaluationSpec = msgspec.field(default_factory=EvaluationSpec)
    hardware: HardwareSpec = msgspec.field(default_factory=HardwareSpec)

    @property
    def run_id(self) -> str:
        """Lower-case hex of blake3 over what the publisher signs."""
        return blake3(signed_bytes(self)).hexdigest()


def signed_bytes(spec: RunSpec) -> bytes:
    """Return the canonical bytes of `spec`: sorted JSON without the signature, in a context.

    A key that came later (`LATER_KEYS`) is left out where it has its default, so that a run keeps
    its id when specs learn to say more.
    """
    plain = _plain(msgspec.structs.replace(spec, signature=""))
    return _HASH_CONTEXT + msgspec.json.encode(plain, order="sorted")


def _plain(spec: RunSpec) -> dict[str, Any]:
    """Return `spec` as tables of plain values, without later keys that have their defaults."""
    plain: dict[str, Any] = msgspec.to_builtins(spec)
    for name, keys in LATER_KEYS.items():
        table = getattr(spec, name)
        for field in msgspec.structs.fields(table):
            if field.name in keys and getattr(table, field.name) == field.default:
                del plain[name][field.name]
    return plain


def parse_run_spec(text: str, *, source: str) -> RunSpec:
    """Parse TOML.

    Args:
        text: the file's content.
        source: where it came from, for the error message.

    Raises:
        RunSpecError: malformed, unknown or missing keys, or values that cannot go together.
    """
    if len(text.encode()) > MAX_SPEC_BYTES:
        raise RunSpecError(f"{source}: larger than {MAX_SPEC_BYTES} bytes")
    try:
        spec = convert_tables(tomllib.loads(text), RunSpec, text)
    except RecursionError as error:
        raise RunSpecError(f"{source}: its values are nested too deeply") from error
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise RunSpecError(f"{source}: {error}") from error
    except ValueError as error:
        raise RunSpecError(f"{source}: a number in it has thousands of digits") from error
    verify_run_spec(spec, source=source)
    return spec


def verify_run_spec(spec: RunSpec, *, source: str) -> None:
    """Check what no single field shows.

    Raises:
        RunSpecError: naming every problem.
    """
    problems = []
    if spec.model.dim % (2 * spec.model.num_heads):
        problems.append("model.dim must be a multiple of 2 * model.num_heads")
    if spec.model.num_heads % spec.model.kv_heads:
        problems.append("model.num_kv_heads must divide model.num_heads")
    if spec.model.vocab_size != 256 and spec.data.tokenizer == "bytes":
        problems.append("model.vocab_size must be 256 for the bytes tokenizer")
    if spec.genesis.is_given and spec.genesis.seed:
        problems.append("genesis.seed must be 0 where genesis.source is weights")
    problems += source_problems(spec.data.sources)
    if (spec.codec.id, spec.codec.version) not in KNOWN_CODECS:
        known = ", ".join(f"{codec} {version}" for codec, version in KNOWN_CODECS)
        problems.append(f"codec {spec.codec.id} {spec.codec.version} is unknown; known: {known}")
    problems += codec_problems(spec.codec, spec.outer)
    if problems:
        raise RunSpecError(f"{source}: " + "; ".join(problems))


def read_run_spec(file: Path) -> RunSpec:
    """Read and parse a RunSpec file.

    Raises:
        RunSpecError: unreadable or not valid.
    """
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_SPEC_BYTES + 1).decode("utf-8")
    except OSError as error:
        raise RunSpecError(
            f"{file}: {error.strerror or error}", hint="give the path of a RunSpec that can be read"
        ) from error
    except UnicodeDecodeError as error:
        raise RunSpecError(f"{file}: {error}") from error
    return parse_run_spec(text, source=str(file))


def format_run_spec(spec: RunSpec) -> str:
    """Return `spec` as TOML that `parse_run_spec` reads back to an equal value.

    Later keys that have their defaults are left out: an older program reads the rest.
    """
    tables = _plain(spec)
    lines = [f"{key} = {_toml(one)}" for key, one in tables.items() if not isinstance(one, dict)]
    for key, table in tables.items():
        if isinstance(table, dict):
            lines += ["", f"[{key}]"]
            lines += [f"{name} = {_toml(value)}" for name, value in table.items()]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    # JSON's strings, numbers and arrays are TOML's as well, except for floats without a point.
    if isinstance(value, float):
        text = repr(value)
        return text if any(c in text for c in ".einf") else text + ".0"
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
