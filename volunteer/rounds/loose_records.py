"""Contributions and farewells that no commit lists: who may stay, and who has to go.

Runs in: agent, simulation. Pure.

Identities cost nothing, so what anyone may sign needs a bound that no number of identities moves.
Records are told apart by what the chain says of their author, and each kind has room of its own,
so that strangers push out strangers only:

* *members* of the chain where the record belongs: in its rosters, or listed lately;
* *former members*: listed once, which cost them work;
* *newcomers*: never listed. No roster that a choice of branches could ask ever named them, so that
  forgetting what they sent changes no choice (ROUNDS.md rule 17);
* *orphans*: what they build on is not here, so nobody can say.

What is listed by a commit, needed by one that waits, or our own, is none of these and has no limit
here: it is bounded by commits. What was forgotten and turns out to be listed is asked for by name.

Among newcomers of one base the seats are drawn by a hash that is keyed with a secret of this
member. A public hash would be ground: who has a million keys would always hold the best 128. With
a secret one, all that a stranger can do is send more: of n newcomers whose records reach us for a
base, each has a seat with the same chance, 128 / n. First come, first served would give the slower
of them nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

MAX_PER_MEMBER_AND_BASE = 16
"""Records of one member on one base. An honest one has one contribution and one farewell; two are
proof that it is not, but each may have been shown to somebody else, who lists it in good faith."""
MAX_PER_OUTSIDER_AND_BASE = 2
"""Of anyone else: more would be more lots in the draw for a seat."""
OUTSIDERS_PER_BASE_FACTOR = 4
"""Seats for newcomers on a base, and for former members: so many times `max_contributions`."""
MAX_MEMBER_RECORDS = 4096
MAX_FORMER_RECORDS = 1024
MAX_NEWCOMER_RECORDS = 1024
MAX_ORPHANS = 1024


class Standing(Enum):
    """What the chain says of an author, with the sentence for one too many."""

    MEMBER = "too many unlisted records of members"
    FORMER = "too many unlisted records of former members"
    NEWCOMER = "too many unlisted records of newcomers"
    ORPHAN = "too many records whose base is not here"


class Ticket(NamedTuple):
    """What decides about one record."""

    record_id: str
    author: str
    base: str
    height: int
    standing: Standing
    key: bytes
    """Among equals the lowest stays."""


@dataclass(slots=True)
class _Room:
    """The seats for one standing."""

    most: int
    most_per_base: int
    is_by_height: bool
    """Whether those on the lowest base go first; else the key alone decides."""
    seats: dict[str, dict[str, Ticket]] = field(default_factory=dict)
    """Base -> record id -> ticket."""
    size: int = 0

    def victim(self, ticket: Ticket, is_on_chain: Callable[[str], bool]) -> str | None:
        """Return who has to go if `ticket` comes, perhaps itself; None while there is room."""
        here = self.seats.get(ticket.base, {})
        if len(here) >= self.most_per_base:
            return _worst([*here.values(), ticket])
        if self.size < self.most:
            return None
        if not self.is_by_height:
            return _worst([ticket, *(t for seats in self.seats.values() for t in seats.values())])
        heights = {base: next(iter(seats.values())).height for base, seats in self.seats.items()}
        heights.setdefault(ticket.base, ticket.height)
        base = min(heights, key=lambda b: (is_on_chain(b), heights[b], b))
        rivals = list(self.seats.get(base, {}).values())
        return _worst([*rivals, ticket] if base == ticket.base else rivals)


def _worst(tickets: list[Ticket]) -> str:
    return max(tickets, key=lambda t: (t.key, t.record_id)).record_id


@dataclass(slots=True)
class LooseRecords:
    """The seats of all records that no commit accounts for."""

    max_contributions: int
    is_on_chain: Callable[[str], bool]
    """Whether a commit lies on the best chain known; who builds beside it goes first."""
    _rooms: dict[Standing, _Room] = field(init=False)
    _tickets: dict[str, Ticket] = field(default_factory=dict)
    _num_of: dict[tuple[str, str], int] = field(default_factory=dict)
    """(author, base) -> records with a seat."""

    def __post_init__(self) -> None:
        """Set up the rooms."""
        outsiders = OUTSIDERS_PER_BASE_FACTOR * self.max_contributions
        self._rooms = {
            Standing.MEMBER: _Room(MAX_MEMBER_RECORDS, MAX_MEMBER_RECORDS, is_by_height=True),
            Standing.FORMER: _Room(MAX_FORMER_RECORDS, outsiders, is_by_height=True),
            Standing.NEWCOMER: _Room(MAX_NEWCOMER_RECORDS, outsiders, is_by_height=True),
            Standing.ORPHAN: _Room(MAX_ORPHANS, MAX_ORPHANS, is_by_height=False),
        }

    def __len__(self) -> int:
        """Count the records with a seat."""
        return len(self._tickets)

    def problem(self, ticket: Ticket) -> str:
        """Return why there is no seat for a record, as a sentence; empty if there is one."""
        is_member = ticket.standing is Standing.MEMBER
        most = MAX_PER_MEMBER_AND_BASE if is_member else MAX_PER_OUTSIDER_AND_BASE
        if self._num_of.get((ticket.author, ticket.base), 0) >= most:
            return "its author has too many records on that base"
        if self._rooms[ticket.standing].victim(ticket, self.is_on_chain) == ticket.record_id:
            return ticket.standing.value
        return ""

    def seat(self, ticket: Ticket) -> str | None:
        """Give a record that has no problem its seat; return whose it was, None if free."""
        room = self._rooms[ticket.standing]
        victim = room.victim(ticket, self.is_on_chain)
        if victim is not None:
            self.leave(victim)
        room.seats.setdefault(ticket.base, {})[ticket.record_id] = ticket
        room.size += 1
        self._tickets[ticket.record_id] = ticket
        who = (ticket.author, ticket.base)
        self._num_of[who] = self._num_of.get(who, 0) + 1
        return victim

    def leave(self, record_id: str) -> bool:
        """Free the seat of a record, if it has one; return whether it had."""
        ticket = self._tickets.pop(record_id, None)
        if ticket is None:
            return False
        room = self._rooms[ticket.standing]
        room.size -= 1
        del room.seats[ticket.base][record_id]
        if not room.seats[ticket.base]:
            del room.seats[ticket.base]
        who = (ticket.author, ticket.base)
        self._num_of[who] -= 1
        if not self._num_of[who]:
            del self._num_of[who]
        return True

    def on(self, base: str) -> list[str]:
        """Return the records on a base that have a seat, sorted."""
        return sorted(i for room in self._rooms.values() for i in room.seats.get(base, ()))
