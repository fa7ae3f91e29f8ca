"""A trainer without tensors: its work is a set of units, so that the books can be counted.

Runs in: simulation. A unit is what was trained between two snapshots. Commands are done in order,
as by the process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from blake3 import blake3

from volunteer.lab.simulation.errors import BrokenRule
from volunteer.lab.simulation.world import World
from volunteer.rounds import events as ev
from volunteer.rounds.records import Contribution

SNAPSHOT_EVERY_S = 20.0
ENCODE_S = 0.5


class Unit(NamedTuple):
    """One piece of training."""

    author: str
    number: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What of a trainer is on disk."""

    open_units: tuple[Unit, ...] = ()
    carried: frozenset[str] = frozenset()
    last: ev.ContributionEncoded | None = None
    num_units: int = 0


@dataclass(slots=True)
class Contents:
    """What each blob of the whole simulation holds, and the contributions that name it."""

    units_of: dict[str, frozenset[Unit]] = field(default_factory=dict)
    withheld: set[str] = field(default_factory=set)
    """Blobs whose authors give them to nobody."""
    plainly_bad: set[str] = field(default_factory=set)
    """Blobs that an aggregation marks."""
    harmful: set[str] = field(default_factory=set)
    """Blobs that only scorers find to do harm."""
    is_judged: bool = False
    """Whether members score each other's work."""

    def new_part(self, work_id: str, own: Mapping[str, Contribution]) -> frozenset[Unit]:
        """Return N of a contribution: its blob less the new parts of what it carries.

        Who has lost its disk may carry what it does not know to be its own.
        """
        part = self.units_of[own[work_id].blob_id]
        for carried in own[work_id].carries:
            if carried in own:
                part -= self.new_part(carried, own)
        return part


@dataclass(slots=True)
class TrainerModel:
    """One run of a trainer process: begins with a snapshot, ends with the process."""

    me: str
    world: World
    contents: Contents
    tokens_per_s: float
    snapshot: Snapshot
    own: Mapping[str, Contribution]
    """The books, for what a carried contribution holds."""
    save: Callable[[Snapshot], None]
    answer: Callable[[ev.Event], None]
    after: Callable[[float, Callable[[], None]], None]
    """Do something later, in the machine's time: a lid that is closed delays it."""
    is_honest: bool = True
    """A liar's books may say anything."""
    open_units: list[Unit] = field(default_factory=list)
    carried: frozenset[str] = frozenset()
    is_ended: bool = False
    is_placed: bool = False
    """Whether the driver has told it where to stand."""
    _commands: deque[ev.Encode | ev.MoveTo] = field(default_factory=deque)
    _encoding: str | None = None
    _partial_tokens: float = 0.0
    _advanced_at_s: float = 0.0
    _saved_at_s: float = 0.0

    def __post_init__(self) -> None:
        self.open_units = list(self.snapshot.open_units)
        self.carried = self.snapshot.carried
        self._advanced_at_s = self._saved_at_s = self.world.now_s

    @property
    def is_at_leisure(self) -> bool:
        """Whether it can begin something."""
        return self._encoding is None and not self.is_ended

    @property
    def is_idle(self) -> bool:
        """Whether it stands where it should, and has done all that it was told."""
        return self.is_placed and not self._commands and self._encoding is None

    def tokens(self) -> int:
        """Train up to now; return the tokens since the last contribution."""
        self.train()
        return sum(unit.tokens for unit in self.open_units) + int(self._partial_tokens)

    def train(self) -> None:
        """Train up to now."""
        now_s = self.world.now_s
        self._partial_tokens += (now_s - self._advanced_at_s) * self.tokens_per_s
        self._advanced_at_s = now_s
        if now_s - self._saved_at_s >= SNAPSHOT_EVERY_S:
            self.save_snapshot()

    def stood_still(self, for_s: float) -> None:
        """Time has passed in which nothing was trained."""
        self._advanced_at_s += for_s
        self._saved_at_s += for_s

    def save_snapshot(self, last: ev.ContributionEncoded | None = None) -> None:
        """Put on disk what has been trained so far."""
        self._close_unit()
        self.snapshot = Snapshot(
            tuple(self.open_units),
            self.carried,
            last or self.snapshot.last,
            self.snapshot.num_units,
        )
        self._saved_at_s = self.world.now_s
        self.save(self.snapshot)

    def _close_unit(self) -> None:
        tokens = int(self._partial_tokens)
        if tokens:
            number = self.snapshot.num_units
            self.open_units.append(Unit(self.me, number, tokens))
            self.snapshot = Snapshot(
                self.snapshot.open_units, self.snapshot.carried, self.snapshot.last, number + 1
            )
            self._partial_tokens = 0.0

    def send(self, command: ev.Encode | ev.MoveTo) -> None:
        """Do `command` after all that was sent before."""
        self._commands.append(command)
        self._next()

    def _next(self) -> None:
        while self.is_at_leisure and self._commands:
            command = self._commands.popleft()
            if isinstance(command, ev.Encode):
                self._encoding = command.base
                self.after(ENCODE_S, partial(self._finish_encoding, command.base))
            else:
                self.train()
                self.carried = frozenset(command.pending)

    def _finish_encoding(self, base: str) -> None:
        if self.is_ended:
            return
        self._encoding = None
        self.train()
        self._close_unit()
        carried_units = [self.contents.new_part(i, self.own) for i in sorted(self.carried)]
        units = frozenset(self.open_units).union(*carried_units)
        expected = len(self.open_units) + sum(map(len, carried_units))
        if self.is_honest and len(units) != expected:
            raise BrokenRule(f"I4: {self.me} puts the same work twice into one contribution")
        if not self.open_units:
            self.answer(ev.WorkReported(0))
            self.answer(ev.RequestFailed(base))
        else:
            self._encode(base, units)
        self._next()

    def _encode(self, base: str, units: frozenset[Unit]) -> None:
        blob_id = blob_id_of(units, base)
        self.contents.units_of[blob_id] = units
        encoded = ev.ContributionEncoded(
            base=base,
            blob_id=blob_id,
            blob_bytes=1000,
            codec="int4",
            codec_version=1,
            tokens=sum(unit.tokens for unit in units),
            carries=tuple(sorted(self.carried)),
        )
        self.open_units, self.carried = [], frozenset()
        self.save_snapshot(encoded)
        self.answer(encoded)

    def end(self) -> str | None:
        """End with a last snapshot; return the base of an encoding that is given up."""
        self.train()
        self.save_snapshot()
        self.is_ended = True
        asked = [c.base for c in self._commands if isinstance(c, ev.Encode)]
        return self._encoding or next(iter(asked), None)


def blob_id_of(units: frozenset[Unit], base: str) -> str:
    """Return the id of the blob that holds `units`."""
    text = base + "".join(f"/{u.author}:{u.number}" for u in sorted(units))
    return blake3(text.encode()).hexdigest()
