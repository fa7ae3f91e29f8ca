"""The trainer process: holds the device, takes inner steps, and obeys the agent.

Runs in: trainer. `python -m volunteer.training.trainer --run-dir DIR --author PEER_ID [...]`

    DIR/spec.toml                   the RunSpec
    DIR/modules/<module>/blobs/     shared states and contributions
    DIR/modules/<module>/trainer/   snapshots

Commands come on stdin and events go to stdout (messages.py); the log is stderr. The process ends,
with a snapshot, at StopTrainer, the end of stdin, SIGTERM, its parent's death, or when its parent
stands still (parent_watch.py). It is a process of its own because a device's memory comes back for
certain only when the process ends.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import psutil

from p2p.blobstore import BlobStore
from p2p.errors import BlobStoreFullError
from volunteer import errors
from volunteer.errors import (
    OutOfGpuMemoryError,
    StorageFullError,
    TrainerError,
    VolunteerError,
)
from volunteer.logs import set_up_log
from volunteer.messages import (
    AGENT_STOOD_STILL_STATUS,
    Preparing,
    StopTrainer,
    TrainerCommand,
    TrainerEvent,
    TrainerFailed,
    trainer_command_decoder,
)
from volunteer.rounds.records import DENSE_MODULE
from volunteer.run import read_run_spec
from volunteer.training.child_process import (
    EventWriter,
    Inbox,
    claim_stdout,
    end_with_parent,
    keep_freed_memory,
    yield_to_all_sessions,
)
from volunteer.training.parent_watch import ParentWatch, parent_reader

NICENESS = 10
"""Below everything the owner runs; the aggregator, at 19, is below the trainer."""

_log = logging.getLogger(__name__)


def main() -> int:
    """Run the process; return its exit status.

    0: stopped as asked; 1: failed; AGENT_STOOD_STILL_STATUS: saved, as the agent was stopped.
    """
    arguments = _parse_arguments()
    set_up_log(arguments.log_file)
    yield_to_all_sessions(NICENESS)
    keep_freed_memory()
    inbox: Inbox[TrainerCommand] = Inbox(trainer_command_decoder, StopTrainer())
    writer = EventWriter(claim_stdout(), on_closed=inbox.request_stop)
    end_with_parent(inbox.request_stop)
    inbox.start_reading_stdin()
    watch = ParentWatch(parent_reader(), inbox.request_stop)
    watch.start()
    try:
        _train(arguments, inbox, writer.emit)
    except VolunteerError as error:
        return _fail(writer, error)
    except BlobStoreFullError as error:
        return _fail(writer, StorageFullError(str(error)))
    except Exception as error:  # noqa: BLE001 -- process boundary: the agent hears of everything
        _log.exception("the trainer cannot go on")
        return _fail(writer, TrainerError(f"{type(error).__name__}: {error}"))
    return AGENT_STOOD_STILL_STATUS if watch.stood_still else 0


def _choose_torch_environment() -> None:
    """Set what torch reads from the environment; to be called before it is imported."""
    # Read at the import. Its threads then sleep while they wait for each other: spinning takes the
    # owner's CPU, and is 3 to 6 times slower where cores are busy.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Read at its first large vector, which then has pages of 2 MiB where the system grants them: a
    # new vector of the model's size costs a third.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def _train(
    arguments: argparse.Namespace,
    inbox: Inbox[TrainerCommand],
    emit: Callable[[TrainerEvent], None],
) -> None:
    """Load torch and train until told to stop.

    Raises:
        VolunteerError: training cannot go on.
    """
    _choose_torch_environment()
    import torch

    from volunteer.training.devices import choose_device, is_out_of_memory, limit_memory
    from volunteer.training.micro_batches import Wishes
    from volunteer.training.module_blobs import ModuleBlobs
    from volunteer.training.open_feed import open_feed
    from volunteer.training.snapshot import SnapshotStore
    from volunteer.training.training_loop import LoopSettings, TrainingLoop

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    spec = read_run_spec(arguments.run_dir / "spec.toml")
    device = choose_device(arguments.device)
    if arguments.gpu_max_bytes:
        limit_memory(device, arguments.gpu_max_bytes)
    _prepare_code(arguments.run_dir, is_compiled=arguments.compile)
    module_dir: Path = arguments.run_dir / "modules" / arguments.module
    store, peer_seed = BlobStore(module_dir / "blobs"), arguments.author.encode()
    feed = open_feed(spec, peer_seed, arguments.run_dir, store, tell=lambda: emit(Preparing()))
    gc.freeze()  # what was imported is never garbage: each full look through torch takes 0.1 s
    try:
        TrainingLoop(
            LoopSettings(
                spec=spec,
                peer_seed=peer_seed,
                checkpoint_every_s=arguments.checkpoint_every_s,
                duty_fraction=arguments.duty_fraction,
                wishes=Wishes(
                    is_compiled=arguments.compile,
                    checkpointing=arguments.activation_checkpointing,
                ),
                end_process=end_with_children,
            ),
            device=device,
            blobs=ModuleBlobs(store, spec, arguments.module, arguments.author),
            snapshots=SnapshotStore(module_dir / "trainer", spec, arguments.module),
            inbox=inbox,
            emit=emit,
            now_s=time.monotonic,
            feed=feed,
        ).run()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfGpuMemoryError(f"out of memory: {error}") from error


def _prepare_code(run_dir: Path, *, is_compiled: bool) -> None:
    """Give the compiler a folder in the run's, or remove what it once left there."""
    from volunteer.training.acceleration import CODE_DIR_NAME, forget_compiled, prepare_compiler

    if is_compiled:
        prepare_compiler(run_dir / CODE_DIR_NAME)
    else:
        forget_compiled(run_dir / CODE_DIR_NAME)


def _fail(writer: EventWriter, error: VolunteerError) -> int:
    """Tell the agent why this process ends, under a name that it knows."""
    name = next(kind.__name__ for kind in type(error).__mro__ if hasattr(errors, kind.__name__))
    _log.error("failed error=%s: %s", name, error)
    writer.emit(TrainerFailed(error=name, message=str(error), hint=error.hint))
    return errors.VolunteerError.exit_code


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="volunteer.training.trainer")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--module", default=DENSE_MODULE)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch likes")
    parser.add_argument("--author", required=True, help="peer id of this volunteer")
    parser.add_argument("--checkpoint-every-s", type=float, default=60.0)
    parser.add_argument("--duty-fraction", type=float, default=1.0, help="part of the time, 0 to 1")
    parser.add_argument("--compile", action="store_true", help="compile layers")
    parser.add_argument("--activation-checkpointing", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--gpu-max-bytes", type=int, default=0, help="0: no limit")
    parser.add_argument("--log-file", type=Path, help="what stderr is, kept small")
    return parser.parse_args()


def end_with_children() -> None:
    """End at once, and with this process what it has started: a compiler, if one is at work."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            child.kill()
    end_at_once(0)


def end_at_once(status: int) -> NoReturn:
    """End without tidying up the interpreter: the owner waits for the device.

    All that matters is on the disk and said. Torch's own end took 2.6 s of 3 on a busy machine, and
    what it frees one by one the system takes back at once.
    """
    logging.shutdown()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    end_at_once(main())
