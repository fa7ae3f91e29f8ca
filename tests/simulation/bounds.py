"""How far the search in `explore` goes, and what it says it has seen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How far to look."""

    num_members: int = 3
    num_rounds: int = 3
    """Heights above the settled start."""
    most_commits: int = 99
    """Proposals in all."""
    most_visible_steps: int = 99
    """Records published in all."""
    num_crashes: int = 1
    are_answers_slow: bool = False
    """Whether encoding, proposing and applying end at any later step."""
    is_hearing_whole: bool = True
    """Whether what a record refers to is heard with it."""
    is_checking_merges: bool = False
    """Whether two states of a member that look alike are seen to go on alike."""
    most_states: int = 10_000_000
    most_seconds: float = 1e9


@dataclass(slots=True)
class Outcome:
    """What was seen."""

    num_states: int = 0
    """Combinations of members' states right after a visible step."""
    num_local_states: int = 0
    num_local_steps: int = 0
    num_published_sets: int = 0
    most_visible_steps: int = 0
    highest_final: int = 0
    """Above the settled start."""
    num_forked: int = 0
    """Sets of published records in which some commit has two children."""
    is_complete: bool = False
    seconds: float = 0.0
    broken: str = ""
    trace: tuple[str, ...] = ()
    """The visible steps that led to it."""
