"""DiLoCo as the program does it: H inner steps each, one commit, the same new state for all.

Runs in: lab. FedAvg is its outer optimizer with learning rate 1 and no momentum.

What a round does is the trainer's train, contribute, rebase and the aggregator's judge, combine,
outer step. Exchange takes no time: whatever is sent is listed at once, or never (`drop_fraction`),
and then carried and sent again with the next one, as ROUNDS.md 27-29 have it.

Paper: arXiv:2311.08105, Alg. 1. Differs: as volunteer/training/{diloco,outer,weighing}.py say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from blake3 import blake3
from torch import Tensor

from volunteer.lab.training.attacks import Attack, Attacker
from volunteer.lab.training.beginning import first_state
from volunteer.lab.training.books import Books
from volunteer.lab.training.exchange import apply_commit
from volunteer.lab.training.scorers import Verdicts, reach_verdicts
from volunteer.lab.training.shards import Sharding, shards_of
from volunteer.lab.training.strategy import RoundReport
from volunteer.lab.training.task import LabTask
from volunteer.lab.training.worker import Sent, Worker
from volunteer.messages import Outcome
from volunteer.run import CodecSpec, OuterSpec, RunSpec

FP32 = CodecSpec(id="fp32")
NESTEROV = OuterSpec()
"""The program's default: learning rate 0.7, momentum 0.5."""
FEDAVG = OuterSpec(lr=1.0, momentum=0.0)
_CHANCE_BYTES = 8
_EXCLUDED = "excluded"  # author and commit follow


@dataclass(frozen=True, slots=True, kw_only=True)
class DiLoCoPlan:
    """K workers that share every H steps."""

    num_workers: int
    steps_a_round: int
    """H, nominal; the last round is shorter where the length asks for it."""
    outer: OuterSpec = NESTEROV
    codec: CodecSpec = FP32
    sharding: Sharding = "shared"
    steps_by_worker: tuple[int, ...] = ()
    """Inner steps of each worker in a round, for unequal speeds; empty: H for everyone."""
    weighting: Literal["tokens", "uniform"] = "tokens"
    """By trained tokens, as the program does, or all alike."""
    drop_fraction: float = 0.0
    """Chance of each contribution not to be listed; its work is carried."""
    workers_by_phase: tuple[int, ...] = ()
    """How many take part, in phases of equal length: (1, 2, 3, 4) ramps up; empty: all, always.
    Whoever comes is new: shared weights, empty moments, the learning rate warmed up again."""
    attackers: tuple[tuple[int, Attack], ...] = ()
    """Workers, by index, that send something else than they trained."""
    has_scorers: bool = False
    """Whether drawn members score contributions, as in a real run (scorers.py)."""

    def spec(self, task: LabTask, seed: int) -> RunSpec:
        """Return the RunSpec."""
        return task.run_spec(seed, outer=self.outer, codec=self.codec)

    def begin(self, task: LabTask, seed: int) -> DiLoCo:
        """Return the strategy before its first round."""
        return DiLoCo(self, task, seed)

    def num_active(self, progress: float) -> int:
        """Return how many workers take part when `progress` (0..1) of the length is done."""
        phases = self.workers_by_phase or (self.num_workers,)
        return phases[min(int(progress * len(phases)), len(phases) - 1)]

    def inner_steps(self, worker: int, num_steps: int) -> int:
        """Return the steps that a worker takes in a round of `num_steps` nominal ones."""
        if not self.steps_by_worker:
            return num_steps
        return max(1, self.steps_by_worker[worker] * num_steps // self.steps_a_round)


class DiLoCo:
    """The swarm between two rounds."""

    def __init__(self, plan: DiLoCoPlan, task: LabTask, seed: int) -> None:
        """Begin on the genesis state, nobody there yet."""
        self._plan = plan
        self._task = task
        self._seed = seed
        self._spec = plan.spec(task, seed)
        self._shards = shards_of(task, plan.sharding, plan.num_workers, seed)
        self._state = first_state(task, seed)
        self._workers: list[Worker] = []
        self._attackers = {
            index: Attacker(kind, seed * 1000 + index) for index, kind in plan.attackers
        }
        self._books = Books()
        self._step = 0

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Who takes part."""
        return tuple(self._workers)

    def weights(self) -> Tensor:
        """Return the shared weights."""
        return self._state.weights_P

    def advance(self) -> RoundReport:
        """Train, contribute, commit, rebase."""
        num_steps = min(self._plan.steps_a_round, self._task.num_steps - self._step)
        self._fit_to(self._plan.num_active(self._step / self._task.num_steps))
        num_tokens = 0
        for worker in self._workers:
            num_own = self._plan.inner_steps(worker.index, num_steps)
            num_tokens += worker.train(num_own, clock=self._step, clock_steps=num_steps)
        sent = self._contributions()
        listed = [one for one in sent if not self._is_dropped(one)]
        notes = self._commit(listed)
        self._rebase(sent, listed)
        self._step += num_steps
        return RoundReport(
            num_steps=num_steps,
            num_tokens=num_tokens,
            bytes_sent=sum(one.encoded.blob_bytes for one in sent) / len(sent),
            notes=notes,
        )

    def _fit_to(self, num_active: int) -> None:
        """Let workers come or leave; the last to come leaves first."""
        del self._workers[num_active:]
        for index in range(len(self._workers), num_active):
            self._workers.append(
                Worker(
                    self._spec, self._shards[index], self.weights(), seed=self._seed, index=index
                )
            )

    def _contributions(self) -> list[Sent]:
        sent = [
            worker.contribute(base=self._commit_name, round_index=self._books.height)
            for worker in self._workers
        ]
        honest = [
            one
            for worker, one in zip(self._workers, sent, strict=True)
            if worker.index not in self._attackers
        ]
        return [
            self._attackers[worker.index].forge(one, worker, honest)
            if worker.index in self._attackers
            else one
            for worker, one in zip(self._workers, sent, strict=True)
        ]

    def _is_dropped(self, one: Sent) -> bool:
        key = f"allmende/lab/drop/{self._seed}/{one.contribution_id}".encode()
        chance: int = int.from_bytes(blake3(key).digest(length=_CHANCE_BYTES), "little")
        return chance < self._plan.drop_fraction * 256.0**_CHANCE_BYTES

    def _commit(self, sent: Sequence[Sent]) -> tuple[str, ...]:
        """Take the outer step; a commit that lists nothing leaves the state as it was.

        Returns:
            Who was refused or excluded, for the report.
        """
        members = frozenset(worker.author for worker in self._workers)
        if not sent:
            self._books.note_commit((), (), members)
            return ()
        listed = self._books.listed_works(sent, is_uniform=self._plan.weighting == "uniform")
        outer = self._plan.outer.at_round(self._books.height)
        applied = apply_commit(self._state, sent, listed, outer)
        verdicts = self._verdicts(sent, applied.outcomes, members)
        self._state = applied.state
        excluded = self._books.note_commit(sent, applied.outcomes, members, verdicts)
        refused = [
            f"refused {one.author}"
            for one, outcome in zip(sent, applied.outcomes, strict=True)
            if outcome.refused_reason
        ]
        return (*refused, *(f"{_EXCLUDED} {a} {self._books.height}" for a in sorted(excluded)))

    def _verdicts(
        self, sent: Sequence[Sent], outcomes: Sequence[Outcome], members: frozenset[str]
    ) -> Verdicts | None:
        if not self._plan.has_scorers:
            return None
        return reach_verdicts(
            self._spec,
            self.weights(),
            sent,
            outcomes,
            height=self._books.height + 1,
            members=members,
            liars=[f"worker-{index}" for index in self._attackers],
        )

    def _rebase(self, sent: Sequence[Sent], listed: Sequence[Sent]) -> None:
        """Move everyone; unlisted work goes back into the local weights, with what it carried."""
        listed_ids = {one.contribution_id for one in listed}
        for worker, one in zip(self._workers, sent, strict=True):
            is_listed = one.contribution_id in listed_ids
            pending = () if is_listed else (*one.encoded.carries, one.contribution_id)
            worker.rebase(
                self.weights(),
                commit=self._commit_name,
                round_index=self._books.height,
                pending=pending,
            )
            if is_listed:
                worker.forget((*one.encoded.carries, one.contribution_id))

    @property
    def _commit_name(self) -> str:
        return f"commit-{self._books.height}"


def excluded_note(note: str) -> tuple[str, int]:
    """Return who was excluded, and by which commit (from 1), if that is what a note says.

    Otherwise the author is empty.
    """
    word, _, rest = note.partition(" ")
    author, _, height = rest.partition(" ")
    return (author, int(height)) if word == _EXCLUDED else ("", 0)
