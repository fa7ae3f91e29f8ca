"""What an experiment is: arms that are trained alike but for one thing, and claims about them.

Runs in: lab. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from volunteer.lab.training.results import Outcomes, Spread, fingerprint
from volunteer.lab.training.strategy import Plan
from volunteer.lab.training.task import LabTask


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to train, once for each seed."""

    name: str
    task: LabTask
    plan: Plan
    papers: tuple[str, ...] = ()
    """The papers' figures for what this arm is the counterpart of, one for each of
    `Experiment.papers`; empty: none."""

    @property
    def settings(self) -> str:
        """Fingerprint of all that the points depend on, but for the seed."""
        return fingerprint(self.task, self.plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One claim, and what was seen."""

    claim: str
    threshold: str
    seen: str
    is_met: bool | None
    """None: not yet known, too little is finished."""


Judge = Callable[[Outcomes], tuple[Verdict, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Arms, and the claims about them."""

    name: str
    title: str
    """What it shows, in a sentence."""
    arms: tuple[Arm, ...]
    reference: str
    """Name of the arm that the others are compared to."""
    judge: Judge
    papers: tuple[str, ...] = ()
    """Headings of the columns of papers' figures; empty: nothing is compared with a paper."""
    remarks: tuple[str, ...] = ()
    """What a reader of the table has to know, a paragraph each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An experiment as the catalogue names it."""

    name: str
    title: str
    make: Callable[[int], Experiment]
    """Of so many nominal inner steps."""
    num_steps: int
    """By default."""
    minutes_a_seed: float
    """Core-minutes for one seed at the default length, on one core of an x86-64 server."""


def at_most(
    outcomes: Outcomes, arm: str, *, over: str, percent: float, min_seeds: int = 3
) -> Verdict:
    """Judge whether the final loss of `arm` is at most so much above that of `over`.

    The mean over the seeds decides, each seed compared with itself.
    """
    excess = outcomes.excess_percent(arm, over)
    is_known = excess is not None and len(excess.values) >= min_seeds
    return Verdict(
        claim=f"{arm} against {over}",
        threshold=f"at most {percent:+g} %",
        seen=describe_excess(excess),
        is_met=excess.mean <= percent if excess is not None and is_known else None,
    )


def below(outcomes: Outcomes, arm: str, *, than: str, min_seeds: int = 3) -> Verdict:
    """Judge whether the final loss of `arm` is below that of `than` for every seed."""
    excess = outcomes.excess_percent(arm, than)
    is_known = excess is not None and len(excess.values) >= min_seeds
    return Verdict(
        claim=f"{arm} against {than}",
        threshold="below, for every seed",
        seen=describe_excess(excess),
        is_met=max(excess.values) < 0.0 if excess is not None and is_known else None,
    )


def fewer_bytes(outcomes: Outcomes, arm: str, *, than: str, times: float) -> Verdict:
    """Judge whether a worker of `arm` sends so many times fewer bytes than one of `than`."""
    seeds = outcomes.seeds(arm, than)
    ratios = [
        outcomes.last(than, seed).bytes_per_worker / outcomes.last(arm, seed).bytes_per_worker
        for seed in seeds
    ]
    return Verdict(
        claim=f"bytes sent: {arm} against {than}",
        threshold=f"at least {times:g} times fewer",
        seen=f"{min(ratios):.0f} times fewer" if ratios else "not finished",
        is_met=min(ratios) >= times if ratios else None,
    )


def describe_excess(excess: Spread | None) -> str:
    """Return the mean, and what the seeds have one by one."""
    if excess is None:
        return "not finished"
    each = ", ".join(f"{value:+.2f}" for value in excess.values)
    return f"{excess.mean:+.2f} % ({each})"
