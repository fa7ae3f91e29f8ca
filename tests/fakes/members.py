"""Members of a run with real keys: signed records and chains in a few words."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from p2p.identity import Identity
from tests.volunteer.rounds.chain_builder import RUN_ID, ChainBuilder, hash_of, make_rules
from volunteer.agent.record_book import RecordBook, SignedRecord
from volunteer.agent.record_log import RecordLog
from volunteer.agent.signed_mark import SignedMark
from volunteer.rounds.chain import ChainRules
from volunteer.rounds.machine import Machine
from volunteer.rounds.records import (
    Record,
    author_of,
    encode_body,
    encode_envelope,
    record_id_of,
    signed_bytes,
)
from volunteer.rounds.turn import Timing

MODULE = "dense"


def identity(number: int) -> Identity:
    """Return the same key for the same number."""
    return Identity(bytes([number]) * 32)


PEOPLE = tuple(identity(number) for number in range(1, 5))
_BY_PEER = {person.peer_id: person for person in PEOPLE}


def sign(record: Record, by: Identity | None = None) -> SignedRecord:
    """Sign a record, by its author unless said otherwise."""
    body = encode_body(record)
    signer = by or _BY_PEER[author_of(record)]
    return SignedRecord(
        record_id_of(body), record, encode_envelope(body, signer.sign(signed_bytes(body)))
    )


def rules(**changes: object) -> ChainRules:
    """Return the rules of an open run."""
    return make_rules(publisher="", **changes)  # type: ignore[arg-type]


class SignedChain:
    """A chain whose records are signed."""

    def __init__(self) -> None:
        self.builder = ChainBuilder(rules())
        self.genesis = self.builder.genesis

    def grow(self, parent: str, num_rounds: int, people: Iterable[Identity] = PEOPLE[:2]) -> str:
        """Add rounds in which all of `people` contribute; return the last commit."""
        for _ in range(num_rounds):
            listed = [self.builder.contribution(p.peer_id, parent) for p in people]
            proposer = None if self.builder.facts(parent).height else PEOPLE[0].peer_id
            parent = self.builder.commit(parent, listed, proposer=proposer)
        return parent

    def all(self) -> list[SignedRecord]:
        """Return every record, in the order in which they were made."""
        return [sign(record) for record in self.builder.records.values()]


class Member:
    """One member's machine and book, on a disk of its own."""

    def __init__(self, folder: Path, who: Identity) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.who = who
        self.log = RecordLog(folder / "records.sqlite")
        timing = Timing(round_s=1e9, grace_s=1.0, failover_s=1.0)
        self.machine = Machine(rules(), timing, who.peer_id)
        mark = SignedMark(folder / "signed", who.peer_id, RUN_ID, "dense")
        self.book = RecordBook(self.log, who, self.machine.known, mark)

    async def keep(self, records: Iterable[SignedRecord]) -> None:
        for signed in records:
            if await self.book.keep(signed, is_own=False):
                self.machine.known.add(signed.record_id, signed.record)

    def ids(self) -> set[str]:
        return set(self.book.ids_from(0))


__all__ = ["MODULE", "PEOPLE", "RUN_ID", "Member", "SignedChain", "hash_of", "identity", "sign"]
