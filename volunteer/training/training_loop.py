"""The trainer's loop: inner steps, and between them the agent's commands.

Runs in: trainer. No process, pipe or clock of its own: trainer.py brings them.

Write order of a contribution: blob (fsync), a note that its work is no longer in the weights
(fsync; contribution_note.py), event. A kill before the note leaves the work in the weights; a kill
after it leaves the contribution in the note, from which the next start reports it. So nothing is
sent twice, and at most `checkpoint_every_s` of training is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from volunteer.errors import (
    ContributionRejectedError,
    StorageFullError,
    TrainerError,
    VolunteerError,
)
from volunteer.messages import (
    Contribute,
    NothingToContribute,
    Rebase,
    Rebased,
    SnapshotSaved,
    Stepped,
    Stopping,
    StopTrainer,
    TrainerCommand,
    TrainerEvent,
    TrainerStarted,
)
from volunteer.run import RunSpec
from volunteer.training import diloco
from volunteer.training.child_process import Inbox
from volunteer.training.data import load_corpus
from volunteer.training.devices import Device
from volunteer.training.diloco import LocalState
from volunteer.training.feed import Feed
from volunteer.training.inner import NotFiniteError, learning_rate
from volunteer.training.meter import Meter
from volunteer.training.micro_batches import Wishes
from volunteer.training.module_blobs import ModuleBlobs
from volunteer.training.pace import DutyCycle
from volunteer.training.progress import Progress, carried_ids, unknown_carried
from volunteer.training.pseudo_gradient import RunCodec
from volunteer.training.snapshot import SnapshotStore
from volunteer.training.stepping import Stepper

STEPPED_EVERY_S = 0.5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """What the process was started with."""

    spec: RunSpec
    peer_seed: bytes
    """Makes this volunteer's data stream its own."""
    checkpoint_every_s: float
    duty_fraction: float = 1.0
    """Part of the time in which it works; it rests between steps."""
    wishes: Wishes = field(default_factory=Wishes)
    """How layers are to be computed."""
    end_process: Callable[[], None] = lambda: None
    """Ends the process at once, whatever its threads do."""


class TrainingLoop:
    """One volunteer's training of one module, from start to stop."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        device: Device,
        blobs: ModuleBlobs,
        snapshots: SnapshotStore,
        inbox: Inbox[TrainerCommand],
        emit: Callable[[TrainerEvent], None],
        now_s: Callable[[], float],
        feed: Feed | None = None,
    ) -> None:
        """Read the data; nothing is trained before `run`.

        Args:
            settings: of the process.
            device: where theta lives.
            blobs: shared states and own contributions.
            snapshots: where the state is kept.
            inbox: the agent's commands.
            emit: tells the agent.
            now_s: a monotonic clock.
            feed: what the inner steps read; None: the texts of the package, as bytes.

        Raises:
            RunSpecError: the data is unknown or unreadable.
        """
        self._settings = settings
        self._spec = settings.spec
        self._device = device
        self._blobs = blobs
        self._snapshots = snapshots
        self._inbox = inbox
        self._emit = emit
        self._now_s = now_s
        self._feed = feed or Feed(self._spec, settings.peer_seed, load_corpus(self._spec.data))
        self._state: LocalState | None = None
        self._saved = Progress()
        """What is on the disk."""
        self._is_saved = True
        """Whether nothing has changed since."""
        self._saved_at = now_s()
        self._last_rebase: Rebase | None = None
        self._has_returned = False
        self._meter = Meter(now_s())
        self._duty = DutyCycle(settings.duty_fraction)
        self._stepper = Stepper(
            self._spec,
            device,
            settings.wishes,
            should_stop=inbox.should_stop,
            end_at_once=self._end_at_once,
            emit=emit,
            now_s=now_s,
        )

    def run(self) -> None:
        """Load the snapshot, then train and obey until told to stop.

        Raises:
            VolunteerError: training cannot go on. What could be saved is saved.
        """
        self._load_snapshot()
        self._emit(
            TrainerStarted(
                device=str(self._device.torch_device),
                device_name=self._device.name,
                inner_step=self._saved.inner_step,
                tokens_total=self._saved.tokens_total,
                last_contribution=self._saved.last_contribution,
            )
        )
        try:
            self._train_and_obey()
        except StorageFullError:
            raise
        except VolunteerError:
            self._rescue()
            raise

    def _train_and_obey(self) -> None:
        while True:
            command = self._next_command()
            if isinstance(command, StopTrainer):
                self._stop()
                return
            try:
                if command is None:
                    self._advance()
                else:
                    self._obey(command)
            except NotFiniteError as error:
                self._return_to_snapshot(error)

    def _next_command(self) -> TrainerCommand | None:
        """Return the next command; None: the next step is due, after the rest that is owed."""
        if self._last_rebase is None:
            return self._inbox.next_command(should_wait=True)
        if self._duty.owed_s <= 0.0:
            return self._inbox.next_command(should_wait=False)
        began_at = self._now_s()
        command = self._inbox.wait_command(self._duty.owed_s)
        rested_s = self._now_s() - began_at
        self._duty.note_rest(rested_s)
        self._meter.add_rest(rested_s)
        return command

    def _obey(self, command: TrainerCommand) -> None:
        if isinstance(command, Rebase):
            discarded_tokens = self._rebase(command)
            self._emit(
                Rebased(
                    commit_id=command.commit_id,
                    carried=carried_ids(self._progress),
                    discarded_tokens=discarded_tokens,
                )
            )
        elif isinstance(command, Contribute):
            self._contribute(command)
        else:
            self._save()

    @property
    def _progress(self) -> Progress:
        return self._saved if self._state is None else self._state.progress

    # ------------------------------------------------------------------------------ training

    def _advance(self) -> None:
        """Take one inner step, at first after a trial; report it, and save, where it is time."""
        assert self._state is not None
        started_at = self._now_s()
        progress = self._state.progress
        windows = self._feed.windows(progress.inner_step, self._inbox.should_stop)
        if windows is None:
            return
        windows_BT1 = torch.from_numpy(windows).to(self._device.torch_device).long()
        if not self._stepper.is_ready:
            self._stepper.prepare(self._state, windows_BT1)
            started_at = self._now_s()
        result = self._stepper.step(self._state, windows_BT1)
        if result is None:
            return
        self._is_saved = False
        ended_at = self._now_s()
        self._duty.note_work(ended_at - started_at)
        num_tokens = self._state.progress.tokens_total - progress.tokens_total
        self._meter.add_step(ended_at - started_at, num_tokens, result.loss)
        if ended_at - self._meter.reported_at >= STEPPED_EVERY_S:
            self._report(ended_at)
        if ended_at - self._saved_at >= self._settings.checkpoint_every_s:
            self._save()

    def _report(self, now_s: float) -> None:
        progress = self._progress
        self._emit(
            Stepped(
                inner_step=progress.inner_step,
                tokens_total=progress.tokens_total,
                tokens_since_contribution=progress.tokens_since_contribution,
                tokens_per_s=self._meter.tokens_per_s,
                loss=self._meter.take_mean_loss(now_s),
                lr=learning_rate(
                    self._spec.inner,
                    inner_step=progress.inner_step - 1,
                    round_index=progress.round_index,
                ),
            )
        )

    # ------------------------------------------------------------------------------ commands

    def _rebase(self, command: Rebase) -> int:
        """Stand on the command's commit; return the discarded tokens."""
        shared_P = self._blobs.read_shared_weights(command.state_hash)
        state = self._state or diloco.fresh_state(shared_P, self._spec, self._device)
        discarded_tokens = diloco.rebase(
            state, command, shared_P, load_quantised=self._blobs.load_quantised
        )
        self._state = state
        self._is_saved = False
        self._last_rebase = command
        _log.info(
            "rebased commit=%s round=%d carried=%d discarded_tokens=%d",
            command.commit_id[:12],
            command.round_index,
            len(state.progress.carried),
            discarded_tokens,
        )
        for contribution_id in unknown_carried(state.progress):
            _log.warning("carried=%s: its tokens are not known any more", contribution_id[:12])
        return discarded_tokens

    def _contribute(self, command: Contribute) -> None:
        if self._state is None or self._last_rebase is None:
            self._emit(NothingToContribute(base=command.base))
            return
        try:
            encoded = diloco.contribute(
                self._state,
                command,
                self._spec,
                codec=RunCodec(self._spec.codec, command.round_index),
                store_blob=lambda gradient: self._blobs.store_contribution(
                    gradient, command.round_index
                ),
            )
        except (NotFiniteError, ContributionRejectedError) as error:
            self._return_to_snapshot(error)
            self._contribute(command)
            return
        if encoded is None:
            self._emit(NothingToContribute(base=command.base))
            return
        self._is_saved = False
        self._feed.save(self._progress.inner_step)
        self._snapshots.save_contribution(self._state)
        self._saved = self._state.progress
        self._emit_saved()
        self._emit(encoded)

    def _end_at_once(self) -> None:
        """End from another thread, while nothing was trained that the snapshot lacks."""
        self._emit(
            Stopping(inner_step=self._saved.inner_step, tokens_total=self._saved.tokens_total)
        )
        self._emit_saved()
        self._settings.end_process()

    def _stop(self) -> None:
        self._emit(
            Stopping(inner_step=self._progress.inner_step, tokens_total=self._progress.tokens_total)
        )
        try:
            self._save()
        except NotFiniteError as error:
            _log.warning("the last snapshot stands: %s", error)
            self._emit_saved()

    # ------------------------------------------------------------------------------ snapshots

    def _load_snapshot(self) -> None:
        self._state = self._snapshots.load(self._device)
        self._is_saved = True
        self._saved = Progress() if self._state is None else self._state.progress
        self._feed.restore(self._saved.inner_step)

    def _save(self) -> None:
        """Put the state on the disk, if it is not there, and say so.

        Raises:
            NotFiniteError: the weights are broken; the last snapshot stands.
            StorageFullError: the last snapshot stands.
        """
        if self._state is not None and not self._is_saved:
            diloco.verify_finite(self._state)
            self._feed.save(self._progress.inner_step)
            self._snapshots.save(self._state)
            self._saved = self._state.progress
            self._is_saved = True
        self._saved_at = self._now_s()
        self._emit_saved()

    def _emit_saved(self) -> None:
        self._emit(
            SnapshotSaved(
                inner_step=self._saved.inner_step,
                tokens_total=self._saved.tokens_total,
                tokens_since_contribution=self._saved.tokens_since_contribution,
            )
        )

    def _return_to_snapshot(self, error: VolunteerError) -> None:
        """Go on from the last sound state, once; a second time the run itself is at fault.

        Raises:
            TrainerError: this happened before.
        """
        if self._has_returned or self._last_rebase is None:
            raise TrainerError(
                f"training diverged: {error}",
                hint="the run's learning rate may be too high, or the device computes wrongly",
            ) from error
        _log.warning(
            "going back to the last snapshot step=%d from=%d: %s",
            self._saved.inner_step,
            self._progress.inner_step,
            error,
        )
        self._has_returned = True
        self._load_snapshot()
        self._rebase(self._last_rebase)

    def _rescue(self) -> None:
        """Save what is sound before the process fails for another reason."""
        try:
            self._save()
        except VolunteerError as error:
            _log.warning("the last snapshot stands: %s", error)
