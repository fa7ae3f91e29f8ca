"""Which blobs go first when peers ask for several at once: those of the round that is on.

Runs in: agent. Pure.
"""

from __future__ import annotations

from p2p.flow import Priority
from volunteer.rounds.machine import Machine


def priority_of(machine: Machine, blob_id: str) -> Priority:
    """Return the priority of a blob that a peer asks for.

    Urgent are the contributions that the next commit may list, or that a child of the tip lists:
    without them nobody gets on. All else, states above all, is for those who catch up.
    """
    known, tip = machine.known, machine.tip
    if tip is None:
        return Priority.BULK
    bases = [tip, known.facts[tip].parent_id, *known.children.get(tip, ())]
    on_bases = (i for base in bases for i in known.based_on.get(base, ()))
    is_current = any(known.contributions[i].blob_id == blob_id for i in on_bases)
    return Priority.URGENT if is_current else Priority.BULK
