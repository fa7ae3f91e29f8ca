"""Members that break the rules on purpose, each in some of these ways.

Runs in: simulation. A liar runs the real machine, and what the machine signs is altered on its way
out, or said differently to different peers; once a round it also sends what nobody asked for.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from volunteer.lab.simulation.files import state_after
from volunteer.lab.simulation.judging import marks_of
from volunteer.rounds.chain import listed_in_order
from volunteer.rounds.exclusion import max_struck
from volunteer.rounds.records import (
    MAX_TOKENS,
    Commit,
    Contribution,
    Envelope,
    Leaving,
    Record,
    encode_body,
    record_id_of,
)

if TYPE_CHECKING:
    from volunteer.lab.simulation.member import Member

LIES = {
    "wrong-hash": "proposes commits with a wrong hash, and serves wrong states",
    "double-commit": "signs two commits where it proposes, and tells them to different peers",
    "vote-anything": "votes for whatever it stands on, lock and earlier votes or not",
    "double-vote": "signs two votes a height, and tells them to different peers",
    "inflated-tokens": "declares a thousand times the tokens that it has trained",
    "withheld-blob": "announces contributions and gives their blobs to nobody",
    "replay": "sends old records again",
    "old-version": "sends records of other versions, and torn ones",
    "censoring": "lists its own contribution alone where it proposes",
    "grinding": "chooses what it lists so that it comes first two rounds later",
    "spam": "sends records of made-up identities: contributions, commits and farewells",
}
"""Name, and what such a member does."""
WORK_LIES = {
    "bad-work": "contributes what every aggregation marks",
    "harmful-work": "contributes what only scorers can tell from honest work",
    "false-verdicts": "as a scorer blames honest work and no liar's; marks honest work, proposing",
}
"""Lies about work, by name: who is excluded for it. Not among all faults."""
INFLATION = 1000
GRINDING_TRIES = 8
REPLAYED_A_ROUND = 10
SPAM_A_ROUND = 6


@dataclass(slots=True)
class Liar:
    """What is wrong with one member."""

    lies: frozenset[str]
    rng: random.Random
    member: Member = field(init=False, repr=False)
    _num_identities: int = 0

    def does(self, lie: str) -> bool:
        """Return whether this member lies in this way."""
        return lie in self.lies

    def is_fellow(self, author: str) -> bool:
        """Return whether `author` lies as well: they know each other."""
        peer = self.member.peers.get(author)
        return peer is not None and peer.is_liar

    # ----------------------------------------------------------------- what it signs itself

    def alter(self, record: Record) -> Record:
        """Return what it signs in place of what its machine wants to."""
        if isinstance(record, Contribution):
            return self._altered_contribution(record)
        if isinstance(record, Commit):
            return self._altered_commit(record)
        return record

    def _altered_contribution(self, record: Contribution) -> Contribution:
        if self.does("withheld-blob"):
            self.member.contents.withheld.add(record.blob_id)
        if self.does("bad-work"):
            self.member.contents.plainly_bad.add(record.blob_id)
        elif self.does("harmful-work"):
            self.member.contents.harmful.add(record.blob_id)
        tokens = record.tokens
        if self.does("inflated-tokens"):
            tokens = min(MAX_TOKENS, INFLATION * tokens)
        vote = record.vote or self.does("vote-anything") or self.does("double-vote")
        return msgspec.structs.replace(record, tokens=tokens, vote=vote)

    def _altered_commit(self, record: Commit) -> Commit:
        if self.does("censoring"):
            own = [i for i in record.contributions if i in self.member.machine.own]
            record = self._with_list(record, tuple(own) or record.contributions[:1])
        if self.does("grinding"):
            record = self._ground(record)
        if self.does("wrong-hash") and self.rng.random() < 0.5:
            record = msgspec.structs.replace(record, state_hash=record.state_hash[::-1])
        if self.does("false-verdicts") and self.rng.random() < 0.5:
            record = self._with_false_marks(record)
        return record

    def _with_false_marks(self, record: Commit) -> Commit:
        """Mark honest work, as much as a commit may mark."""
        contributions = self.member.machine.known.contributions
        authors = {i: contributions[i].author for i in record.contributions}
        honest = [i for i in record.contributions if not self.is_fellow(authors[i])]
        limit = max_struck(len({*authors.values()}))
        marked = tuple(sorted(honest[:limit]))
        return msgspec.structs.replace(record, marked=marked or msgspec.UNSET)

    def _ground(self, record: Commit) -> Commit:
        """Leave one contribution out, another each time, and take what ranks it best."""
        listed = record.contributions
        num_tries = min(GRINDING_TRIES, len(listed)) if len(listed) > 1 else 0
        tries = [record]
        tries += [self._with_list(record, listed[:i] + listed[i + 1 :]) for i in range(num_tries)]
        return min(tries, key=self._rank_hash)

    def _rank_hash(self, record: Commit) -> bytes:
        """Return what the ranks at this commit's children are drawn by (rule 13)."""
        commit_id = record_id_of(encode_body(record))
        height = record.round_index + 1
        text = f"{record.run_id}/{record.module_id}/{height}/{commit_id}/{self.member.me}"
        return blake3(text.encode()).digest()

    def _with_list(self, record: Commit, listed_ids: tuple[str, ...]) -> Commit:
        """Return the commit with another list, and the hash that goes with it."""
        known = self.member.machine.known
        listed = listed_in_order(listed_ids, known.facts[record.parent], known.contributions)
        state_hash = state_after(self.member.disk.states[record.parent], listed)
        return msgspec.structs.replace(
            record,
            contributions=listed_ids,
            state_hash=state_hash,
            marked=marks_of(self.member.contents, listed) or msgspec.UNSET,
        )

    # -------------------------------------------------------- what it says to some of them

    def tell_others_otherwise(self, record: Record) -> list[Member] | None:
        """Tell half of the peers something else; return the other half, or None for all."""
        other = self._contradiction(record)
        if other is None:
            return None
        member = self.member
        other_id = member.traffic.register(other)
        member.disk.keep(other_id, other)
        peers = [peer for peer in member.peers.values() if peer is not member]
        member.exchange.gossip(other_id, other, peers[::2])
        return peers[1::2]

    def _contradiction(self, record: Record) -> Record | None:
        if isinstance(record, Commit) and self.does("double-commit"):
            if len(record.contributions) < 2:
                return None
            other = self._with_list(record, record.contributions[1:])
            if record.round_index % 2 and self.does("wrong-hash"):
                other = msgspec.structs.replace(other, state_hash=other.state_hash[::-1])
            return other
        if isinstance(record, Contribution) and self.does("double-vote"):
            return msgspec.structs.replace(record, tokens=min(MAX_TOKENS, record.tokens + 1))
        return None

    # ------------------------------------------------------------- what nobody asked it for

    def make_mischief(self) -> None:
        """Once a round: send what nobody wants."""
        member = self.member
        if not member.is_reachable or member.machine.tip is None:
            return
        if self.does("replay"):
            self._replay()
        if self.does("old-version"):
            self._send_other_versions()
        if self.does("spam"):
            self._spam()

    def _replay(self) -> None:
        disk = self.member.disk
        ids = sorted(disk.records)
        for record_id in self.rng.sample(ids, min(REPLAYED_A_ROUND, len(ids))):
            self.member.exchange.gossip(record_id, disk.records[record_id])

    def _send_other_versions(self) -> None:
        member = self.member
        for record in list(member.disk.records.values())[-3:]:
            body = encode_body(record)
            for version in (0, Envelope.VERSION + 1):
                envelope = Envelope(version=version, body=body, signature=bytes(64))
                self._send_bytes(msgspec.msgpack.encode(envelope))
            self._send_bytes(body[: len(body) // 2])

    def _send_bytes(self, data: bytes) -> None:
        member = self.member
        for peer in member.peers.values():
            if peer is not member and member.exchange.can_reach(peer):
                member.world.after(
                    member.world.delay_s(), _delivery(peer.exchange.receive_bytes, data)
                )

    def _spam(self) -> None:
        """Three kinds of contributions, two of commits, and a farewell, by new identities."""
        member = self.member
        for _ in range(SPAM_A_ROUND):
            self._num_identities += 1
            author = f"nobody-{member.me}-{self._num_identities}"
            record = self._spam_record(author)
            record_id = member.traffic.register(record)
            member.disk.keep(record_id, record)
            member.exchange.gossip(record_id, record)

    def _spam_record(self, author: str) -> Record:
        member, kind = self.member, self._num_identities % 5
        assert member.machine.tip is not None
        facts = member.machine.known.facts[member.machine.tip]
        rules = member.rules
        noise = blake3(author.encode()).hexdigest()
        if kind in (0, 1):
            if kind == 0:
                member.disk.blobs.add(noise)  # it can be fetched, and is no contribution
            return Contribution(
                run_id=rules.run_id,
                module_id=rules.module_id,
                round_index=facts.height,
                author=author,
                base=facts.commit_id,
                vote=True,
                blob_id=noise,
                blob_bytes=1000,
                codec="int4",
                codec_version=1,
                tokens=MAX_TOKENS,
            )
        if kind in (2, 3):
            # On the tip with a rank that is not its own, or on a parent that never was.
            return Commit(
                run_id=rules.run_id,
                module_id=rules.module_id,
                round_index=facts.height + 1,
                parent=facts.commit_id if kind == 2 else noise,
                rank=0,
                proposer=author,
                contributions=(noise,) if kind == 3 else tuple(sorted(facts.listed)),
                state_hash=noise,
            )
        return Leaving(
            run_id=rules.run_id,
            module_id=rules.module_id,
            round_index=facts.height,
            author=author,
            base=facts.commit_id,
        )


def _delivery(receive: Callable[[bytes], None], data: bytes) -> Callable[[], None]:
    return lambda: receive(data)
