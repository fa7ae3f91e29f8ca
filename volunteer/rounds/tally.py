"""How often each author was listed on a chain: one map a height, at the cost of what changed.

Runs in: agent, simulation. Pure.

Every commit has such a map, and on a long chain with many authors a copy for each would grow with
the product of both: 2,000 heights at which a newcomer comes each are 2 million entries, and a
stranger's chain can name 32 newcomers a height. So a map consists of layers, each at least twice as
large as the next, and a new one shares all layers that it does not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping


class Tally(Mapping[str, int]):
    """Author -> count. Never changes; `counting` makes the next one.

    Cost: an entry is copied about log2(size) times in all; a look-up asks as many layers.
    """

    __slots__ = ("_layers", "_size")

    def __init__(self, layers: tuple[Mapping[str, int], ...] = (), size: int = 0) -> None:
        """Consist of `layers`, the newest last, which name `size` authors in all."""
        self._layers = layers
        self._size = size

    def counting(self, authors: Iterable[str], *, up_to: int) -> Tally:
        """Return the tally after each of `authors` was listed once more; none above `up_to`."""
        top: dict[str, int] = {}
        size = self._size
        for author in authors:
            count = self.get(author)
            size += count is None
            top[author] = min(up_to, (count or 0) + 1)
        layers = list(self._layers)
        while layers and len(layers[-1]) < 2 * len(top):
            top = {**layers.pop(), **top}
        return Tally((*layers, top), size)

    def __getitem__(self, author: str) -> int:
        """Return the count of an author; KeyError if it was never listed."""
        for layer in reversed(self._layers):
            if author in layer:
                return layer[author]
        raise KeyError(author)

    def __iter__(self) -> Iterator[str]:
        """Yield every author once."""
        return iter({author: None for layer in self._layers for author in layer})

    def __len__(self) -> int:
        """Count the authors."""
        return self._size
