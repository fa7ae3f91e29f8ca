"""What a simulated member fetches and computes: blobs, states, proposals.

Runs in: simulation. A state is the hash of what was applied to the genesis, in order; each member
computes its own, so that two that differ are seen to differ.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from blake3 import blake3

from volunteer.lab.simulation.judging import SCORE_S, is_scorer, marks_of, verdict_on
from volunteer.rounds import events as ev
from volunteer.rounds.records import Contribution, Record

if TYPE_CHECKING:
    from volunteer.lab.simulation.member import Member

APPLY_S = 0.5
JOURNAL_ROUNDS = 8


def state_after(parent_state: str, listed: tuple[ev.Listed, ...]) -> str:
    """Return the hash of what applying `listed` to a state gives."""
    text = parent_state + "".join(
        f"/{e.contribution_id}:{e.is_late}:{e.is_on_probation}{':excluded' * e.is_excluded}"
        for e in listed
    )
    return blake3(text.encode()).hexdigest()


class Files:
    """One member's files, and the tasks that end in an event for its machine."""

    __slots__ = ("_member", "_pruned_to")

    def __init__(self, member: Member) -> None:
        """Work for `member`."""
        self._member = member
        self._pruned_to = 0

    def begin(self, action: ev.Action) -> None:
        """Begin what takes its time."""
        member, net = self._member, self._member.world.net
        match action:
            case ev.FetchBlob(contribution_id, contribution):
                author = member.peers.get(contribution.author)
                slowness = max(member.slowness, 0.0 if author is None else author.slowness)
                delay_s = member.world.fetch_s(net.fetch_s) * slowness
                member.after(delay_s, partial(self._fetch_blob, contribution_id, contribution))
            case ev.FetchState(commit_id, _):
                delay_s = member.world.fetch_s(net.state_fetch_s) * member.slowness
                member.after(delay_s, partial(self._fetch_state, commit_id))
            case ev.FetchRecord(record_id):
                member.exchange.want(record_id)
            case ev.ComputeState():
                member.after(APPLY_S, partial(self._compute_state, action))
            case ev.ComputeProposal():
                member.after(APPLY_S, partial(self._compute_proposal, action))
            case _:
                raise AssertionError(action)

    # ------------------------------------------------------------------------------- fetch

    def _fetch_blob(self, contribution_id: str, contribution: Contribution) -> None:
        member, blob_id = self._member, contribution.blob_id
        if not self._is_offered(blob_id, contribution.author):
            member.feed(ev.RequestFailed(contribution_id))
            return
        if blob_id not in member.disk.blobs:
            member.traffic.note_file("blobs")
        if blob_id in member.contents.units_of:
            member.disk.blobs.add(blob_id)
            member.post(ev.BlobHeld(contribution_id))
        else:
            member.post(ev.BlobRefused(contribution_id, "not finite"))

    def _is_offered(self, blob_id: str, author: str) -> bool:
        """Return whether somebody who can be reached gives the blob; the author is asked first."""
        member = self._member
        if blob_id in member.disk.blobs:
            return True
        if blob_id in member.contents.withheld:
            return False
        peers, can_reach = member.peers, member.exchange.can_reach
        first = peers.get(author)
        if first is not None and blob_id in first.disk.blobs and can_reach(first):
            return True
        return any(blob_id in peer.disk.blobs and can_reach(peer) for peer in peers.values())

    def _fetch_state(self, commit_id: str) -> None:
        """Fetch a state from whoever has it first; it is one only if its hash is the commit's."""
        member = self._member
        wanted = member.machine.state_hash_of(commit_id)
        for peer in member.peers.values():
            if commit_id in peer.disk.states and member.exchange.can_reach(peer):
                member.traffic.note_file("states")
                if peer.files.given_state(commit_id) == wanted:
                    self._hold_state(commit_id, wanted)
                    return
        member.feed(ev.RequestFailed(commit_id))

    def given_state(self, commit_id: str) -> str:
        """Return the state that a neighbour is given; a liar may give another one."""
        state = self._member.disk.states[commit_id]
        liar = self._member.liar
        return state[::-1] if liar is not None and liar.does("wrong-hash") else state

    # ----------------------------------------------------------------------------- compute

    def _compute_state(self, action: ev.ComputeState) -> None:
        member, commit = self._member, action.commit
        if not self._can_apply(commit.parent, action.listed):
            member.feed(ev.RequestFailed(action.commit_id))
            return
        state = state_after(member.disk.states[commit.parent], action.listed)
        if state != commit.state_hash:
            member.feed(ev.StateRefused(action.commit_id, "another hash"))
        elif marks_of(member.contents, action.listed) != commit.marks:
            member.feed(ev.StateRefused(action.commit_id, "other marks"))
        else:
            self._hold_state(action.commit_id, state)
            if is_scorer(member, action.commit_id):
                member.after(SCORE_S * member.slowness, partial(self._score, action.commit_id))

    def _score(self, commit_id: str) -> None:
        harmful = verdict_on(self._member, commit_id)
        if harmful is not None:
            self._member.feed(ev.VerdictReached(commit_id, harmful))

    def _compute_proposal(self, action: ev.ComputeProposal) -> None:
        member = self._member
        if not self._can_apply(action.parent, action.listed):
            member.feed(ev.RequestFailed(action.parent))
            return
        listed = tuple(entry.contribution_id for entry in action.listed)
        state = state_after(member.disk.states[action.parent], action.listed)
        marked = marks_of(member.contents, action.listed)
        member.feed(ev.ProposalComputed(action.parent, listed, state, marked))

    def _can_apply(self, parent: str, listed: tuple[ev.Listed, ...]) -> bool:
        member = self._member
        has_blobs = all(entry.contribution.blob_id in member.disk.blobs for entry in listed)
        return member.is_contributing and parent in member.disk.states and has_blobs

    def _hold_state(self, commit_id: str, state: str) -> None:
        disk = self._member.disk
        if commit_id not in disk.verified:
            disk.verified.append(commit_id)
        disk.states[commit_id] = state
        self._member.feed(ev.StateHeld(commit_id))

    # ------------------------------------------------------------------------------- prune

    def prune(self, height: int) -> None:
        """Delete what nobody can need once the tip is at `height`."""
        member, disk = self._member, self._member.disk
        facts = member.machine.known.facts
        for commit_id in sorted(disk.states):
            here = facts.get(commit_id)
            if here is None:
                del disk.states[commit_id]  # its commit has been forgotten
            elif here.height < height - JOURNAL_ROUNDS:
                del disk.states[commit_id]
                member.after(0.0, partial(member.feed, ev.StateDropped(commit_id)))
        # A little further down again: what was asked for before may have come since.
        for old_height in range(max(0, self._pruned_to - 2), height - JOURNAL_ROUNDS):
            records = disk.by_height.get(old_height, {})
            disk.blobs.difference_update(_blobs_of_others(records, member.me))
        self._pruned_to = max(self._pruned_to, height - JOURNAL_ROUNDS)


def _blobs_of_others(records: dict[str, Record], me: str) -> list[str]:
    return [r.blob_id for r in records.values() if isinstance(r, Contribution) and r.author != me]
