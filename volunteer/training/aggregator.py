"""The aggregator process: validates blobs, applies commits, measures the shared weights.

Runs in: aggregator (`python -m volunteer.training.aggregator`). Stages 4 and 5 of a round.

One request at a time, in order, on the CPU at the lowest priority, while the trainer keeps the
device. It alone writes shared states. Nothing that an earlier run of it found valid is believed:
what a commit lists is verified against its hash, and parsed, by this very process (seen_files.py).

DIR/spec.toml is the RunSpec; DIR/modules/MODULE/blobs holds contributions' blobs and states.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
import psutil
import torch

from p2p.blobstore import BlobStore
from p2p.errors import BlobStoreFullError, P2PError
from volunteer.errors import (
    ContributionRejectedError,
    StorageFullError,
    VolunteerError,
)
from volunteer.logs import set_up_log
from volunteer.messages import (
    MAX_LINE_BYTES,
    AggregatorCommand,
    AggregatorEvent,
    AggregatorFailed,
    AggregatorStarted,
    ApplyCommit,
    BlobValidated,
    BuildGenesis,
    ContributionsScored,
    EvaluateState,
    ListedWork,
    Score,
    ScoreContributions,
    StateBuilt,
    StateEvaluated,
    StateVerified,
    ValidateBlob,
    VerifyState,
    aggregator_command_decoder,
    parse_line,
)
from volunteer.rounds.records import DENSE_MODULE
from volunteer.run import RunSpec, read_run_spec
from volunteer.training.aggregation import judge, next_state_slices
from volunteer.training.child_process import (
    EventWriter,
    claim_stdout,
    end_with_parent,
    keep_freed_memory,
    read_lines,
    yield_to_all_sessions,
)
from volunteer.training.compression import EncodedGradient
from volunteer.training.content_hash import content_hash_of
from volunteer.training.contribution_blob import (
    BlobKey,
    read_contribution_blob,
)
from volunteer.training.genesis import make_genesis, verify_given_genesis
from volunteer.training.layout import num_parameters
from volunteer.training.seen_files import MAX_SEEN, SeenFiles
from volunteer.training.similarity import norm
from volunteer.training.state import SharedState, read_state, write_state_slices

_log = logging.getLogger(__name__)
NO_REQUEST = -1
"""`request_id` of the answer to a line that has none."""
_NICENESS = 19


class Aggregator:
    """Answers commands about one module of one run, from files to files."""

    def __init__(
        self,
        spec: RunSpec,
        module_id: str,
        store: BlobStore,
        *,
        run_dir: Path | None = None,
        is_awaited: Callable[[], bool] = lambda: False,
    ) -> None:
        """Keep what every answer depends on.

        Args:
            spec: the run.
            module_id: of the module.
            store: contributions' blobs and states.
            run_dir: where its held-out text is, unless the package has it.
            is_awaited: tells whether another request waits, for which an evaluation is cut short.
        """
        self._run_dir = run_dir
        self._is_awaited = is_awaited
        self._spec = spec
        self._module_id = module_id
        self._store = store
        self._num_parameters = num_parameters(spec.model)
        self._seen = SeenFiles(store)
        self._built_on: dict[str, str] = {}
        """The newest state, and what it was built on: settled once the newest has a child."""
        self._norms: dict[str, float] = {}
        """Of contributions that were validated: they are due when a commit lists them."""

    def answer(self, command: AggregatorCommand) -> AggregatorEvent:
        """Carry out one command.

        Raises:
            VolunteerError: the request cannot be answered.
            P2PError: a blob is missing or damaged, or the disk is full.
        """
        match command:
            case BuildGenesis():
                return self._build_genesis(command)
            case ValidateBlob():
                return self._validate_blob(command)
            case ApplyCommit():
                return self._apply_commit(command)
            case EvaluateState():
                return self._evaluate_state(command)
            case ScoreContributions():
                return self._score(command)
            case VerifyState():
                self._read_state(command.state_hash)
                return StateVerified(request_id=command.request_id, state_hash=command.state_hash)

    def _build_genesis(self, command: BuildGenesis) -> StateBuilt:
        state_hash = self._spec.genesis.state_hash
        if self._spec.genesis.is_given:
            self._read_state(state_hash)
        else:
            make_genesis(self._spec, self._store)
        return StateBuilt(request_id=command.request_id, state_hash=state_hash, outcomes=())

    def _validate_blob(self, command: ValidateBlob) -> BlobValidated:
        self._seen.verify(command.blob_id)
        reason = ""
        try:
            self._verify_codec(command.codec, command.codec_version)
            blob = self._read_blob(command.blob_id, command.author, command.round_index)
            self._verify_content(command.blob_id, command.content_hash)
            self._measure(command.blob_id, blob)
        except ContributionRejectedError as error:
            reason = str(error)
        return BlobValidated(request_id=command.request_id, blob_id=command.blob_id, reason=reason)

    def _apply_commit(self, command: ApplyCommit) -> StateBuilt:
        parent = self._read_state(command.parent_state)
        blobs = [self._read_listed(work) for work in command.listed]
        works = zip(command.listed, blobs, strict=True)
        norms_by_id = {work.blob_id: self._measure(work.blob_id, blob) for work, blob in works}
        outcomes = judge(blobs, command.listed, norms_by_id)
        state_hash = write_state_slices(
            next_state_slices(
                parent, blobs, outcomes, self._spec.outer.at_round(command.round_index)
            ),
            self._num_parameters,
            self._store,
            instead_of=self._settled_file(command.parent_state),
        )
        self._built_on = {state_hash: command.parent_state}
        self._seen.note_made(state_hash)
        self._seen.note_checked(state_hash, SharedState)
        return StateBuilt(request_id=command.request_id, state_hash=state_hash, outcomes=outcomes)

    def _settled_file(self, parent_state: str) -> Path | None:
        """Return the state that `parent_state` was built on: it is read again only on a switch."""
        settled = self._built_on.get(parent_state)
        return self._store.file_of(settled) if settled else None

    def _measure(self, blob_id: str, blob: EncodedGradient) -> float:
        """Return the norm of a blob, and remember it: a function of what the id stands for."""
        known = self._norms.get(blob_id)
        if known is None:
            while len(self._norms) >= MAX_SEEN:
                del self._norms[next(iter(self._norms))]
            known = self._norms[blob_id] = norm(blob)
        return known

    def _evaluate_state(self, command: EvaluateState) -> StateEvaluated:
        # Model and corpus are needed for this alone: without it, the process stays small.
        from volunteer.training.evaluation import evaluate_run

        state = self._read_state(command.state_hash)
        found = evaluate_run(
            self._spec,
            state.weights_P,
            self._run_dir,
            should_stop=self._until(self._spec.evaluation.max_s),
        )
        return StateEvaluated(
            request_id=command.request_id,
            state_hash=command.state_hash,
            held_out_loss=found.nats_per_byte,
            loss_stderr=found.stderr,
            num_windows=found.num_windows,
            bytes_per_token=found.bytes_per_token,
        )

    def _score(self, command: ScoreContributions) -> ContributionsScored:
        from volunteer.training.scoring import score_run

        parent = self._read_state(command.parent_state)
        blobs = [self._read_listed(work) for work in command.works]
        found = score_run(
            self._spec,
            parent.weights_P,
            list(zip(blobs, command.clip_scales, strict=True)),
            command.commit_id,
            self._run_dir,
            should_stop=self._until(self._spec.evaluation.max_s),
        )
        scores = tuple(
            Score(contribution_id=work.contribution_id, **dataclasses.asdict(one))
            for work, one in zip(command.works, found, strict=False)
        )
        return ContributionsScored(request_id=command.request_id, scores=scores)

    def _until(self, max_s: float) -> Callable[[], bool]:
        """Return what tells whether the time is over, or something else is asked for."""
        ends_at_s = time.monotonic() + max_s
        return lambda: self._is_awaited() or time.monotonic() >= ends_at_s

    def _verify_codec(self, codec: str, codec_version: int) -> None:
        due = self._spec.codec
        if (codec, codec_version) != (due.id, due.version):
            raise ContributionRejectedError(
                f"the codec is {codec} {codec_version}, this run has {due.id} {due.version}"
            )

    def _verify_content(self, blob_id: str, content_hash: str) -> None:
        if not content_hash:
            raise ContributionRejectedError("its record does not say what the blob's content is")
        if content_hash_of(self._store.file_of(blob_id)) != content_hash:
            raise ContributionRejectedError("the blob has another content than its record says")

    def _read_state(self, state_hash: str) -> SharedState:
        self._seen.verify(state_hash)
        state = read_state(
            self._store.file_of(state_hash),
            self._num_parameters,
            is_known_finite=self._seen.is_checked(state_hash, SharedState),
        )
        if self._spec.genesis.is_given and state_hash == self._spec.genesis.state_hash:
            verify_given_genesis(state)
        self._seen.note_checked(state_hash, SharedState)
        return state

    def _read_blob(self, blob_id: str, author: str, round_index: int) -> EncodedGradient:
        key = BlobKey(
            run_id=self._spec.run_id,
            module_id=self._module_id,
            author=author,
            round_index=round_index,
            codec=self._spec.codec,
            num_elements=self._num_parameters,
        )
        blob = read_contribution_blob(
            self._store.file_of(blob_id), key, is_known=self._seen.is_checked(blob_id, key)
        )
        self._seen.note_checked(blob_id, key)
        return blob

    def _read_listed(self, work: ListedWork) -> EncodedGradient:
        """Read a listed blob, checked again against its record."""
        self._seen.verify(work.blob_id)
        try:
            return self._read_blob(work.blob_id, work.author, work.round_index)
        except ContributionRejectedError as error:
            raise ContributionRejectedError(f"{work.blob_id}: {error}") from error


def answer_line(aggregator: Aggregator, line: bytes) -> AggregatorEvent:
    """Answer one line of stdin, whatever it holds and whatever comes of it."""
    request_id = NO_REQUEST
    try:
        request_id = _request_id_of(line)
        return aggregator.answer(parse_line(line, aggregator_command_decoder))
    except BlobStoreFullError as error:
        return _failed(request_id, StorageFullError(str(error)))
    except (VolunteerError, P2PError) as error:
        return _failed(request_id, error)
    except Exception as error:  # noqa: BLE001 - process boundary: one request fails, not all
        _log.exception("request failed request_id=%d", request_id)
        return _failed(request_id, error)


class _Numbered(msgspec.Struct):
    request_id: int


def _request_id_of(line: bytes) -> int:
    """Return the request's number even where the rest of the line is of no use."""
    try:
        return msgspec.json.decode(line, type=_Numbered).request_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return NO_REQUEST


def _failed(request_id: int, error: Exception) -> AggregatorFailed:
    return AggregatorFailed(
        request_id=request_id,
        error=type(error).__name__,
        message=str(error),
        hint=getattr(error, "hint", ""),
    )


def _yield_to_everyone() -> None:
    """Take the lowest priority that still gets on.

    Not SCHED_IDLE: next to a trainer on all cores it would get 3 % of one, and be too late for
    every round.
    """
    yield_to_all_sessions(_NICENESS)
    process = psutil.Process()
    try:
        if sys.platform == "win32":
            process.nice(psutil.IDLE_PRIORITY_CLASS)
            process.ionice(psutil.IOPRIO_VERYLOW)
        elif sys.platform == "linux":
            process.ionice(psutil.IOPRIO_CLASS_IDLE)
    except (OSError, psutil.Error) as error:
        _log.warning("disk priority not lowered reason=%s", error)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process until stdin ends."""
    parser = argparse.ArgumentParser(prog="aggregator", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--module", default=DENSE_MODULE)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--log-file", type=Path, help="what stderr is, kept small")
    options = parser.parse_args(arguments)
    events = EventWriter(claim_stdout(), on_closed=lambda: os._exit(1))
    set_up_log(options.log_file)
    # Every file appears by a rename, so the process may end anywhere.
    end_with_parent(lambda: os._exit(1))
    _yield_to_everyone()
    keep_freed_memory()
    gc.freeze()  # as in the trainer
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(False)  # a library linked with -ffast-math may have switched it on
    try:
        spec = read_run_spec(options.run_dir / "spec.toml")
        store = BlobStore(options.run_dir / "modules" / options.module / "blobs")
    except (VolunteerError, P2PError) as error:
        events.emit(_failed(NO_REQUEST, error))
        return 1
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    aggregator = Aggregator(
        spec,
        options.module,
        store,
        run_dir=options.run_dir,
        is_awaited=lambda: not lines.empty(),
    )
    events.emit(AggregatorStarted())
    threading.Thread(target=_queue_stdin, args=(lines,), name="stdin", daemon=True).start()
    while (line := lines.get()) is not None:
        events.emit(answer_line(aggregator, line))
    return 0


def _queue_stdin(lines: queue.SimpleQueue[bytes | None]) -> None:
    """Queue the lines of stdin, and None at its end."""
    # Not sys.stdin: a thread that waits in it makes the interpreter abort when it ends.
    with os.fdopen(os.dup(0), "rb") as stream:
        for line in read_lines(stream, MAX_LINE_BYTES):
            lines.put(line)
    lines.put(None)


def _end_at_once(status: int) -> NoReturn:
    """End without tidying up the interpreter: on a busy machine, at our priority, it took 40 s."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _end_at_once(main())
