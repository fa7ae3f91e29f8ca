"""Commits by peers that are in no roster, before their turn: a member waits.

Runs in: agent, simulation. Sans-IO. Beyond ROUNDS.md.

Whoever has a key may sign a commit on the newest one at once, and it is the only child there. If
members stood on it, one stranger could end every round before they have contributed to it: nothing
would be certified any more, and after `expiry_rounds` a reset would make a roster of whom the
stranger lists. So for a member of a commit's rosters, a child by somebody who is in neither counts
from the proposer's turn on by the member's own clock, or from when a member has contributed on it.
It is neither refused nor forgotten meanwhile. Who is no member follows whom the members follow.

On a branch where we do not stand no clock of ours runs: there its turn has come once we have known
it for as long as a round and its turn take. Without that, two who founded an open run alone, and
went over to each other's branch, would each be its only member, and neither would ever see the
other's branch go on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from volunteer.rounds.fork_choice import is_ancestor, subtree
from volunteer.rounds.knowledge import Knowledge
from volunteer.rounds.records import Commit
from volunteer.rounds.turn import Timing, least_turn_delay_s


@dataclass(slots=True)
class Outsiders:
    """Holds back what comes too early."""

    known: Knowledge
    timing: Timing
    _known_since_s: dict[str, float] = field(default_factory=dict)
    """Commit that is held back -> since when, on our own clock."""

    def holds_back(self, commit: Commit) -> bool:
        """Tell whether a commit that has just become valid is to wait for its turn."""
        rosters = self.known.facts[commit.parent].rosters
        members = rosters[0] | rosters[1]
        return self.known.me in members and commit.proposer not in members

    def let_in(self, tip: str | None, closed_at_s: float, now_s: float) -> bool:
        """Let those in whose turn has come, that members stand on, or that we have passed by.

        Args:
            tip: where this member stands; None: nowhere yet.
            closed_at_s: when the round there closed, or closes at the latest, on its own clock.
            now_s: that clock.

        Returns:
            Whether there were any.
        """
        known_since_s, num_before = self._known_since_s, len(self.known.early)
        self._known_since_s = {i: known_since_s.get(i, now_s) for i in self.known.early}
        for commit_id in sorted(self.known.early):
            commit = self.known.commits[commit_id]
            delay_s = self._delay_s(commit)
            if (
                now_s >= self._known_since_s[commit_id] + self.timing.round_s + delay_s
                or self._is_supported(commit_id)
                or (commit.parent == tip and now_s >= closed_at_s + delay_s)
                or (commit.parent != tip and self._is_passed(commit, tip))
            ):
                self.known.let_in(commit_id)
        return len(self.known.early) < num_before

    def _delay_s(self, commit: Commit) -> float:
        parent = self.known.facts[commit.parent]
        return least_turn_delay_s(self.known, parent, self.timing, commit.proposer)

    def _is_passed(self, commit: Commit, tip: str | None) -> bool:
        return tip is not None and is_ancestor(self.known.facts, commit.parent, tip)

    def _is_supported(self, commit_id: str) -> bool:
        """Tell whether a member of the rosters below has contributed on this, or further up."""
        rosters = self.known.facts[self.known.commits[commit_id].parent].rosters
        members = rosters[0] | rosters[1]
        return any(
            not members.isdisjoint(self.known.supporters.get(above, ()))
            for above in subtree(self.known.headers, commit_id)
        )
