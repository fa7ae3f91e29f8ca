"""A chain that members go on with, and strangers that sign whatever they can."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from tests.volunteer.rounds.chain_builder import RUN_ID, ChainBuilder, hash_of
from volunteer.rounds.chain import rank_of
from volunteer.rounds.knowledge import Knowledge
from volunteer.rounds.records import (
    Commit,
    Contribution,
    Leaving,
    Record,
    encode_body,
    record_id_of,
)

Item = tuple[str, Record]


def item(record: Record) -> Item:
    return record_id_of(encode_body(record)), record


def contribution(author: str, base: str, height: int, **changes: object) -> Contribution:
    record = Contribution(
        run_id=RUN_ID,
        module_id="dense",
        round_index=height,
        author=author,
        base=base,
        vote=True,
        blob_id=hash_of(author),
        blob_bytes=100,
        codec="int4",
        codec_version=1,
        tokens=1,
    )
    return msgspec.structs.replace(record, **changes)


def commit(known: Knowledge, parent: str, author: str, listed: tuple[str, ...]) -> Commit:
    """Return a valid commit of somebody that the chain need not know."""
    facts = known.facts[parent]
    return Commit(
        run_id=RUN_ID,
        module_id="dense",
        round_index=facts.height + 1,
        parent=parent,
        rank=rank_of(known.rules, facts, author),
        proposer=author,
        contributions=tuple(sorted(listed)),
        state_hash=hash_of(author),
    )


class Disk:
    """What the record book does with what a `Knowledge` takes in and forgets."""

    def __init__(self, known: Knowledge) -> None:
        self.known = known
        self.records: dict[str, Record] = {}
        self.most = 0
        """The most records that were ever there."""

    def take(self, record_id: str, record: Record) -> None:
        if record_id in self.records:
            return
        if self.known.bounds.problem(record_id, record):  # type: ignore[arg-type]
            return
        self.records[record_id] = record
        self.known.add(record_id, record)
        for forgotten in self.known.bounds.take_forgotten():
            self.records.pop(forgotten, None)
        self.most = max(self.most, len(self.records))


class Strangers:
    """Endless identities, each of which signs a record or two; all of it is valid alone."""

    def __init__(self, known: Knowledge, seed: int = 0) -> None:
        self._known = known
        self._rng = random.Random(seed)
        self._number = 0
        self._tips: list[str] = []

    def _name(self) -> str:
        self._number += 1
        return f"stranger-{self._number}"

    def records(self, count: int) -> Iterator[Item]:
        """Yield `count` records, each made on what is known at that moment."""
        made = 0
        while made < count:
            for one in self._draw():
                yield one
                made += 1

    def _draw(self) -> Iterator[Item]:
        kind = self._rng.random()
        base = self._somewhere()
        height = self._known.facts[base].height
        if kind < 0.5:
            yield item(contribution(self._name(), base, height))
        elif kind < 0.6:
            yield item(contribution(self._name(), hash_of(self._name()), height))
        elif kind < 0.65:
            leaving = Leaving(
                run_id=RUN_ID, module_id="dense", round_index=height, author=self._name(), base=base
            )
            yield item(leaving)
        elif kind < 0.9:
            yield from self._propose(base)
        elif kind < 0.95:
            yield item(commit(self._known, base, self._name(), (hash_of(self._name()),)))
        else:
            draft = commit(self._known, base, self._name(), (hash_of("a"), hash_of("b")))
            yield item(msgspec.structs.replace(draft, parent=hash_of(self._name())))

    def _somewhere(self) -> str:
        """Return a commit: of the chain, mostly near its end, or of strangers' own trees."""
        self._tips = [tip for tip in self._tips[-20:] if tip in self._known.facts]
        if self._tips and self._rng.random() < 0.4:
            return self._rng.choice(self._tips)
        chain = self._known.header_choice.current()
        return chain[-1 - min(len(chain) - 1, int(self._rng.expovariate(0.4)))]

    def _propose(self, base: str) -> Iterator[Item]:
        """Yield a commit before what it lists, so that this is needed."""
        facts = self._known.facts[base]
        names = [self._name() for _ in range(self._rng.choice((1, 1, 4)))]
        listed = [item(contribution(name, base, facts.height)) for name in names]
        made = item(commit(self._known, base, names[0], tuple(i for i, _ in listed)))
        yield made
        yield from listed
        self._tips.append(made[0])


def grown(num_rounds: int) -> ChainBuilder:
    """Return a chain of three members; nobody is its owner, so nothing is kept for being own."""
    chain = ChainBuilder()
    chain.rounds(chain.genesis, "abc", num_rounds)
    return chain
