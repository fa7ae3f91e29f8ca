"""How a record spreads: from its author to everyone, or through a mesh of neighbours.

Runs in: simulation. GossipSub keeps a mesh of about 8 neighbours and passes on what is new; each
record crosses nearly every link of the mesh once in either direction, and who gets it twice drops
it. Here the first arrivals are computed when a record is sent (shortest paths over drawn delays),
and the copies that nobody uses are counted only.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from volunteer.lab.simulation.world import World

Neighbours = dict[str, tuple[str, ...]]


def draw_mesh(names: Sequence[str], degree: int, rng: random.Random) -> Neighbours:
    """Return a connected graph in which everyone has about `degree` neighbours.

    Args:
        names: the peers.
        degree: wanted number of neighbours; all are neighbours where there are no more peers.
        rng: chance.
    """
    links: dict[str, set[str]] = {name: set() for name in names}
    order = list(names)
    for _ in range(max(1, degree // 2)):
        rng.shuffle(order)  # a ring through all: it connects everyone, and adds two neighbours
        for one, other in zip(order, order[1:] + order[:1], strict=True):
            if one != other:
                links[one].add(other)
                links[other].add(one)
    return {name: tuple(sorted(others)) for name, others in links.items()}


@dataclass(slots=True)
class Mesh:
    """Who passes records on to whom."""

    world: World
    neighbours: Neighbours
    is_up: Callable[[str], bool]
    are_cut_off: Callable[[str, str], bool]
    """Whether one of the two wants nothing from the other."""
    num_copies: int = field(default=0)
    """Of the last record that was spread: how often it was sent."""

    def spread(self, origin: str) -> dict[str, float]:
        """Return when each peer that a record reaches gets it first, in seconds from now."""
        world, loss, heappush = self.world, self.world.net.loss, heapq.heappush
        chance, delay_s, copies = world.rng.random, world.delay_s, 0
        are_cut_off, are_linked = self.are_cut_off, world.are_linked
        reached: dict[str, float] = {}
        heap = [(0.0, origin, "")]
        while heap:
            at_s, peer, giver = heapq.heappop(heap)
            if peer in reached:
                continue
            reached[peer] = at_s
            if not self.is_up(peer):
                continue
            for neighbour in self.neighbours[peer]:
                if neighbour == giver or are_cut_off(peer, neighbour):
                    continue
                copies += 1
                is_new = neighbour not in reached and chance() >= loss
                if is_new and are_linked(peer, neighbour):
                    heappush(heap, (at_s + delay_s(), neighbour, peer))
        del reached[origin]
        self.num_copies = copies
        return reached
