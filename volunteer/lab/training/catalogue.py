"""The experiments by name. Runs in: lab. Pure."""

from __future__ import annotations

from volunteer.lab.training.experiment import Entry
from volunteer.lab.training.experiments import (
    acceptance,
    attackers,
    churn,
    comparison,
    opendiloco,
    overlap,
    sweep,
)
from volunteer.lab.training.results import LabError

ENTRIES: tuple[Entry, ...] = (
    opendiloco.ENTRY,
    sweep.ENTRY,
    comparison.ENTRY,
    acceptance.ENTRY_7,
    acceptance.ENTRY_8,
    overlap.ENTRY,
    churn.ENTRY,
    acceptance.ENTRY_11,
    attackers.ENTRY,
)
"""As they are listed: comparisons, then the acceptance tests by number."""


def find(name: str) -> Entry:
    """Return the experiment of this name.

    Raises:
        LabError: there is none.
    """
    for entry in ENTRIES:
        if entry.name == name:
            return entry
    known = ", ".join(entry.name for entry in ENTRIES)
    raise LabError(f"no experiment is called {name!r}; there are {known}")
