"""One member in float64 on a random tree of commits: what test_books_vectors.py audits.

The ids and the choice of what is pending are volunteer/rounds/credit.py's; the vectors are
pseudo_gradient.py's and carrying.py's. The world around them is random: which contributions a
commit lists and when, which commit the member stands on, when it misses applies, is killed, or
switches to another branch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from volunteer.messages import OwnWork
from volunteer.rounds.credit import WorkState, pending_ids, to_drop, work_states
from volunteer.rounds.records import Contribution
from volunteer.training import carrying
from volunteer.training.pseudo_gradient import Codec, contribute, rebase

P = 48


class RoundingCodec:
    """Rounds to a grid: loses something, in fp64, as simply as can be."""

    error_feedback_beta = 1.0

    def encode(self, x_P: Tensor) -> Tensor:
        return (x_P / 0.25).round() * 0.25

    def decode(self, encoded: Tensor) -> Tensor:
        return encoded.clone()

    def subtract_decoded(self, encoded: Tensor, x_P: Tensor) -> None:
        x_P -= encoded


@dataclass(frozen=True, eq=False)
class TreeCommit:
    """A commit, with its own path to the genesis and the weights after it."""

    commit_id: str
    height: int
    parent: TreeCommit | None
    listed: tuple[str, ...]
    weights_P: Tensor

    def chain(self) -> list[TreeCommit]:
        """This commit and all below it."""
        return [self, *(self.parent.chain() if self.parent else [])]


@dataclass(eq=False)
class Local:
    """What a snapshot holds."""

    theta_P: Tensor
    base_P: Tensor
    residual_P: Tensor
    trained_P: Tensor
    """Sum of all steps that the weights ever took: the auditor's own count."""
    in_theta: frozenset[str] = frozenset()

    def copy(self) -> Local:
        return Local(
            theta_P=self.theta_P.clone(),
            base_P=self.base_P.clone(),
            residual_P=self.residual_P.clone(),
            trained_P=self.trained_P.clone(),
            in_theta=self.in_theta,
        )


@dataclass(eq=False)
class Member:
    """The member and the commits it knows."""

    seed: int
    codec: Codec[Tensor]
    carries_of: Callable[[Member], frozenset[str]] = lambda member: member.local.in_theta
    knows_descendants: bool = True
    rng: random.Random = field(init=False)
    local: Local = field(init=False)
    own: dict[str, Contribution] = field(default_factory=dict)
    quantised: dict[str, Tensor] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    contributed_on: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.noise = torch.Generator().manual_seed(self.seed)
        start_P = self.vector()
        self.commits = [TreeCommit("genesis", 0, None, (), start_P)]
        self.by_id = {"genesis": self.commits[0]}
        self.tip = self.commits[0]
        zero_P = torch.zeros(P, dtype=torch.float64)
        self.local = Local(start_P.clone(), start_P.clone(), zero_P.clone(), zero_P.clone())
        self.snapshot = self.local.copy()

    def vector(self) -> Tensor:
        return torch.randn(P, dtype=torch.float64, generator=self.noise)

    # ------------------------------------------------------------------ what may happen

    def train(self) -> None:
        step_P = self.vector()
        self.local.theta_P = self.local.theta_P - step_P
        self.local.trained_P = self.local.trained_P + step_P

    def contribute(self) -> None:
        if self.tip.commit_id in self.contributed_on:
            return
        self.contributed_on.add(self.tip.commit_id)
        local = self.local
        result = contribute(local.theta_P, local.base_P, local.residual_P, self.codec)
        contribution_id = f"c{len(self.own):03d}"
        self.own[contribution_id] = Contribution(
            run_id="0" * 64,
            module_id="dense",
            round_index=self.tip.height,
            author="me",
            base=self.tip.commit_id,
            vote=False,
            blob_id="0" * 64,
            blob_bytes=1,
            codec="test",
            codec_version=1,
            tokens=1,
            carries=tuple(sorted(self.carries_of(self))),
        )
        self.quantised[contribution_id] = result.quantised_P
        self.count("carrying" if self.own[contribution_id].carries else "plain")
        local.base_P, local.residual_P = local.theta_P, result.residual_P
        local.in_theta = frozenset()
        self.snapshot = local.copy()

    def save(self) -> None:
        self.snapshot = self.local.copy()

    def restart(self) -> None:
        self.count("restart")
        self.local = self.snapshot.copy()
        self.stand_on(self.tip)

    def grow(self) -> None:
        """A commit appears somewhere near the top; it lists some of what it may."""
        near = [c for c in self.commits if c.height >= self.highest() - 3]
        parent = self.rng.choice([*near, *near[-2:] * 2])
        listed = tuple(i for i in self.own if self.may_list(parent, i) and self.rng.random() < 0.55)
        weights_P = parent.weights_P - 0.1 * self.vector()  # what others have contributed
        for contribution_id in listed:
            weights_P = weights_P - self.quantised[contribution_id]
        if any(self.own[i].base != parent.commit_id for i in listed):
            self.count("late")
        commit_id = f"k{len(self.commits)}"
        self.by_id[commit_id] = TreeCommit(commit_id, parent.height + 1, parent, listed, weights_P)
        self.commits.append(self.by_id[commit_id])

    def move(self) -> None:
        """Stand on any commit near the top: applies are missed, and branches switched."""
        near = [c for c in self.commits if c.height >= self.highest() - 2]
        self.stand_on(self.rng.choice(near))

    # ------------------------------------------------------------------ what the chain says

    def highest(self) -> int:
        return max(c.height for c in self.commits)

    def may_list(self, parent: TreeCommit, contribution_id: str) -> bool:
        """ROUNDS.md rule 5: based on the parent, or on its parent and not listed by it."""
        base = self.own[contribution_id].base
        if base == parent.commit_id:
            return True
        grandparent = parent.parent
        is_late = grandparent is not None and base == grandparent.commit_id
        return is_late and contribution_id not in parent.listed

    def states(self) -> dict[str, WorkState]:
        chain = self.tip.chain()
        listed = {i for commit in chain for i in commit.listed}
        on_chain = {commit.commit_id for commit in chain}

        def is_in_flight(contribution_id: str) -> bool:
            """ROUNDS.md rule 27: a descendant of the tip may still list it.

            Made on the tip or its parent, or on a descendant of the tip, where the member has
            moved back to an ancestor of a commit that it stood on.
            """
            record = self.own[contribution_id]
            if record.base in on_chain:
                return record.round_index >= self.tip.height - 1
            return self.knows_descendants and self.tip in self.by_id[record.base].chain()

        return work_states(self.own, self.dropped, listed.__contains__, is_in_flight)

    def stand_on(self, commit: TreeCommit) -> None:
        was_switched = self.tip.commit_id not in {c.commit_id for c in commit.chain()}
        self.count("switch" if was_switched else "advance")
        if commit in self.tip.chain()[1:]:
            self.count("back to an ancestor")
        self.tip = commit
        drop = to_drop(pending_ids(self.states(), self.own))
        self.count("drop" if drop else "no drop")
        self.dropped |= set(drop)
        pending = frozenset(pending_ids(self.states(), self.own))
        local = self.local
        theta_P, local.base_P = rebase(local.theta_P, local.base_P, commit.weights_P)
        if local.in_theta - pending:
            self.count("taken out")
        local.theta_P = carrying.carry(
            theta_P, local.in_theta, pending, self.works(), self.load_quantised
        )
        local.in_theta = pending

    # ------------------------------------------------------------------ the audit

    def works(self) -> dict[str, OwnWork]:
        return {
            i: OwnWork(contribution_id=i, blob_id=i, carries=record.carries)
            for i, record in self.own.items()
        }

    def load_quantised(self, own_work: OwnWork) -> Tensor:
        return self.quantised[own_work.contribution_id]

    def new_part(self, contribution_id: str) -> Tensor:
        return carrying.new_part(contribution_id, self.works(), self.load_quantised)

    def ledger_gap(self) -> float:
        """Return |trained - (listed + in flight + dropped + what theta holds + E)|, relative."""
        states = self.states()
        local = self.local
        total_P = local.base_P - local.theta_P + local.residual_P
        for contribution_id, state in states.items():
            if state is not WorkState.PENDING:
                total_P = total_P + self.new_part(contribution_id)
        gap = float((total_P - local.trained_P).abs().max())
        return gap / max(1.0, float(local.trained_P.abs().max()))

    def chain_gap(self) -> float:
        """Return |sum of Q on the chain - sum of N that count as listed|: work there twice?"""
        gap_P = torch.zeros(P, dtype=torch.float64)
        for commit in self.tip.chain():
            for contribution_id in commit.listed:
                gap_P = gap_P + self.quantised[contribution_id]
        for contribution_id, state in self.states().items():
            if state is WorkState.LISTED:
                gap_P = gap_P - self.new_part(contribution_id)
        return float(gap_P.abs().max())

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1


EVENTS = ("train", "train", "train", "contribute", "contribute", "grow", "grow", "move", "move")


def run_schedule(member: Member, num_events: int = 120) -> tuple[float, float]:
    """Let things happen; return the largest ledger gap and the largest chain gap seen."""
    ledger_gap = chain_gap = 0.0
    for _ in range(num_events):
        rare = member.rng.random()
        name = "restart" if rare < 0.05 else "save" if rare < 0.15 else member.rng.choice(EVENTS)
        getattr(member, name)()
        ledger_gap = max(ledger_gap, member.ledger_gap())
        chain_gap = max(chain_gap, member.chain_gap())
    return ledger_gap, chain_gap
