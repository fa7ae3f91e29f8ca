"""The books: what has become of each piece of our own work.

Runs in: agent, simulation, trainer's tests. Pure, on ids; training/carrying.py is the vector half.

Pending work is recomputed from the chain and never adjusted by events (rule 28), so that a branch
switch, a restart or a late listing cannot count a step twice or lose it. ROUNDS.md rules 27-29.

The new part of contribution c is N_c = Q_c - sum of N_k over k in carries(c); `carries` is
transitive, so the new parts of all own contributions are disjoint and add up to all that was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum

from volunteer.rounds.records import Contribution

MAX_CARRIED_AFTER_SWITCH = 3


class WorkState(Enum):
    """Exactly one holds for the new part of each own contribution (invariant I4)."""

    LISTED = "listed"
    """The chain lists it, or a contribution that carries it."""
    IN_FLIGHT = "in_flight"
    """A descendant of the tip may still list it, or one that carries it."""
    PENDING = "pending"
    """It can no longer be listed: it belongs into the local weights, to be sent again."""
    DROPPED = "dropped"
    """Given up, with a recorded reason."""


def work_states(
    own: Mapping[str, Contribution],
    dropped: Iterable[str],
    is_listed: Callable[[str], bool],
    is_in_flight: Callable[[str], bool],
) -> dict[str, WorkState]:
    """Return the state of every own contribution's new part on the tip's chain.

    Args:
        own: own contributions by id.
        dropped: ids of work given up.
        is_listed: whether the tip's chain lists this id.
        is_in_flight: whether a descendant of the tip may still list this id.
    """
    listed = {i for i in own if is_listed(i)}
    flying = {i for i in own if i not in listed and is_in_flight(i)}
    covered = listed | {k for i in listed for k in own[i].carries}
    covered_in_flight = flying | {k for i in flying for k in own[i].carries}
    gone = set(dropped)
    states = {}
    for contribution_id in own:
        if contribution_id in covered:
            state = WorkState.LISTED
        elif contribution_id in covered_in_flight:
            state = WorkState.IN_FLIGHT
        elif contribution_id in gone:
            state = WorkState.DROPPED
        else:
            state = WorkState.PENDING
        states[contribution_id] = state
    return states


def pending_ids(states: Mapping[str, WorkState], own: Mapping[str, Contribution]) -> list[str]:
    """Return what is to be carried, the oldest first."""
    pending = [i for i, state in states.items() if state is WorkState.PENDING]
    return sorted(pending, key=lambda i: (own[i].round_index, i))


def to_drop(pending: list[str], limit: int = MAX_CARRIED_AFTER_SWITCH) -> list[str]:
    """Return the oldest of `pending` beyond `limit` (rule 29: 3 after a switch)."""
    return pending[: max(0, len(pending) - limit)]


def new_tokens(own: Mapping[str, Contribution]) -> dict[str, int]:
    """Return, for each own contribution, the tokens whose work it was the first to contain.

    `tokens` of a contribution includes those of all that it carries, so the new ones are what the
    carried ones do not account for.
    """
    new: dict[str, int] = {}
    for root in own:
        stack = [root]
        while stack:
            top = stack[-1]
            # Not by height: after a switch, what is carried may be higher than its carrier.
            open_ids = [k for k in own[top].carries if k in own and k not in new]
            if top in new:
                stack.pop()
            elif open_ids and len(stack) <= len(own):
                stack.extend(open_ids)
            else:
                new[top] = own[top].tokens - sum(new.get(k, 0) for k in own[top].carries)
                stack.pop()
    return new
