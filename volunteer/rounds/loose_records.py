"""Contributions and farewells that no commit lists: who may stay, and who has to go.

Runs in: agent, simulation. Pure.

Identities cost nothing, so what anyone may sign needs a bound that no number of identities moves.
Records are told apart by what the chain says of their author, and each kind has room of its own,
so that strangers push out strangers only:

* *members*: in the rosters of the chain where the record belongs;
* *listed*: once listed on it, which cost them work: former members, and those to come;
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

import bisect
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

MAX_PER_MEMBER_AND_BASE = 16
"""Records of one member on one base. An honest one has one contribution and one farewell; two are
proof that it is not, but each may have been shown to somebody else, who lists it in good faith."""
MAX_PER_OUTSIDER_AND_BASE = 2
"""Of anyone else: more would be more lots in the draw for a seat."""
OUTSIDERS_PER_BASE_FACTOR = 4
"""Seats for newcomers on a base, and for those once listed: so many times `max_contributions`."""
MAX_MEMBER_RECORDS = 4096
MAX_LISTED_RECORDS = 1024
MAX_NEWCOMER_RECORDS = 1024
MAX_ORPHANS = 1024


class Standing(Enum):
    """What the chain says of an author, with the sentence for one too many."""

    MEMBER = "too many unlisted records of members"
    LISTED = "too many unlisted records of former members and those to come"
    NEWCOMER = "too many unlisted records of newcomers"
    ORPHAN = "too many records whose base is not here"


Place = tuple[bool, int, str, int, str]


class Ticket(NamedTuple):
    """What decides about one record."""

    record_id: str
    author: str
    base: str
    standing: Standing
    place: Place
    """Who has the least goes first: does its base lie where we stand or below, height and id of its
    base (the same for all orphans, whose bases may be invented), minus its lot, record id."""


@dataclass(slots=True)
class _Room:
    """The seats for one standing."""

    most: int
    most_per_base: int
    seats: dict[str, dict[str, Ticket]] = field(default_factory=dict)
    """Base -> record id -> ticket."""
    order: list[Place] = field(default_factory=list)
    """The places of all tickets, sorted."""
    _order_on: dict[str, list[Place]] = field(default_factory=dict)
    """Base -> the same of the tickets on it."""

    def victim(self, ticket: Ticket) -> str | None:
        """Return who has to go if `ticket` comes, perhaps itself; None while there is room."""
        here = self._order_on.get(ticket.base)
        if here is not None and len(here) >= self.most_per_base:
            return min(here[0], ticket.place)[-1]
        if len(self.order) < self.most:
            return None
        return min(self.order[0], ticket.place)[-1]

    def put(self, ticket: Ticket) -> None:
        """Give a ticket a seat."""
        self.seats.setdefault(ticket.base, {})[ticket.record_id] = ticket
        bisect.insort(self._order_on.setdefault(ticket.base, []), ticket.place)
        bisect.insort(self.order, ticket.place)

    def take(self, ticket: Ticket) -> None:
        """Take a ticket's seat away."""
        del self.order[bisect.bisect_left(self.order, ticket.place)]
        here, seats = self._order_on[ticket.base], self.seats[ticket.base]
        del here[bisect.bisect_left(here, ticket.place)]
        del seats[ticket.record_id]
        if not seats:
            del self.seats[ticket.base], self._order_on[ticket.base]


@dataclass(slots=True)
class LooseRecords:
    """The seats of all records that no commit accounts for."""

    max_contributions: int
    members: _Room = field(init=False)
    listed: _Room = field(init=False)
    newcomers: _Room = field(init=False)
    orphans: _Room = field(init=False)
    _tickets: dict[str, Ticket] = field(default_factory=dict)
    _num_of: dict[tuple[str, str], int] = field(default_factory=dict)
    """(author, base) -> records with a seat."""

    def __post_init__(self) -> None:
        """Set up the rooms."""
        outsiders = OUTSIDERS_PER_BASE_FACTOR * self.max_contributions
        self.members = _Room(MAX_MEMBER_RECORDS, MAX_MEMBER_RECORDS)
        self.listed = _Room(MAX_LISTED_RECORDS, outsiders)
        self.newcomers = _Room(MAX_NEWCOMER_RECORDS, outsiders)
        self.orphans = _Room(MAX_ORPHANS, MAX_ORPHANS)

    def __len__(self) -> int:
        """Count the records with a seat."""
        return len(self._tickets)

    def problem(self, ticket: Ticket) -> str:
        """Return why there is no seat for a record, as a sentence; empty if there is one."""
        is_member = ticket.standing is Standing.MEMBER
        most = MAX_PER_MEMBER_AND_BASE if is_member else MAX_PER_OUTSIDER_AND_BASE
        if self._num_of.get((ticket.author, ticket.base), 0) >= most:
            return "its author has too many records on that base"
        if self._room_of(ticket.standing).victim(ticket) == ticket.record_id:
            return ticket.standing.value
        return ""

    def seat(self, ticket: Ticket) -> str | None:
        """Give a record that has no problem its seat; return whose it was, None if free."""
        room = self._room_of(ticket.standing)
        victim = room.victim(ticket)
        if victim is not None:
            self.leave(victim)
        room.put(ticket)
        self._tickets[ticket.record_id] = ticket
        who = (ticket.author, ticket.base)
        self._num_of[who] = self._num_of.get(who, 0) + 1
        return victim

    def leave(self, record_id: str) -> bool:
        """Free the seat of a record, if it has one; return whether it had."""
        ticket = self._tickets.pop(record_id, None)
        if ticket is None:
            return False
        self._room_of(ticket.standing).take(ticket)
        who = (ticket.author, ticket.base)
        num_left = self._num_of[who] - 1
        if num_left:
            self._num_of[who] = num_left
        else:
            del self._num_of[who]
        return True

    def on(self, base: str) -> list[str]:
        """Return the records on a base that have a seat, sorted."""
        rooms = (self.members, self.listed, self.newcomers, self.orphans)
        return sorted(i for room in rooms for i in room.seats.get(base, ()))

    def _room_of(self, standing: Standing) -> _Room:
        if standing is Standing.MEMBER:
            return self.members
        if standing is Standing.LISTED:
            return self.listed
        return self.newcomers if standing is Standing.NEWCOMER else self.orphans
