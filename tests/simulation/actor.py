"""One member without time: the real machine, and a driver that does one small thing when told.

`member` runs a driver against a clock and a network; this one is moved by hand, a record, a tick or
a crash at a time, so that hand-written schedules and the exhaustive search share it. The own clock
stands still but for `tick`, which makes everything due that is waited for: so whatever an order of
delays can bring about, some order of these steps brings about as well.

An actor can be copied (`clone`) and told apart (`fingerprint`): the search needs both.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields
from enum import Enum
from types import BuiltinMethodType, MethodType
from typing import Any

from blake3 import blake3
from msgspec import Struct

from volunteer.rounds import events as ev
from volunteer.rounds.chain import ChainFacts, ChainRules
from volunteer.rounds.machine import Machine
from volunteer.rounds.records import Close, Record, encode_body, record_id_of
from volunteer.rounds.turn import Timing

TIMING = Timing(round_s=100.0, grace_s=10.0, failover_s=20.0)
LONG_S = 10_000.0
"""Longer than anything that a member waits for."""
_SHARED = (
    str,
    int,
    float,
    tuple,
    frozenset,
    Struct,
    Enum,
    ChainFacts,
    ChainRules,
    Timing,
    type(None),
)
"""What never changes, as events and actions. (Tuples of the machine hold nothing else.)"""


@dataclass(slots=True)
class Actor:
    """A machine, what is on its disk, and what its trainer was told to carry."""

    me: str
    rules: ChainRules
    machine: Machine
    disk: dict[str, Record] = field(default_factory=dict)
    """In the order of arrival; closes are hints and are not kept."""
    verified: list[str] = field(default_factory=list)
    carried: tuple[str, ...] = ()
    dropped: list[str] = field(default_factory=list)
    now_s: float = 0.0
    are_answers_slow: bool = False
    """Whether encoding, proposals and states are finished by `answer`, and not at once."""
    open_requests: list[ev.Action] = field(default_factory=list)
    published: list[str] = field(default_factory=list)
    """What the last step made known to the world."""
    final_ids: list[str] = field(default_factory=list)
    alarm: tuple[str, str] | None = None

    @classmethod
    def begin(cls, rules: ChainRules, me: str, *, are_answers_slow: bool = False) -> Actor:
        """Start a member with an empty disk."""
        actor = cls(me, rules, Machine(rules, TIMING, me), are_answers_slow=are_answers_slow)
        actor.verified.append(rules.genesis_id)
        actor._wake()
        return actor

    # ------------------------------------------------------------------------------ steps

    def tick(self) -> list[str]:
        """Let enough time pass for whatever is waited for; return what is published by that."""
        self.published = []
        self.now_s += LONG_S
        self.machine._presence.heard_at_s = self.now_s  # it was there all the while
        self._feed(ev.WorkReported(1))
        self._feed(ev.Ticked())
        return self.published

    def hear(self, record_id: str, record: Record) -> list[str]:
        """Take in a record, and fetch its blob if the machine asks for it."""
        self.published = []
        if record_id not in self.disk:
            self.disk[record_id] = record
            self._feed(ev.RecordArrived(record_id, record))
        return self.published

    def answer(self, number: int) -> list[str]:
        """Finish an open request."""
        self.published = []
        self._finish(self.open_requests.pop(number))
        return self.published

    def misjudge(self, commit_id: str) -> list[str]:
        """Lose a state, compute it again, and get another hash: its memory errs."""
        self.published = []
        self._feed(ev.StateDropped(commit_id))
        self._feed(ev.StateRefused(commit_id, "another hash"))
        return self.published

    def crash(self, *, is_encoding_kept: bool = False) -> list[str]:
        """End at once, and start with what is on disk, as the driver does.

        Args:
            is_encoding_kept: whether the trainer's snapshot already held what it was encoding.
        """
        self.published = []
        held = [i for i in self.disk if i in self.machine.known.held]
        encoding = [r for r in self.open_requests if isinstance(r, ev.Encode)]
        self.open_requests = []
        self.machine = Machine(self.rules, TIMING, self.me)
        self.now_s += LONG_S
        self._load(ev.WorkDropped(tuple(self.dropped)))
        for record_id, record in self.disk.items():
            self._load(ev.RecordArrived(record_id, record))
        for record_id in held:
            self._load(ev.BlobHeld(record_id))
        self._wake()
        if is_encoding_kept and encoding:
            self._finish(encoding[0])
        return self.published

    def _load(self, event: ev.Event) -> None:
        assert not self.machine.handle(event, self.now_s), event

    def _wake(self) -> None:
        for commit_id in self.verified:
            self._load(ev.StateHeld(commit_id))
        self._feed(ev.Ticked())
        self._feed(ev.ContributingChanged(True))
        self._feed(ev.TrainerReady())

    # ---------------------------------------------------------------------------- driver

    def _feed(self, event: ev.Event) -> None:
        actions = deque(self.machine.handle(event, self.now_s))
        while actions:
            action = actions.popleft()
            match action:
                case ev.PublishRecord(record):
                    record_id = record_id_of(encode_body(record))
                    if not isinstance(record, Close):
                        self.disk[record_id] = record
                        self.published.append(record_id)
                    arrived = ev.RecordArrived(record_id, record)
                    actions.extend(self.machine.handle(arrived, self.now_s))
                case ev.Encode() | ev.ComputeProposal() | ev.ComputeState() | ev.FetchState():
                    if self.are_answers_slow:
                        self.open_requests.append(action)
                    else:
                        self._finish(action)
                case ev.FetchBlob(contribution_id):
                    self._feed(ev.BlobHeld(contribution_id))
                case ev.MoveTo():
                    self.carried = action.pending
                case ev.DropWork(contribution_ids):
                    self.dropped += contribution_ids
                case ev.Finalise(commit_id):
                    self.final_ids.append(commit_id)
                case ev.RaiseAlarm(final_commit, other_tip):
                    self.alarm = (final_commit, other_tip)
                case _:
                    pass

    def _finish(self, action: ev.Action) -> None:
        match action:
            case ev.Encode(base):
                self._feed(self._encoded(base))
            case ev.ComputeProposal(parent, listed):
                ids = tuple(entry.contribution_id for entry in listed)
                self._feed(ev.ProposalComputed(parent, ids, hash_of(parent, *ids)))
            case ev.ComputeState(commit_id, commit):
                if commit.state_hash != hash_of(commit.parent, *commit.contributions):
                    self._feed(ev.StateRefused(commit_id, "another hash"))
                else:
                    self._hold_state(commit_id)
            case ev.FetchState(commit_id):
                self._hold_state(commit_id)

    def _hold_state(self, commit_id: str) -> None:
        if commit_id not in self.verified:
            self.verified.append(commit_id)
        self._feed(ev.StateHeld(commit_id))

    def _encoded(self, base: str) -> ev.ContributionEncoded:
        carries, self.carried = tuple(sorted(self.carried)), ()
        return ev.ContributionEncoded(
            base=base,
            blob_id=hash_of(self.me, base, *carries),
            blob_bytes=1,
            codec="int4",
            codec_version=1,
            tokens=1 + sum(self.machine.own[i].tokens for i in carries),
            carries=carries,
        )

    # ------------------------------------------------------------------- for the search

    @property
    def tip(self) -> ChainFacts:
        """Where it stands."""
        return self.machine.known.facts[self.machine.tip or self.rules.genesis_id]

    def clone(self) -> Actor:
        """Return an independent copy; values that never change are shared."""
        copied: Actor = _clone(self, {})
        return copied

    def fingerprint(self) -> tuple[object, ...]:
        """Return all that its further steps depend on; times only as due or not yet due."""
        machine, known = self.machine, self.machine.known
        closed_at_s = machine.closed_at_s
        return (
            frozenset(self.disk),
            frozenset(known.held),
            frozenset(known.states),
            frozenset(known.refused),
            frozenset(known.closed),
            machine.tip,
            self.now_s - machine.applied_at_s >= LONG_S,
            None if closed_at_s is None else self.now_s - closed_at_s >= LONG_S,
            (machine.ballot.voted_height, machine.ballot.lock_id),
            frozenset(machine._proposing.parents),
            frozenset(machine._encoded_bases),
            frozenset(machine.dropped),
            (machine._told_pending, self.carried, machine.final_id, machine.alarm),
            machine.tokens_since_contribution > 0,
            tuple(self.open_requests),
        )


def hash_of(*parts: str) -> str:
    """Return a hash over names, for what stands in for states and blobs."""
    return blake3("/".join(parts).encode()).hexdigest()


def _clone(value: Any, memo: dict[int, Any]) -> Any:  # noqa: ANN401 - any part of a machine
    """Return a deep copy: what is shared within the original is shared within the copy."""
    kind = type(value)
    if _is_shared(kind):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if issubclass(kind, dict | list | set):
        copied = memo[id(value)] = _clone_container(value, memo)
    elif kind is MethodType:
        copied = MethodType(value.__func__, _clone(value.__self__, memo))
    elif kind is BuiltinMethodType:
        copied = getattr(_clone(value.__self__, memo), value.__name__)
    else:
        copied = memo[id(value)] = object.__new__(kind)
        for name in _names_of(kind):
            # Not by setattr, which frozen dataclasses refuse.
            object.__setattr__(copied, name, _clone(getattr(value, name), memo))
    return copied


def _clone_container(value: Any, memo: dict[int, Any]) -> Any:  # noqa: ANN401 - dict, list or set
    """Copy a container: its parts are all of one kind."""
    copied = value.copy()
    parts = value.values() if isinstance(value, dict) else value
    if _is_shared(type(next(iter(parts), None))):
        return copied
    if isinstance(value, dict):
        copied.update((key, _clone(part, memo)) for key, part in value.items())
    else:
        assert isinstance(value, list), value
        copied[:] = [_clone(part, memo) for part in value]
    return copied


def _is_shared(kind: type[object]) -> bool:
    if kind not in _shared_kinds:
        _shared_kinds[kind] = issubclass(kind, _SHARED) or kind.__module__ == ev.__name__
    return _shared_kinds[kind]


def _names_of(kind: type[Any]) -> tuple[str, ...]:
    if kind not in _field_names:
        _field_names[kind] = tuple(each.name for each in fields(kind))
    return _field_names[kind]


_shared_kinds: dict[type[object], bool] = {}
_field_names: dict[type[object], tuple[str, ...]] = {}
