"""A real trainer process, and the folder of a run in which it is started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from p2p.blobstore import BlobStore
from tests.volunteer.training.tiny_run import CPU, tiny_spec
from volunteer.messages import (
    Rebase,
    TrainerCommand,
    TrainerEvent,
    encode_line,
    trainer_event_decoder,
)
from volunteer.run import format_run_spec
from volunteer.training.genesis import build_genesis
from volunteer.training.progress import Progress
from volunteer.training.snapshot import SnapshotStore
from volunteer.training.state import write_state

SPEC = tiny_spec()
ROOT_DIR = Path(__file__).parents[3]
EventT = TypeVar("EventT")


class Trainer:
    """One real process; what it says is waited for, never slept for."""

    def __init__(self, run_dir: Path, *options: str, launcher: Sequence[str] = ()) -> None:
        self.log_file = run_dir / "trainer.log"
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *launcher,
                    sys.executable,
                    *("-m", "volunteer.training.trainer", "--run-dir", str(run_dir)),
                    *("--device", "cpu", "--threads", "1", "--author", "me", *options),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT_DIR,
            )
        self.events: list[TrainerEvent] = []

    def send(self, *commands: TrainerCommand) -> None:
        self.send_bytes(b"".join(encode_line(command) for command in commands))

    def send_bytes(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def read_event(self) -> TrainerEvent | None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            return None
        self.events.append(trainer_event_decoder.decode(line))
        return self.events[-1]

    def wait_for(
        self, kind: type[EventT], condition: Callable[[EventT], bool] = lambda _: True
    ) -> EventT:
        while (event := self.read_event()) is not None:
            if isinstance(event, kind) and condition(event):
                return event
        raise AssertionError(f"no {kind.__name__}: {self.log_file.read_text()}")

    def wait_for_end(self) -> int:
        while self.read_event() is not None:
            pass
        return self.process.wait()

    def kill(self) -> None:
        self.process.kill()
        self.wait_for_end()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:  # of what the dead process never read
                continue


class Run:
    """The folder of a run, and the trainers started in it."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        (run_dir / "spec.toml").write_text(format_run_spec(SPEC))
        self.store = BlobStore(run_dir / "modules" / "dense" / "blobs")
        self.genesis = write_state(build_genesis(SPEC), self.store)
        self.trainers: list[Trainer] = []

    def start(self, *options: str) -> Trainer:
        self.trainers.append(Trainer(self.run_dir, *options))
        return self.trainers[-1]

    def rebase(
        self, state_hash: str = "", round_index: int = 0, known: tuple[str, ...] = ()
    ) -> Rebase:
        return Rebase(
            commit_id=f"c{round_index}",
            round_index=round_index,
            state_hash=state_hash or self.genesis,
            pending=(),
            works=(),
            known_contributions=known,
        )

    def saved(self) -> Progress:
        snapshots = SnapshotStore(self.run_dir / "modules" / "dense" / "trainer", SPEC, "dense")
        state = snapshots.load(CPU)
        return Progress() if state is None else state.progress
