"""How many tokens a `tokenizer.json` of Hugging Face's has, from its JSON alone.

Runs in: agent, import. The trainer asks the library `tokenizers`, which is an extra and may not be
there; whether a run's model has room for its tokens can be said before anything is started.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from volunteer.errors import RunSpecError
from volunteer.run import RunSpec

MAX_TOKENIZER_BYTES = 32 * 1024 * 1024


class _Added(msgspec.Struct):
    id: int = -1


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] | None = None
    """Tokens and their numbers, or, of the kind Unigram, a list of tokens."""


class _File(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] | None = None


def num_tokens_of(content: bytes) -> int:
    """Return one more than the highest token's number; 0 if `content` does not say.

    Args:
        content: a tokenizer.json; hostile.
    """
    try:
        file = msgspec.json.decode(content, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 0
    vocabulary = file.model.vocab
    if isinstance(vocabulary, dict):
        highest = max(vocabulary.values(), default=-1)
    else:
        highest = len(vocabulary or ()) - 1
    return 1 + max([highest, *(added.id for added in file.added_tokens or ())])


def verify_vocabulary(spec: RunSpec, file: Path) -> None:
    """Check that the run's model has room for the tokens of its tokenizer.

    Args:
        spec: the run.
        file: the tokenizer.json that it names; what the trainer alone can judge passes.

    Raises:
        RunSpecError: it has not.
    """
    with file.open("rb") as stream:
        num_tokens = num_tokens_of(stream.read(MAX_TOKENIZER_BYTES))
    if num_tokens > spec.model.vocab_size:
        raise RunSpecError(
            f"run {spec.name}: its tokenizer has {num_tokens} tokens, and model.vocab_size is"
            f" {spec.model.vocab_size}",
            hint=f"in a run of your own write `vocab_size = {num_tokens}` into [model], and its new"
            " genesis hash; else ask the run's publisher for a valid file",
        )
