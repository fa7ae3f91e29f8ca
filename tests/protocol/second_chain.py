"""A second implementation of what a chain says, written from PROTOCOL.md 14 alone.

Every fact is found anew from the whole chain, with no thought for speed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from blake3 import blake3

from tests.protocol.second_wire import MalformedError


@dataclass(frozen=True)
class Work:
    """A contribution, or a farewell: who, on what, at what height."""

    record_id: str
    author: str
    base: str
    height: int
    vote: bool = False
    harmful: tuple[str, ...] | None = None


@dataclass
class Commit:
    commit_id: str
    parent: Commit | None
    height: int
    rank: int = 0
    proposer: str = ""
    listed: list[Work] = field(default_factory=list)
    farewells: list[Work] = field(default_factory=list)
    marked: tuple[str, ...] = ()
    # what is found
    away: frozenset[str] = frozenset()
    demoted: dict[str, int] = field(default_factory=dict)
    rosters: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    since: int = 0
    resets: int = 0
    last_reset: int = 0
    certified: int = 0
    final: int = 0
    strikes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    excluded: dict[str, int] = field(default_factory=dict)
    """Peer -> the last height at which it is."""

    def is_out(self, peer: str) -> bool:
        """Whether a child gives `peer` no weight."""
        return self.excluded.get(peer, -1) > self.height

    def down(self) -> list[Commit]:
        """Return the chain from here to the genesis."""
        return [self, *(self.parent.down() if self.parent else [])]


@dataclass
class Rules:
    run_id: str
    module_id: str
    publisher: str
    expiry_rounds: int
    demote_rounds: int
    max_contributions: int
    quorum: tuple[int, int]

    def genesis(self, genesis_id: str) -> Commit:
        members = frozenset({self.publisher} - {""})
        return Commit(genesis_id, None, 0, rosters=(members, members))

    # 14.2 to 14.7

    def seen(self, c: Commit) -> dict[str, int]:
        found = {self.publisher: 0} if self.publisher else {}
        for below in reversed(c.down()):
            found |= {work.author: below.height for work in below.listed}
        oldest = c.height - max(self.expiry_rounds, 3)
        return {a: h for a, h in found.items() if h > oldest or (h == 0 and c.height == 0)}

    def active(self, c: Commit) -> frozenset[str]:
        oldest = c.height - self.expiry_rounds
        return self.at_hand(c, oldest)

    def expected(self, c: Commit) -> frozenset[str]:
        return self.at_hand(c, c.height - 3)

    def at_hand(self, c: Commit, oldest: int) -> frozenset[str]:
        here = {a for a, h in self.seen(c).items() if h > oldest} - c.away
        return frozenset(a for a in here if not c.is_out(a))

    def spread(self, c: Commit, peer: str) -> bytes:
        parent = c.parent.commit_id if c.parent else ""
        text = f"{self.run_id}/{self.module_id}/{c.height}/{parent}/{peer}"
        return blake3(text.encode()).digest()

    def order(self, c: Commit) -> list[str]:
        active, expected = self.active(c), self.expected(c)
        return sorted(
            active,
            key=lambda p: (
                c.demoted.get(p, -1) >= c.height,
                p not in expected and 2 * len(expected) >= len(active),
                self.spread(c, p),
            ),
        )

    def rank(self, c: Commit, peer: str) -> int:
        order = self.order(c)
        if peer in order:
            return order.index(peer)
        return len(order) + self.spread(c, peer)[0] % 4

    def on_probation(self, parent: Commit, author: str) -> bool:
        if author in parent.excluded and parent.height + 1 - parent.excluded[author] < 6:
            return True
        return sum(any(w.author == author for w in c.listed) for c in parent.down()) < 5

    def is_quorum(self, c: Commit, peers: set[str]) -> bool:
        numerator, denominator = self.quorum
        return all(len(r & peers) * denominator > len(r) * numerator for r in c.rosters)

    # 14.1

    def verify(self, c: Commit) -> None:
        """Check that a commit is valid on its parent."""
        p = c.parent
        if p is None or c.height != p.height + 1:
            raise MalformedError("height")
        if not 1 <= len(c.listed) <= self.max_contributions:
            raise MalformedError("number of contributions")
        if c.rank != self.rank(p, c.proposer):
            raise MalformedError("rank")
        bases = {p.commit_id: p.height}
        if p.parent:
            bases[p.parent.commit_id] = p.parent.height
        before = {(work.author, work.base) for work in p.listed}
        ids = {work.record_id for work in p.listed}
        for work in c.listed:
            key = (work.author, work.base)
            if bases.get(work.base) != work.height or work.record_id in ids or key in before:
                raise MalformedError("contribution")
            before.add(key)
        if any(bases.get(work.base) != work.height for work in c.farewells):
            raise MalformedError("farewell")
        authors = {work.author for work in c.listed if not p.is_out(work.author)}
        marked = {work.author for work in c.listed if work.record_id in c.marked}
        if len(marked) > (len(authors) // 4 if len(authors) >= 5 else 0) or not marked <= authors:
            raise MalformedError("marks")

    # 14.3, 14.5, 14.8 to 14.11

    def apply(self, c: Commit) -> Commit:
        """Find what a valid commit says."""
        p = c.parent
        assert p is not None
        authors = {work.author for work in c.listed}
        leavers = {
            gone.author
            for gone in c.farewells
            if not any(w.author == gone.author and w.height > gone.height for w in c.listed)
        }
        c.away = frozenset((p.away - authors) | leavers)
        c.demoted = dict(p.demoted)
        for missed in self.order(p)[: c.rank]:
            c.demoted[missed] = c.height + self.demote_rounds - 1
        c.rosters, c.since = p.rosters, p.since
        c.resets, c.last_reset = p.resets, p.last_reset
        c.certified, c.final = p.certified, p.final
        for x in self.certifies(c):
            c.certified = max(c.certified, x.height)
            if x.parent and self.is_prompt(x):
                c.final = max(c.final, x.parent.height)
        self.strike(c, p)
        self.move_rosters(c, p)
        return c

    # 14.12, 14.13

    def blamed(self, c: Commit, p: Commit) -> set[str]:
        def lot(peer: str) -> bytes:
            return blake3(f"allmende/scorer/1\0{p.commit_id}/{peer}".encode()).digest()

        scorers = sorted(self.active(p), key=lot)[:5]
        verdicts = [w for w in c.listed if w.base == p.commit_id and w.author in scorers]
        found = set()
        for work in p.listed:
            says = [
                work.record_id in v.harmful
                for v in verdicts
                if v.harmful is not None and v.author != work.author
            ]
            if sum(says) >= 3 and 4 * sum(says) >= 3 * len(says):
                found.add(work.author)
        authors = {work.author for work in p.listed}
        return found if 5 <= len(authors) >= 4 * len(found) else set()

    def strike(self, c: Commit, p: Commit) -> None:
        strikes = {a: bits for a, bits in p.strikes.items() if a in self.seen(c)}
        for author in self.blamed(c, p):
            strikes[author] = (*strikes.get(author, (0,))[:-1], 1)
        marked = {work.author for work in c.listed if work.record_id in c.marked}
        for author in {work.author for work in c.listed}:
            if author in strikes or author in marked:
                strikes[author] = (*strikes.get(author, ()), int(author in marked))[-3:]
        c.excluded = dict(p.excluded)
        c.strikes = {
            a: b for a, b in strikes.items() if any(b) and not p.excluded.get(a, -1) >= c.height
        }
        for author in sorted(a for a, bits in c.strikes.items() if sum(bits) >= 2):
            out = {a for a, last in c.excluded.items() if last > c.height} | {author}
            if all(author not in r or 4 * len(out & r) <= len(r) for r in p.rosters):
                c.excluded[author] = c.height + 24
                del c.strikes[author]

    def votes(self, c: Commit, base: Commit | None) -> set[str]:
        return {w.author for w in c.listed if w.vote and base and w.base == base.commit_id}

    def is_prompt(self, c: Commit) -> bool:
        """Whether c certifies its parent promptly."""
        return c.parent is not None and self.is_quorum(c.parent, self.votes(c, c.parent))

    def certifies(self, c: Commit) -> list[Commit]:
        p = c.parent
        assert p is not None
        found = [p] if self.is_prompt(c) else []
        late = self.votes(p, p.parent) | self.votes(c, p.parent)
        if p.parent and self.is_quorum(p.parent, late):
            found.append(p.parent)
        return found

    def roster(self, c: Commit, active: frozenset[str]) -> frozenset[str]:
        if len(active) <= self.max_contributions:
            return active
        return frozenset(self.order(c)[: max(1, self.max_contributions // 3)])

    def move_rosters(self, c: Commit, p: Commit) -> None:
        active = self.active(c)
        if not active:
            return
        if c.final > p.final and c.final >= p.since:
            pair = (p.rosters[1], self.roster(c, active))
            if pair != p.rosters:
                c.rosters, c.since = pair, c.height
            return
        is_late = c.height - max(c.final, p.last_reset) >= self.expiry_rounds
        is_lost = is_late and not self.is_quorum(p, set(active))
        if not p.rosters[1] or is_lost:
            roster = self.roster(c, active)
            c.rosters, c.since = (roster, roster), c.height
            c.resets, c.last_reset = p.resets + 1, c.height
