"""One member's part in the round protocol: `handle(event, now_s) -> [Action]`.

Runs in: agent, simulation. Sans-IO: time comes in with each event, in seconds of a clock that never
goes back and counts sleep; nothing is compared with another machine's clock.

Reading order: `handle`, then `_seek_tip` (where to stand), then `_act` (contribute, propose).
What is signed is derived from what is on disk: votes, lock, contributions and proposals made are
recomputed from our own records, so a restart cannot sign differently (ROUNDS.md rules 14, 24).

Invariant: I1 one vote a height, one contribution and one proposal a commit, per honest member.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from volunteer.rounds import events as ev
from volunteer.rounds.ballot import Ballot
from volunteer.rounds.chain import (
    RECENT_COMMITS,
    ChainFacts,
    ChainRules,
    listed_in_order,
    rank_of,
)
from volunteer.rounds.credit import (
    MAX_CARRIED_AFTER_SWITCH,
    WorkState,
    pending_ids,
    to_drop,
    work_states,
)
from volunteer.rounds.fork_choice import choose_tip, is_ancestor, leaves_final
from volunteer.rounds.knowledge import Knowledge
from volunteer.rounds.records import (
    MAX_CARRIES,
    Close,
    Commit,
    Contribution,
    Leaving,
    Record,
    author_of,
)
from volunteer.rounds.sampling import sample_contributions
from volunteer.rounds.turn import (
    Timing,
    eligible_contributions,
    is_child_on_its_way,
    turn_delay_s,
)

CATCH_UP_HEIGHTS = 3
"""Behind by this many commits, a member fetches a state instead of every blob."""


@dataclass(slots=True)
class Machine:
    """The state of one member in one run's module."""

    rules: ChainRules
    timing: Timing
    me: str
    known: Knowledge = field(init=False)
    tip: str | None = None
    """None until the genesis state is there."""
    applied_at_s: float = 0.0
    closed_at_s: float | None = None
    """When the round on the tip was closed for this member."""
    own: dict[str, Contribution] = field(default_factory=dict)
    own_proposals: set[str] = field(default_factory=set)
    """Parents for which this member has proposed."""
    dropped: set[str] = field(default_factory=set)
    ballot: Ballot = field(init=False)
    final_id: str = ""
    is_contributing: bool = False
    has_left: bool = True
    tokens_since_contribution: int = 0
    banned: set[str] = field(default_factory=set)
    alarm: tuple[str, str] | None = None
    _busy: dict[str, str] = field(default_factory=dict)
    """Requests under way: kind -> subject; one of a kind at a time."""
    _asked: set[str] = field(default_factory=set)
    """Blobs and records asked for."""
    _encoded_bases: set[str] = field(default_factory=set)
    _voted: dict[tuple[str, int], str] = field(default_factory=dict)
    _proposed: dict[tuple[str, str, int], str] = field(default_factory=dict)
    _chain: list[str] = field(default_factory=list)
    """The tip's chain by height."""
    _pending: tuple[str, ...] = ()
    """What the trainer was last told to carry."""
    _actions: list[ev.Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Stand nowhere yet; the genesis is final and certified."""
        self.known = Knowledge(self.rules)
        self.ballot = Ballot(self.known.facts, lock_id=self.rules.genesis_id)
        self.final_id = self.rules.genesis_id

    # ------------------------------------------------------------------------------- entry

    def handle(self, event: ev.Event, now_s: float) -> list[ev.Action]:
        """Take in one event; return what to do about it, in order."""
        self._actions = []
        self._take_in(event, now_s)
        self.known.refresh_usable()
        self._seek_tip(now_s)
        self._ask_for_what_is_missing()
        if self.tip is not None:
            self._act(self.known.facts[self.tip], now_s)
        return self._actions

    def restore(self, events: Iterable[ev.Event], now_s: float) -> None:
        """Take in what was on disk, in its order of arrival, without acting on it yet."""
        for event in events:
            self._take_in(event, now_s)
        self._actions = []
        self._asked.clear()
        self._busy.clear()
        self.known.refresh_usable()

    def _take_in(self, event: ev.Event, now_s: float) -> None:
        match event:
            case ev.RecordArrived(record_id, record):
                self._take_record(record_id, record, now_s)
            case ev.RequestFailed(subject):
                self._free(subject)
                self._asked.discard(subject)
            case ev.WorkDropped(contribution_ids):
                self.dropped.update(contribution_ids)
            case ev.ContributionEncoded():
                self._free(event.base)
                self._sign_contribution(event)
            case ev.ProposalComputed():
                self._free(event.parent)
                self._sign_commit(event)
            case ev.WorkReported(tokens):
                self.tokens_since_contribution = tokens
            case ev.ContributingChanged(is_contributing):
                self._change_contributing(is_contributing)
            case _:
                self._take_file(event)

    def _take_file(self, event: ev.Event) -> None:
        match event:
            case ev.BlobHeld(blob_id):
                self.known.blobs.add(blob_id)
            case ev.BlobRefused(blob_id, reason):
                self.known.bad_blobs[blob_id] = reason
            case ev.StateHeld(commit_id):
                self._free(commit_id)
                self.known.hold_state(commit_id)
            case ev.StateRefused(commit_id, reason):
                self._free(commit_id)
                self.known.refuse(commit_id, reason)
            case ev.StateDropped(commit_id):
                self.known.states.discard(commit_id)
            case _:
                assert isinstance(event, ev.Ticked)

    def _free(self, subject: str) -> None:
        self._busy = {kind: s for kind, s in self._busy.items() if s != subject}

    def _change_contributing(self, is_contributing: bool) -> None:
        self.is_contributing = is_contributing
        # What was under way in trainer and aggregator has ended with them.
        self._busy = {kind: s for kind, s in self._busy.items() if kind == "fetch_state"}
        if not is_contributing and not self.has_left and self.tip is not None:
            self.has_left = True
            self._publish(
                Leaving(
                    run_id=self.rules.run_id,
                    module_id=self.rules.module_id,
                    round_index=self._facts().height,
                    author=self.me,
                    base=self.tip,
                )
            )

    # ----------------------------------------------------------------------------- records

    def _take_record(self, record_id: str, record: Record, now_s: float) -> None:
        if author_of(record) in self.banned and not isinstance(record, Commit):
            return
        is_new = self.known.add(record_id, record)
        self._asked.discard(record_id)
        if not is_new:
            return
        match record:
            case Close(base=base) if base == self.tip and self.closed_at_s is None:
                self.closed_at_s = now_s
            case Commit():
                self._watch_double_commit(record_id, record)
                if record.proposer == self.me:
                    self.own_proposals.add(record.parent)
            case Contribution():
                self._watch_double_vote(record_id, record)
                if record.author == self.me:
                    self._note_own(record_id, record)

    def _note_own(self, record_id: str, record: Contribution) -> None:
        self.own[record_id] = record
        self._encoded_bases.add(record.base)
        self.has_left = False
        if record.vote:
            self.ballot.note_vote(record)
        # What it carries is in flight with it now: if the trainer was told to carry it after
        # encoding, it must take it out again.
        if self.tip is not None and self._pending != tuple(
            pending_ids(self.work_states(), self.own)
        ):
            self._tell_trainer()

    def _watch_double_commit(self, record_id: str, commit: Commit) -> None:
        key = (commit.proposer, commit.parent, commit.rank)
        first = self._proposed.setdefault(key, record_id)
        if first != record_id:
            self._ban(commit.proposer, first, record_id, "two commits for one parent and rank")

    def _watch_double_vote(self, record_id: str, record: Contribution) -> None:
        if not record.vote:
            return
        first = self._voted.setdefault((record.author, record.round_index), record_id)
        if first != record_id:
            self._ban(record.author, first, record_id, "two votes at one height")

    def _ban(self, peer: str, first: str, second: str, reason: str) -> None:
        if peer != self.me and peer not in self.banned:
            self.banned.add(peer)
            self._actions.append(ev.BanPeer(peer, first, second, reason))

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
        best = choose_tip(self.known.usable_tree(), self._start_of_choice())
        if best == self.tip:
            return
        if leaves_final(self.known.facts, self.final_id, best):
            if self.alarm is None:
                self.alarm = (self.final_id, best)
                self._actions.append(ev.RaiseAlarm(self.final_id, best))
            return
        if best in self.known.states:
            self._move(best, now_s)
            return
        self._compute_towards(best)

    def _compute_towards(self, best: str) -> None:
        """Ask for the next state between what is held and `best`."""
        missing = []
        for commit_id in self.known.chain_down(best):
            if commit_id in self.known.states:
                break
            missing.append(commit_id)
        else:
            if best != self.rules.genesis_id:
                self._fetch_state(best)
            return  # otherwise the genesis state is being built
        commit_id = missing[-1]
        facts = self.known.facts[commit_id]
        commit = self.known.commits[commit_id]
        listed_blobs = [self.known.contributions[i].blob_id for i in commit.contributions]
        if not all(blob in self.known.blobs for blob in listed_blobs):
            self._fetch_state(missing[0])
            return
        if self.is_contributing and "compute" not in self._busy:
            self._busy["compute"] = commit_id
            parent = self.known.facts[facts.parent_id]
            listed = listed_in_order(commit.contributions, parent, self.known.contributions)
            self._actions.append(ev.ComputeState(commit_id, commit, listed))

    def _move(self, commit_id: str, now_s: float) -> None:
        old, self.tip = self.tip, commit_id
        self.applied_at_s = now_s
        self.closed_at_s = now_s if commit_id in self.known.closed else None
        facts = self._facts()
        if old is not None and facts.parent_id == old:
            self._chain.append(commit_id)
        else:
            self._chain = list(self.known.chain_down(commit_id))[::-1]
        is_switch = old is not None and not self._is_on_chain(old)
        self._drop_beyond(MAX_CARRIED_AFTER_SWITCH if is_switch else MAX_CARRIES)
        self._finalise(facts)
        self._tell_trainer()

    def _drop_beyond(self, limit: int) -> None:
        given_up = to_drop(pending_ids(self.work_states(), self.own), limit)
        if given_up:
            self.dropped.update(given_up)
            reason = f"more than the {limit} contributions that can be carried"
            self._actions.append(ev.DropWork(tuple(given_up), reason))

    def _tell_trainer(self) -> None:
        facts = self._facts()
        self._pending = tuple(pending_ids(self.work_states(), self.own))
        state_hash = self.state_hash_of(facts.commit_id)
        self._actions.append(ev.MoveTo(facts.commit_id, facts.height, state_hash, self._pending))

    def state_hash_of(self, commit_id: str) -> str:
        """Return the state hash that `commit_id` states; empty for the genesis."""
        commit = self.known.commits.get(commit_id)
        return commit.state_hash if commit is not None else ""

    def _finalise(self, facts: ChainFacts) -> None:
        if facts.final_id == self.final_id:
            return
        newly = []
        for commit_id in self.known.chain_down(facts.final_id):
            if is_ancestor(self.known.facts, commit_id, self.final_id):
                break
            listed = self.known.facts[commit_id].listed
            newly += [i for i in sorted(listed) if i in self.own]
        self.final_id = facts.final_id
        self._actions.append(ev.Finalise(facts.final_id, facts.final_height, tuple(newly)))

    def work_states(self) -> dict[str, WorkState]:
        """Return what has become of each own contribution on the tip's chain (the books)."""
        facts = self._facts()

        def is_listed(contribution_id: str) -> bool:
            return any(self._is_on_chain(c) for c in self.known.listed_by.get(contribution_id, ()))

        def is_in_flight(contribution_id: str) -> bool:
            base = self.own[contribution_id].base
            return base in (facts.commit_id, facts.parent_id)

        return work_states(self.own, self.dropped, is_listed, is_in_flight)

    def _is_on_chain(self, commit_id: str) -> bool:
        height = self.known.facts[commit_id].height
        return height < len(self._chain) and self._chain[height] == commit_id

    # ---------------------------------------------------------------- asking for the rest

    def _ask_for_what_is_missing(self) -> None:
        for record_id in self.known.missing_records():
            self._ask(record_id, ev.FetchRecord(record_id))
        if self.tip is None:
            return
        facts = self._facts()
        for base in (facts.commit_id, facts.parent_id):
            for contribution_id in sorted(self.known.based_on.get(base, ())):
                if self.known.contributions[contribution_id].author not in self.banned:
                    self._ask_for_blob(contribution_id)
        self._catch_up()

    def _catch_up(self) -> None:
        """Fetch what the best chain of headers needs beyond what is usable."""
        best = choose_tip(self.known.header_tree(), self._start_of_choice())
        missing = []
        for commit_id in self.known.chain_down(best):
            if commit_id in self.known.usable:
                break
            missing.append(commit_id)
        if len(missing) >= CATCH_UP_HEIGHTS:
            final_height = self.known.facts[best].final_height
            newest_height = self.known.facts[best].height - RECENT_COMMITS + 1
            height = max(final_height, newest_height)
            target = next((c for c in missing if self.known.facts[c].height <= height), None)
            self._fetch_state(target or missing[-1])
        for commit_id in missing[:CATCH_UP_HEIGHTS]:
            for contribution_id in self.known.commits[commit_id].contributions:
                self._ask_for_blob(contribution_id)

    def _fetch_state(self, commit_id: str) -> None:
        if "fetch_state" not in self._busy:
            self._busy["fetch_state"] = commit_id
            self._actions.append(ev.FetchState(commit_id, self.state_hash_of(commit_id)))

    def _ask_for_blob(self, contribution_id: str) -> None:
        contribution = self.known.contributions[contribution_id]
        if (
            contribution.blob_id not in self.known.blobs
            and contribution.blob_id not in self.known.bad_blobs
        ):
            self._ask(contribution_id, ev.FetchBlob(contribution_id, contribution))

    def _ask(self, subject: str, action: ev.Action) -> None:
        if subject not in self._asked:
            self._asked.add(subject)
            self._actions.append(action)

    # ------------------------------------------------------------------------------ acting

    def _act(self, facts: ChainFacts, now_s: float) -> None:
        if not self.is_contributing or self.alarm is not None:
            return
        self._close_and_contribute(facts, now_s)
        self._propose(facts, now_s)

    def _close_and_contribute(self, facts: ChainFacts, now_s: float) -> None:
        """Contribute once for the tip (rule 20)."""
        if self.closed_at_s is None:
            is_target = 0 < self.timing.target_tokens <= self.tokens_since_contribution
            if not is_target and now_s - self.applied_at_s < self.timing.round_s:
                return
            self.closed_at_s = now_s
            self.known.closed.add(facts.commit_id)
            self._publish(
                Close(
                    run_id=self.rules.run_id,
                    module_id=self.rules.module_id,
                    round_index=facts.height,
                    author=self.me,
                    base=facts.commit_id,
                )
            )
        has_work = self.tokens_since_contribution > 0
        is_due = facts.commit_id not in self._encoded_bases and "encode" not in self._busy
        if has_work and is_due and facts.commit_id in self.known.states:
            self._busy["encode"] = facts.commit_id
            self._actions.append(ev.Encode(facts.commit_id, facts.height))

    def _sign_contribution(self, event: ev.ContributionEncoded) -> None:
        base = self.known.facts.get(event.base)
        if base is None or event.base in self._encoded_bases:
            return
        self._encoded_bases.add(event.base)
        self.tokens_since_contribution = 0
        contribution = Contribution(
            run_id=self.rules.run_id,
            module_id=self.rules.module_id,
            round_index=base.height,
            author=self.me,
            base=event.base,
            vote=self.ballot.may_vote(base),
            blob_id=event.blob_id,
            blob_bytes=event.blob_bytes,
            codec=event.codec,
            codec_version=event.codec_version,
            tokens=event.tokens,
            carries=event.carries,
        )
        if contribution.vote:
            self.ballot.note_vote(contribution)
        self.known.blobs.add(event.blob_id)
        self._publish(contribution)

    def _propose(self, facts: ChainFacts, now_s: float) -> None:
        """Propose once for the tip, when it is our turn (rules 22, 23)."""
        is_done = facts.commit_id in self.own_proposals or "propose" in self._busy
        if is_done or self.closed_at_s is None or facts.commit_id not in self.known.states:
            return
        eligible = eligible_contributions(self.known, facts, self.banned)
        turn_s = self.closed_at_s + turn_delay_s(self.known, facts, self.timing, self.me)
        if not eligible or now_s < turn_s:
            return
        elapsed_s = now_s - self.applied_at_s
        if is_child_on_its_way(self.known, facts, elapsed_s, self.timing.round_s):
            return
        chosen = sample_contributions(eligible, self.rules.max_contributions, seed=facts.commit_id)
        self._busy["propose"] = facts.commit_id
        listed = listed_in_order(chosen, facts, self.known.contributions)
        self._actions.append(ev.ComputeProposal(facts.commit_id, listed))

    def _sign_commit(self, event: ev.ProposalComputed) -> None:
        if event.parent != self.tip or event.parent in self.own_proposals:
            return
        self.own_proposals.add(event.parent)
        facts = self._facts()
        bases = (facts.commit_id, facts.parent_id)
        leaving = (
            i
            for i, record in self.known.leavings.items()
            if record.base in bases and record.author not in facts.away
        )
        self._publish(
            Commit(
                run_id=self.rules.run_id,
                module_id=self.rules.module_id,
                round_index=facts.height + 1,
                parent=event.parent,
                rank=rank_of(self.rules, facts, self.me),
                proposer=self.me,
                contributions=event.contributions,
                leaving=tuple(sorted(leaving))[: self.rules.max_contributions],
                state_hash=event.state_hash,
            )
        )

    def _publish(self, record: Record) -> None:
        self._actions.append(ev.PublishRecord(record))
