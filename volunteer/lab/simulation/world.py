"""Virtual time and a faulty network: a heap of what happens next, drawn from one seed.

Runs in: simulation. Whatever takes time or goes wrong is drawn here, so one seed is one history.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

POOL_DRAWS = 8192
"""Delays are drawn in advance and picked from: a lognormal draw costs ten times as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """How messages travel. Seconds; the usual net of ROUNDS.md."""

    median_s: float = 1.0
    sigma: float = 1.0
    """Of the lognormal delay; messages overtake each other by it."""
    loss: float = 0.05
    duplicates: float = 0.02
    fetch_s: float = 3.0
    """Median time to fetch a blob."""
    state_fetch_s: float = 12.0
    sync_s: float = 10.0
    """Period of the exchange with one random neighbour (rule 25)."""
    has_gossip: bool = True
    mesh_degree: int = 0
    """Neighbours that gossip goes through; 0: an author reaches everyone by itself."""
    most_blocked: float = 0.0
    """Links that are cut at random: the part is redrawn between 0 and this, about each round."""


USUAL = Net()
CLEAN = Net(sigma=0.3, loss=0.0, duplicates=0.0)
HOSTILE = Net(median_s=4.0, sigma=1.5, loss=0.3, duplicates=0.05, sync_s=30.0, most_blocked=0.95)


_Entry = tuple[float, int, Callable[[], None]]
"""(when, place in the order, what to do)."""


@dataclass(slots=True)
class _Series:
    """Things that happen one after the other, of which the heap holds the next."""

    heap: list[_Entry]
    due: list[tuple[float, int, int]]
    """(when, place in the order, which), the last one first."""
    act: Callable[[int], None]

    def __call__(self) -> None:
        _, _, i = self.due.pop()
        if self.due:
            when_s, order, _ = self.due[-1]
            entry: _Entry = (when_s, order, self)
            heapq.heappush(self.heap, entry)
        self.act(i)


@dataclass(slots=True)
class World:
    """Time, chance, and which links are up."""

    rng: random.Random
    net: Net
    now_s: float = 0.0
    blocked: set[frozenset[str]] = field(default_factory=set)
    partition: dict[str, int] = field(default_factory=dict)
    """Peer -> island; peers that are not named share island 0."""
    is_over: bool = False
    """Set to end `run_until` early."""
    _heap: list[_Entry] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _delays: list[float] = field(default_factory=list)
    _delays_of: Net | None = None

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do `act` after `delay_s`."""
        heapq.heappush(self._heap, (self.now_s + delay_s, next(self._order), act))

    def after_each(self, delays_s: Sequence[float], act: Callable[[int], None]) -> None:
        """Call `act(i)` after each `delays_s[i]`; only the next one waits in the heap.

        In the order in which `after` for each of them would have it.
        """
        order, now_s = self._order, self.now_s
        due = [(now_s + delay_s, next(order), i) for i, delay_s in enumerate(delays_s)]
        if due:
            due.sort(reverse=True)
            when_s, place, _ = due[-1]
            entry: _Entry = (when_s, place, _Series(self._heap, due, act))
            heapq.heappush(self._heap, entry)

    def run_until(self, end_s: float) -> None:
        """Let everything happen that is due before `end_s`, or until `is_over`."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= end_s:
            self.now_s, _, act = pop(heap)
            act()
            if self.is_over:
                return
        self.now_s = end_s

    def delay_s(self) -> float:
        """Draw how long one message takes."""
        if self._delays_of is not self.net:
            self._delays_of = self.net
            log_median, draw = math.log(self.net.median_s), self.rng.lognormvariate
            self._delays = [draw(log_median, self.net.sigma) for _ in range(POOL_DRAWS)]
        return self._delays[int(self.rng.random() * POOL_DRAWS)]

    def fetch_s(self, median_s: float) -> float:
        """Draw how long one transfer takes."""
        return self.rng.lognormvariate(math.log(median_s), 0.4)

    def are_linked(self, one: str, other: str) -> bool:
        """Return whether messages pass between two peers now."""
        if self.blocked and frozenset((one, other)) in self.blocked:
            return False
        islands = self.partition
        return not islands or islands.get(one, 0) == islands.get(other, 0)

    def is_whole(self, peers: Collection[str]) -> bool:
        """Return whether each of `peers` can be heard by each other, through others if need be."""
        if not self.blocked and not self.partition:
            return True
        left = set(peers)
        reached = [left.pop()] if left else []
        while reached and left:
            here = reached.pop()
            found = {other for other in left if self.are_linked(here, other)}
            left -= found
            reached += found
        return not left

    def send(self, sender: str, receiver: str, deliver: Callable[[], None]) -> None:
        """Deliver late, never, or twice."""
        if not self.are_linked(sender, receiver):
            return
        copies = 2 if self.rng.random() < self.net.duplicates else 1
        for _ in range(copies):
            if self.rng.random() >= self.net.loss:
                self.after(self.delay_s(), deliver)

    def redraw_blocked(self, peers: Sequence[str]) -> None:
        """Cut links anew."""
        part = self.rng.uniform(0.0, self.net.most_blocked)
        pairs = itertools.combinations(peers, 2)
        self.blocked = {frozenset(p) for p in pairs if self.rng.random() < part}
