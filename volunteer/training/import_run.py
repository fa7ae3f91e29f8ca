"""Makes a run that begins from a model of Hugging Face's form: its RunSpec and its first state.

    python -m volunteer.training.import_run --from DIR --imports DIR --spec FILE --name NAME
        [--like FILE] [--bytes]

Runs in: a process of its own, for `allmende import`; what it made is one line of JSON on stdout.
The state and the tokenizer go into the imports folder by their hashes, so the RunSpec may be edited
afterwards; the RunSpec comes last, and only where there is none. A kill leaves nothing that a
second import does not take up.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import torch

from p2p.blobstore import BlobStore
from p2p.errors import P2PError
from volunteer.answers import Imported
from volunteer.data.builtin import DEFAULT_RUN, load_builtin_run
from volunteer.errors import CheckpointCorruptError, RunSpecError, VolunteerError
from volunteer.files import make_private_dir, replace_file, telling_full_disk
from volunteer.run import (
    DataSpec,
    GenesisSpec,
    HardwareSpec,
    RunSpec,
    format_run_spec,
    parse_run_spec,
    read_run_spec,
)
from volunteer.tokenizer_json import MAX_TOKENIZER_BYTES, num_tokens_of
from volunteer.training.export import byte_tokenizer
from volunteer.training.genesis import write_given_genesis
from volunteer.training.import_weights import ImportedModel, read_huggingface
from volunteer.training.tokenizer import verify_tokenizer_json
from volunteer.training.verb_failure import tell_failure

_BYTES: Final = "bytes"
_SPEC_MODE: Final = 0o644
_STATE_BYTES: Final = 8
"""Per parameter: fp32 weights and momentum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What is asked for beside the model."""

    name: str
    like: Path | None
    """A RunSpec that everything but model, tokenizer and first weights is taken from; None: that of
    `commons`."""
    has_bytes: bool
    """Whether a model without a tokenizer.json is one of bytes."""


def import_run(folder: Path, imports_dir: Path, spec_file: Path, wishes: Wishes) -> Imported:
    """Read a model, keep its weights as a state, and write a RunSpec that begins from them.

    Args:
        folder: as `save_pretrained` or `allmende export` writes it; hostile.
        imports_dir: made if need be.
        spec_file: must not be there, unless it is the very same.
        wishes: the rest of the RunSpec.

    Raises:
        VolunteerError: the folder holds no model that a run can have; the file is there already.
        OSError: it cannot be read or written.

    Cost: 8 P bytes of disk, 4 P bytes of memory.
    """
    template = load_builtin_run(DEFAULT_RUN) if wishes.like is None else read_run_spec(wishes.like)
    try:
        found = read_huggingface(folder)
    except CheckpointCorruptError as error:
        hint = "save or fetch the model again, all its files"
        raise CheckpointCorruptError(f"{folder}: {error}", hint=hint) from error
    tokenizer = _read_tokenizer(found, folder, has_bytes=wishes.has_bytes)
    make_private_dir(imports_dir)
    imports = BlobStore(imports_dir)
    with telling_full_disk(imports_dir):
        state_hash = write_given_genesis(found.weights_P, imports)
        tokenizer_id = _BYTES if tokenizer is None else f"json:{imports.add_bytes(tokenizer)}"
    spec = _spec_of(template, found, state_hash, tokenizer_id, wishes.name)
    _write_once(spec_file, spec)
    return Imported(
        spec_file=str(spec_file),
        run_id=spec.run_id,
        run_name=spec.name,
        state_hash=state_hash,
        num_parameters=len(found.weights_P),
        tokenizer=tokenizer_id,
    )


def _read_tokenizer(found: ImportedModel, folder: Path, *, has_bytes: bool) -> bytes | None:
    """Return the model's tokenizer.json; None where tokens are bytes.

    Raises:
        VolunteerError: there is none, or none that goes with the model.
    """
    vocab_size = found.model.vocab_size
    if found.tokenizer_file is None or has_bytes:
        if has_bytes and vocab_size == 256:
            return None
        if has_bytes:
            raise VolunteerError(
                f"the vocabulary of {folder} is {vocab_size}, and there are 256 bytes",
                hint="leave `--bytes` away: its tokens are those of a tokenizer.json",
            )
        raise VolunteerError(
            f"{folder} has no tokenizer.json",
            hint="save the model's tokenizer there (`AutoTokenizer.from_pretrained(...)"
            f".save_pretrained({str(folder)!r})`); where its tokens are bytes, give `--bytes`",
        )
    if found.tokenizer_file.stat().st_size > MAX_TOKENIZER_BYTES:
        raise VolunteerError(f"{found.tokenizer_file} is larger than {MAX_TOKENIZER_BYTES} bytes")
    content = found.tokenizer_file.read_bytes()
    verify_tokenizer_json(content)
    if _is_byte_tokenizer(content) and vocab_size == 256:
        return None
    num_tokens = num_tokens_of(content)
    if not 0 < num_tokens <= vocab_size:
        raise VolunteerError(
            f"the tokenizer of {folder} has {num_tokens} tokens, and the model's vocabulary"
            f" (`vocab_size` in config.json) is {vocab_size}",
            hint="put the tokenizer.json that the model was trained with beside it, or enlarge the"
            f" model first (transformers: `model.resize_token_embeddings({num_tokens})`)",
        )
    return content


def _is_byte_tokenizer(content: bytes) -> bool:
    """Tell whether it is what `allmende export` writes where tokens are bytes."""
    own = byte_tokenizer()
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):  # numbers of thousands of digits, in what is not looked at
        return False
    return all(found.get(part) == own[part] for part in ("model", "normalizer", "pre_tokenizer"))


def _spec_of(
    template: RunSpec, found: ImportedModel, state_hash: str, tokenizer_id: str, name: str
) -> RunSpec:
    """Return the RunSpec, through the same checks as a file.

    Raises:
        RunSpecError: the template's keys and the model's cannot go together.
    """
    num = len(found.weights_P)
    data: DataSpec = msgspec.structs.replace(template.data, tokenizer=tokenizer_id)
    spec = msgspec.structs.replace(
        template,
        name=name,
        description="Begins from weights that were imported.",
        licence="",
        publisher="",
        signature="",
        model=found.model,
        genesis=GenesisSpec(source="weights", seed=0, state_hash=state_hash),
        data=data,
        hardware=HardwareSpec(
            # Base, error feedback, two states and the libraries; states, snapshots and logs.
            ram_bytes=4 * _STATE_BYTES * num + 2**30,
            disk_bytes=12 * _STATE_BYTES * num + 2**28,
        ),
    )
    return parse_run_spec(format_run_spec(spec), source="the run to be made")


def _write_once(file: Path, spec: RunSpec) -> None:
    """Write the RunSpec where there is none.

    Raises:
        RunSpecError: there is another one.
    """
    text = format_run_spec(spec).encode()
    if not file.as_posix().isprintable():
        raise RunSpecError(f"{file}: no name for a RunSpec", hint="name another one with `--spec`")
    if file.exists():
        if file.is_file() and file.read_bytes() == text:
            return
        raise RunSpecError(
            f"{file} is there already, and is another run's", hint="name another one with `--spec`"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, text, mode=_SPEC_MODE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Import; return the exit status."""
    parser = argparse.ArgumentParser(prog="import", description=__doc__)
    parser.add_argument("--from", dest="folder", type=Path, required=True)
    parser.add_argument("--imports", type=Path, required=True)
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--like", type=Path)
    parser.add_argument("--bytes", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # at normal priority: the owner waits for it
    wishes = Wishes(name=options.name, like=options.like, has_bytes=options.bytes)
    try:
        made = import_run(options.folder, options.imports, options.spec, wishes)
    except (VolunteerError, P2PError, OSError) as error:
        return tell_failure(error, options.folder)
    sys.stdout.write(msgspec.json.encode(made).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
