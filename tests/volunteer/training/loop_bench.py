"""A folder of a run, in which the trainer's loop is started again and again, without processes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from p2p.blobstore import BlobStore
from tests.volunteer.training.tiny_run import CPU, tiny_spec
from volunteer.messages import (
    Contribute,
    Encoded,
    OwnWork,
    Rebase,
    Stepped,
    StopTrainer,
    TrainerCommand,
    TrainerEvent,
    trainer_command_decoder,
)
from volunteer.training.child_process import Inbox
from volunteer.training.diloco import LocalState
from volunteer.training.genesis import build_genesis
from volunteer.training.micro_batches import Wishes
from volunteer.training.module_blobs import ModuleBlobs
from volunteer.training.snapshot import SnapshotStore
from volunteer.training.state import write_state
from volunteer.training.training_loop import LoopSettings, TrainingLoop

SPEC = tiny_spec()
STEP_TOKENS = 4 * 16
CONTRIBUTE = Contribute(base="c", round_index=0)


@dataclass
class Bench:
    """A run's folder, in which loops can be started one after the other."""

    folder: Path
    checkpoint_every_s: float = 1e9
    events: list[TrainerEvent] = field(default_factory=list)
    now_s: float = 0.0
    duty_fraction: float = 1.0
    wishes: Wishes = field(default_factory=Wishes)
    has_ended: threading.Event = field(default_factory=threading.Event)
    """Whether the process would have ended at once."""
    rests: list[float] = field(default_factory=list)
    """Seconds of rest that the loop has begun."""

    def __post_init__(self) -> None:
        self.store = BlobStore(self.folder / "blobs")
        self.genesis = write_state(build_genesis(SPEC), self.store)

    def rebase(
        self,
        state_hash: str = "",
        *,
        pending: tuple[str, ...] = (),
        works: tuple[OwnWork, ...] = (),
        known: tuple[str, ...] = (),
    ) -> Rebase:
        return Rebase(
            commit_id=f"c{state_hash[:8]}",
            round_index=0,
            state_hash=state_hash or self.genesis,
            pending=pending,
            works=works,
            known_contributions=known,
        )

    def snapshots(self) -> SnapshotStore:
        return SnapshotStore(self.folder / "trainer", SPEC, "dense")

    def run(
        self, *first: TrainerCommand, script: dict[int, TrainerCommand] | None = None
    ) -> list[TrainerEvent]:
        """Run a loop: `first` at once, then each command once its number of steps is taken.

        The inner steps take a second each on this clock: it is asked four times in each.
        """
        inbox: Inbox[TrainerCommand] = RestingInbox(self)
        self.inbox = inbox
        for command in first:
            inbox.put(command)
        waiting = dict(script or {})
        steps = 0
        events: list[TrainerEvent] = []

        def emit(event: TrainerEvent) -> None:
            nonlocal steps
            events.append(event)
            if isinstance(event, Stepped):
                steps += 1
                if steps in waiting:
                    inbox.put(waiting.pop(steps))

        def now_s() -> float:
            self.now_s += 0.25
            return self.now_s

        loop = TrainingLoop(
            LoopSettings(
                spec=SPEC,
                peer_seed=b"seed",
                checkpoint_every_s=self.checkpoint_every_s,
                duty_fraction=self.duty_fraction,
                wishes=self.wishes,
                end_process=self.has_ended.set,
            ),
            device=CPU,
            blobs=ModuleBlobs(self.store, SPEC, "dense", "me"),
            snapshots=self.snapshots(),
            inbox=inbox,
            emit=emit,
            now_s=now_s,
        )
        self.events = events
        loop.run()
        return events

    def stop_from_outside(self) -> None:
        """Have a stop come while the loop runs."""
        self.inbox.request_stop()

    def saved(self) -> LocalState:
        state = self.snapshots().load(CPU)
        assert state is not None
        return state


class RestingInbox(Inbox[TrainerCommand]):
    """Lets a rest pass on the bench's clock, unless there is a command."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(trainer_command_decoder, StopTrainer())
        self._bench = bench

    def wait_command(self, timeout_s: float) -> TrainerCommand | None:
        self._bench.rests.append(timeout_s)
        command = self.next_command(should_wait=False)
        if command is None:
            self._bench.now_s += timeout_s
        return command


def kinds(events: list[TrainerEvent]) -> list[str]:
    return [type(event).__name__ for event in events]


def only(events: list[TrainerEvent], kind: type[TrainerEvent]) -> list[TrainerEvent]:
    return [event for event in events if isinstance(event, kind)]


def encoded_in(events: list[TrainerEvent]) -> list[Encoded]:
    return [event for event in events if isinstance(event, Encoded)]
