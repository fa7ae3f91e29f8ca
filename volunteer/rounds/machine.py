"""One member's part in the round protocol: `handle(event, now_s) -> [Action]`.

Runs in: agent, simulation. Sans-IO: time comes in with each event, in seconds of a clock that never
goes back and counts sleep; nothing is compared with another machine's clock.

Reading order: `handle`, then `_seek_tip` (where to stand), then `_act` (contribute, propose).
What is signed is derived from what is on disk: votes, lock, contributions and proposals made are
recomputed from our own records, so a restart cannot sign differently (ROUNDS.md rules 14, 24).

What a restart reads back only fills the memory: the first `Ticked` or `ContributingChanged` wakes
the machine up, and then it moves, asks and acts.

Invariant: I1 one vote a height, one contribution and one proposal a commit, per honest member.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from volunteer.rounds import events as ev
from volunteer.rounds.ballot import Ballot
from volunteer.rounds.catch_up import needs_of_state
from volunteer.rounds.chain import ChainFacts, ChainRules
from volunteer.rounds.credit import MAX_CARRIED_AFTER_SWITCH, WorkState, to_drop
from volunteer.rounds.drafts import Drafts
from volunteer.rounds.fetching import Fetching
from volunteer.rounds.fork_choice import leaves_final
from volunteer.rounds.knowledge import Knowledge
from volunteer.rounds.outsiders import Outsiders
from volunteer.rounds.own_work import OwnWork
from volunteer.rounds.presence import Presence
from volunteer.rounds.proposing import Proposing
from volunteer.rounds.records import (
    MAX_CARRIES,
    Close,
    Commit,
    Contribution,
    Leaving,
    Record,
    author_of,
)
from volunteer.rounds.requests import Kind, Requests
from volunteer.rounds.silence import Silence
from volunteer.rounds.turn import WAITED_ROUNDS, Timing, is_left_behind
from volunteer.rounds.watch import Watch


@dataclass(slots=True)
class Machine:
    """The state of one member in one run's module."""

    rules: ChainRules
    timing: Timing
    me: str
    has_lost_records: bool = False
    """Whether this member has signed before what it has no record of (silence.py)."""
    known: Knowledge = field(init=False)
    tip: str | None = None
    """None until the genesis state is there."""
    applied_at_s: float = 0.0
    closed_at_s: float | None = None
    """When the round on the tip was closed for this member."""
    work: OwnWork = field(init=False)
    ballot: Ballot = field(init=False)
    watch: Watch = field(default_factory=Watch)
    final_id: str = ""
    is_contributing: bool = False
    tokens_since_contribution: int = 0
    alarm: tuple[str, str] | None = None
    _drafts: Drafts = field(init=False)
    _silence: Silence = field(init=False)
    _presence: Presence = field(default_factory=Presence)
    _is_awake: bool = False
    _is_settled: bool = False  # whether the last look at everything led to nothing
    _requests: Requests = field(default_factory=Requests)
    _fetching: Fetching = field(init=False)
    _proposing: Proposing = field(init=False)
    _outsiders: Outsiders = field(init=False)
    _encoded_bases: set[str] = field(default_factory=set)
    _written_blobs: set[str] = field(default_factory=set)
    """Blobs that our trainer has made since the start: they need no fetching nor checking."""
    _told_pending: tuple[str, ...] = ()
    """What the trainer was last told to carry."""
    _verdicts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Commit -> what it lists and a scorer, this member, finds harmful; the newest alone."""
    _actions: list[ev.Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Stand nowhere yet; the genesis is final and certified."""
        genesis = self.rules.genesis_id
        self.known = Knowledge(self.rules, me=self.me, pins=self._stands_on)
        self.known.bounds.is_loading = True
        self.ballot = Ballot(self.known.facts, lock_id=genesis)
        self.work = OwnWork(self.known.facts, self.known.listed_by, genesis)
        self._fetching = Fetching(self.known, self._requests, self.timing, self.banned)
        self._outsiders = Outsiders(self.known, self.timing)
        self.known.holds_back = self._outsiders.holds_back
        self._drafts = Drafts(self.rules, self.me)
        self._proposing = Proposing(
            self.known, self._requests, self.timing, self._drafts, self.banned
        )
        self._silence = Silence(self.has_lost_records)
        self.final_id = genesis

    def _stands_on(self) -> tuple[str, ...]:
        """Return the commits that this member's own state refers to."""
        return (self.final_id, self.ballot.lock_id, self.tip or self.final_id)

    @property
    def own(self) -> dict[str, Contribution]:
        """Own contributions by id."""
        return self.work.own

    @property
    def dropped(self) -> set[str]:
        """Own contributions that were given up."""
        return self.work.dropped

    @property
    def banned(self) -> set[str]:
        """Peers that were seen to sign two things of which only one may be."""
        return self.watch.banned

    # ------------------------------------------------------------------------------- entry

    def handle(self, event: ev.Event, now_s: float) -> list[ev.Action]:
        """Take in one event; return what to do about it, in order."""
        return self.handle_all((event,), now_s)

    def handle_all(self, events: Sequence[ev.Event], now_s: float) -> list[ev.Action]:
        """Take in what has come at about the same time, in order, and then act once."""
        self._actions = []
        self._presence.hear(now_s, self.timing.round_s)
        must_look = not self._is_settled
        for event in events:
            if isinstance(event, ev.RecordArrived):  # by far the most
                self._take_record(event.record_id, event.record, now_s)
                must_look = True
            elif self._take_in(event, now_s):
                must_look = True
            if not self._is_awake and isinstance(event, (ev.Ticked, ev.ContributingChanged)):
                self._wake()
        if self._is_awake:
            # Time alone changes the outcome only where something is held back, or has failed.
            ends_at_s = self.applied_at_s + self.timing.round_s
            closed_at_s = ends_at_s if self.closed_at_s is None else self.closed_at_s
            is_let_in = self.known.early and self._outsiders.let_in(self.tip, closed_at_s, now_s)
            if is_let_in or must_look or self._requests.is_any_due(now_s):
                self._look(now_s)
            if self.tip is not None:
                if self._presence.takes_leave():
                    self._publish(self._drafts.leaving(self._facts()))
                self._act(self._facts(), now_s)
        return self._actions

    def _wake(self) -> None:
        self._is_awake = True
        self.known.bounds.is_loading = False
        self.ballot = Ballot.of(self.known.facts, self.rules.genesis_id, self.own.values())

    def _look(self, now_s: float) -> None:
        """Move to where to stand, and ask for what is missing."""
        num_before = len(self._actions)
        if self.tip is None and self.rules.is_genesis_given:
            self._ask_for_missing(now_s)  # a later state, where nobody keeps the genesis any more
        self._seek_tip(now_s)
        if self.tip is not None:
            self._ask_for_missing(now_s)
        # Blobs are asked for all at once: a second look would ask for no more.
        is_same = all(isinstance(action, ev.FetchBlob) for action in self._actions[num_before:])
        is_same = is_same and not self._fetching.has_set_aside
        self._is_settled = is_same and self.tip is not None
        self._requests.looked_at_s = now_s

    def _ask_for_missing(self, now_s: float) -> None:
        facts = self.known.facts[self.tip or self.rules.genesis_id]
        self._actions += self._fetching.what_is_missing(
            facts, self._start_of_choice(), now_s, is_contributing=self.is_contributing
        )

    def _take_in(self, event: ev.Event, now_s: float) -> bool:
        """Take in all but a record; return whether to look at everything again."""
        match event:
            case ev.Ticked():
                return False
            case ev.WorkReported(tokens):
                self.tokens_since_contribution = tokens
                return False
            case ev.BlobHeld(contribution_id):
                return self.known.hold(contribution_id) and not self.known.leads_to(self.tip)
            case _:
                self._take_answer(event, now_s)
                return True

    def _take_answer(self, event: ev.Event, now_s: float) -> None:
        match event:
            case ev.RequestFailed(subject):
                self._requests.failed(subject, now_s)
            case ev.WorkDropped(contribution_ids):
                self.dropped.update(contribution_ids)
            case ev.ContributionEncoded():
                self._requests.end(Kind.ENCODE, event.base)
                self._sign_contribution(event)
            case ev.ProposalComputed() | ev.VerdictReached():
                self._take_result(event, now_s)
            case ev.ContributingChanged(is_contributing):
                self.is_contributing = is_contributing
                self._presence.changed(now_s, is_contributing=is_contributing)
                self._requests.aggregator_ended()
            case ev.TrainerReady():
                if self._is_awake and self.tip is not None:
                    self._tell_trainer()
            case _:
                self._fetching.take_file(event)

    def _take_result(self, event: ev.ProposalComputed | ev.VerdictReached, now_s: float) -> None:
        if isinstance(event, ev.VerdictReached):
            self._verdicts = {event.commit_id: event.harmful}
            return
        self._requests.end(Kind.PROPOSE, event.parent)
        self._sign_commit(event, now_s)

    @property
    def is_silent(self) -> bool:
        """Whether it has lost what it signed, and must not sign yet."""
        return self._silence.is_kept

    @property
    def is_on_its_way(self) -> bool:
        """Whether a state to move to is being fetched or computed."""
        return self._requests.is_busy(Kind.FETCH_STATE) or self._requests.is_busy(Kind.COMPUTE)

    # ----------------------------------------------------------------------------- records

    def _take_record(self, record_id: str, record: Record, now_s: float) -> None:
        # A banned peer's records are kept as well: a commit may list them (rule 26).
        if not self.known.add(record_id, record):
            return
        self._requests.arrived(record_id)
        proof = self.watch.see(record_id, record) if author_of(record) != self.me else None
        if proof is not None:
            self.known.bounds.keep_proof(author_of(record), proof[:2])
            self._actions.append(ev.BanPeer(author_of(record), *proof))
        match record:
            case Contribution():
                if record.author == self.me:
                    self._note_own(record_id, record)
            case Close(base=base) if base == self.tip and self.closed_at_s is None:
                self.closed_at_s = now_s
            case Commit() if record.proposer == self.me:
                self._proposing.parents.add(record.parent)
            case Leaving() if record.author == self.me:
                self._presence.has_left = True
            case _:
                pass

    def _note_own(self, record_id: str, record: Contribution) -> None:
        self.own[record_id] = record
        self._encoded_bases.add(record.base)
        self._presence.has_left = False
        self.ballot.note_vote(record)
        # What it carries is in flight with it now: if the trainer was told to carry it after
        # encoding, it must take it out again.
        if record.blob_id in self._written_blobs:
            self.known.hold(record_id)
        is_placed = self._is_awake and self.tip is not None
        if is_placed and self._told_pending != tuple(self.work.pending()):
            self._tell_trainer()

    # --------------------------------------------------------------------- where to stand

    def _facts(self) -> ChainFacts:
        assert self.tip is not None
        return self.known.facts[self.tip]

    def _start_of_choice(self) -> str:
        """Return the last final commit, or the genesis if the chain has a reset (rule 16)."""
        if self.tip is None or self._facts().resets:
            return self.rules.genesis_id
        return self._facts().final_id

    def _seek_tip(self, now_s: float) -> None:
        """Move to the best usable commit, as soon as its state is here."""
        best = self.known.usable_choice.best(self._start_of_choice())
        if best == self.tip and best in self.known.states:
            return
        if leaves_final(self.known.facts, self.final_id, best):
            if self.alarm is None:
                self.alarm = (self.final_id, best)
                self._actions.append(ev.RaiseAlarm(self.final_id, best))
            return
        if best in self.known.states:
            self._move(best, now_s)
            return
        needs = needs_of_state(self.known, best, self.tip, self._requests.failures_of)
        # A paused member leaves its machine alone.
        if self.is_contributing:
            self._actions += self._fetching.state(needs, now_s)

    def _move(self, commit_id: str, now_s: float) -> None:
        self.tip = commit_id
        self.applied_at_s = now_s
        self.closed_at_s = now_s if commit_id in self.known.closed else None
        is_switch = self.work.stand_on(self._facts())
        self._drop_beyond(MAX_CARRIED_AFTER_SWITCH if is_switch else MAX_CARRIES)
        self._finalise(self._facts())
        self._tell_trainer()

    def _drop_beyond(self, limit: int) -> None:
        given_up = to_drop(self.work.pending(), limit)
        if given_up:
            self.dropped.update(given_up)
            reason = f"more than the {limit} contributions that can be carried"
            self._actions.append(ev.DropWork(tuple(given_up), reason))

    def _tell_trainer(self) -> None:
        facts = self._facts()
        pending = self._told_pending = tuple(self.work.pending())
        state_hash = self.state_hash_of(facts.commit_id)
        self._actions.append(ev.MoveTo(facts.commit_id, facts.height, state_hash, pending))

    def state_hash_of(self, commit_id: str) -> str:
        """Return the state hash that `commit_id` states; empty for the genesis."""
        return self.known.state_hash_of(commit_id)

    def _finalise(self, facts: ChainFacts) -> None:
        if facts.final_id == self.final_id:
            return
        newly = self.work.listed_between(self.final_id, facts.final_id)
        self.final_id = facts.final_id
        self._actions.append(ev.Finalise(facts.final_id, facts.final_height, newly))

    def work_states(self) -> dict[str, WorkState]:
        """Return what has become of each own contribution on the tip's chain (the books)."""
        return self.work.states()

    # ------------------------------------------------------------------------------ acting

    def _act(self, facts: ChainFacts, now_s: float) -> None:
        highest, round_s = self.known.highest_height, self.timing.round_s
        may_sign = self._silence.may_sign(facts.height, highest, now_s, round_s)
        if may_sign and self.is_contributing and self.alarm is None:
            self._close_and_contribute(facts, now_s)
            self._propose(facts, now_s)

    def _close_and_contribute(self, facts: ChainFacts, now_s: float) -> None:
        """Contribute once for the tip (rule 20)."""
        if self.closed_at_s is None:
            open_s = now_s - self.applied_at_s
            if not self.timing.is_round_over(open_s, self.tokens_since_contribution):
                return
            self.closed_at_s = now_s
            self.known.closed.add(facts.commit_id)
            self._publish(self._drafts.close(facts))
        is_due = facts.commit_id not in self._encoded_bases and self.tokens_since_contribution > 0
        if not is_due or facts.commit_id not in self.known.states:
            return
        best = self.known.header_choice.best(self._start_of_choice())
        if self._may_wait(now_s) and is_left_behind(self.known, facts, best, self.me):
            return
        if self._requests.begin(Kind.ENCODE, facts.commit_id, now_s):
            if self._told_pending != tuple(self.work.pending()):
                self._tell_trainer()  # commits have come that own work was made on
            self._actions.append(ev.Encode(facts.commit_id, facts.height))

    def _may_wait(self, now_s: float) -> bool:
        waited_s = self._presence.waited_s(self.applied_at_s, now_s)
        return waited_s < WAITED_ROUNDS * self.timing.round_s

    def _sign_contribution(self, event: ev.ContributionEncoded) -> None:
        base = self.known.facts.get(event.base)
        if base is None or event.base in self._encoded_bases or self.is_silent:
            return
        self._encoded_bases.add(event.base)
        self._written_blobs.add(event.blob_id)
        self.tokens_since_contribution = 0
        vote, harmful = self.ballot.may_vote(base), self._verdicts.get(event.base)
        contribution = self._drafts.contribution(base, event, vote=vote, harmful=harmful)
        self.ballot.note_vote(contribution)
        self._publish(contribution)

    def _propose(self, facts: ChainFacts, now_s: float) -> None:
        if self.closed_at_s is None or facts.commit_id not in self.known.states:
            return
        turns_from_s = max(self.closed_at_s, self._presence.since_s)
        action = self._proposing.ask(facts, self._may_wait(now_s), turns_from_s, now_s)
        if action is not None:
            self._actions.append(action)

    def _sign_commit(self, event: ev.ProposalComputed, now_s: float) -> None:
        if self.tip is None:
            return
        commit = self._proposing.commit(self._facts(), event, self._may_wait(now_s))
        if commit is not None:
            self._publish(commit)

    def _publish(self, record: Record) -> None:
        self._actions.append(ev.PublishRecord(record))
