"""How a simulated run went.

Runs in: simulation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from volunteer.lab.simulation.member import Member

DIFFERENCE_HEIGHTS = 3
"""Whose tip is one of so many highest commits of the tallest chain is on its head, or about to be:
a peer on a slow link moves there a round later."""


@dataclass(slots=True)
class Report:
    """How a run went."""

    height: int
    ideal_height: float
    heads: Counter[str]
    forks_per_100: float
    mean_final_lag: float
    most_final_lag: int
    num_finals: int
    """How often a member came to hold a commit final."""
    num_dropped: int
    num_reset_conflicts: int
    listed_fraction: float
    """Tokens listed on the final chain, of all that were kept."""
    disagreed_s: float
    """The longest time for which tips of members that were up were not on one chain."""
    disagreed_whole_s: float
    """The longest time of that in which the net was whole all the time (I6)."""
    healed_after_s: float
    """From the end of all trouble until everyone had the same head."""
    num_bans: int
    """A member counts each peer that it has cut off."""
    num_excluded: int
    """Members that were excluded for bad work where an honest member stood."""
    num_struck: int
    """Honest members that once had a strike there."""
    num_refused: int
    """Envelopes that were no record of this version."""
    bytes_by_kind: Mapping[str, int] = field(default_factory=dict)
    """Sent by all members together."""
    num_blobs: int = 0
    """Fetched by all members together."""
    num_states: int = 0
    num_peer_rounds: int = 1
    """Members times heights: what bytes are divided by."""

    @property
    def progress(self) -> float:
        """Heights reached against the ideal."""
        return self.height / self.ideal_height

    @property
    def bytes_per_peer_round(self) -> dict[str, float]:
        """Bytes by kind that one member sends in one round."""
        kinds = sorted(self.bytes_by_kind)
        return {kind: self.bytes_by_kind[kind] / self.num_peer_rounds for kind in kinds}


def tallest_of(members: Iterable[Member]) -> Member:
    """Return the member that stands highest."""
    return max(members, key=lambda m: len(m.machine.work.chain))


def is_on_chain_of(member: Member, tallest: Member) -> bool:
    """Return whether the tip of `member` lies on the chain of `tallest`."""
    chain = tallest.machine.work.chain
    height = len(member.machine.work.chain) - 1
    return height < len(chain) and chain[height] == member.machine.tip


def heads_of(members: Iterable[Member], tallest: Member) -> Counter[str]:
    """Count tips; one of the tallest chain's highest commits counts as its head."""
    chain = tallest.machine.work.chain
    near = frozenset(chain[-DIFFERENCE_HEIGHTS:])
    tips = (member.machine.tip or "" for member in members)
    return Counter(chain[-1] if tip in near else tip for tip in tips)
