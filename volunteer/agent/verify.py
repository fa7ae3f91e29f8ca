"""Checks a demo from its published records and blobs alone, by replaying every commit.

Runs in: demo. No agent's word is taken: signatures are verified, chains judged, every state is
computed again by a fresh aggregator process, from the genesis on.
"""

from __future__ import annotations

import functools
import shutil
import sqlite3
import tempfile
from collections import Counter
from pathlib import Path

import msgspec
import trio

from p2p.blobstore import BlobStore, blob_id_of_bytes
from volunteer.agent.aggregator_service import (
    AggregatorLostError,
    AggregatorRefusedError,
    AggregatorService,
)
from volunteer.agent.commit_states import marked_ids
from volunteer.agent.joined_run import chain_rules
from volunteer.agent.listing import listed_works
from volunteer.agent.record_book import SignedRecord, verify_envelope
from volunteer.agent.record_log import RecordLog
from volunteer.errors import CheckpointError, VolunteerError
from volunteer.files import make_private_dir
from volunteer.locations import HOME_VARIABLE, Locations
from volunteer.messages import ApplyCommit, BuildGenesis, ListedWork, StateBuilt
from volunteer.rounds.chain import listed_in_order
from volunteer.rounds.fork_choice import choose_tip
from volunteer.rounds.knowledge import Knowledge
from volunteer.rounds.records import DENSE_MODULE, RecordError
from volunteer.run import RunSpec, read_run_spec
from volunteer.run_owner import verify_publisher

MIN_LISTED = 2


class DemoCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What the replay found."""

    run_id: str
    num_records: int
    num_commits: int
    """On the longest common chain."""
    heads: list[str]
    """Each volunteer's last commit."""
    commits_reproduced: int
    """Whose state hash the replay found again."""
    drops_tried: int
    """How often a commit was replayed with one contribution left out."""
    drops_noticed: int
    """How often that gave another state hash; must be all."""
    listed_by_author: dict[str, int]
    """Commits that list a contribution of this peer with non-zero content and weight."""
    problems: list[str]
    given_genesis: str = ""
    """State hash of the weights that the run begins from; empty: those were computed as well."""

    def sentences(self) -> list[str]:
        """Return it in words."""
        begun_from = (
            f"  The run begins from weights that cannot be computed ({self.given_genesis[:12]}...):"
            " they were taken from a volunteer's disk, and are what the RunSpec's hash says."
        )
        return [
            f"Checked afterwards, from {self.num_records} signed records of the volunteers:",
            *([begun_from] if self.given_genesis else []),
            f"  {self.commits_reproduced} of {self.num_commits} commits reproduced bit for bit:"
            " computing them again gave the same weights.",
            f"  Leaving out any one contribution gave other weights, in {self.drops_noticed} of"
            f" {self.drops_tried} cases: so each one counts.",
        ]


def verify_demo(folder: Path) -> DemoCheck:
    """Replay a demo's folder.

    Raises:
        VolunteerError: it is not a demo's folder, or its files cannot be read at all.
    """
    spec_file = folder / "demo.toml"
    homes = sorted(folder.glob("volunteer-*"))
    if not spec_file.is_file() or not homes:
        raise VolunteerError(
            f"{folder} is not a demo's folder", hint="make one with `allmende demo --keep DIR`"
        )
    spec = read_run_spec(spec_file)
    verify_publisher(spec, source=str(spec_file))
    with tempfile.TemporaryDirectory(prefix="allmende-verify-") as scratch:
        return trio.run(functools.partial(_replay, spec, spec_file, homes, Path(scratch)))


async def _replay(spec: RunSpec, spec_file: Path, homes: list[Path], scratch: Path) -> DemoCheck:
    problems: list[str] = []
    records, heads = _read_records(spec, homes, problems)
    known = _know(spec, records)
    blobs_dir = scratch / "modules" / DENSE_MODULE / "blobs"
    make_private_dir(blobs_dir)
    shutil.copy(spec_file, scratch / "spec.toml")
    _gather_blobs(spec, homes, known, BlobStore(blobs_dir), problems)
    aggregator = AggregatorService(scratch, DENSE_MODULE, scratch / "aggregator.log")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(aggregator.run)
        aggregator.want()
        replay = _Replay(spec, known, aggregator, problems)
        check = await replay.run(len(records), heads)
        nursery.cancel_scope.cancel()
    return check


def _read_records(
    spec: RunSpec, homes: list[Path], problems: list[str]
) -> tuple[dict[str, SignedRecord], list[str]]:
    """Return all volunteers' records, signatures verified, and each one's head."""
    records: dict[str, SignedRecord] = {}
    heads = []
    for home in homes:
        own = {}
        for envelope in _read_envelopes(spec, home, problems):
            try:
                signed = verify_envelope(envelope, spec.run_id, DENSE_MODULE)
            except RecordError as error:
                problems.append(f"{home.name} keeps a forged record: {error}")
            else:
                own[signed.record_id] = signed
        records.update(own)
        heads.append(_head(spec, own))
    return records, heads


def _read_envelopes(spec: RunSpec, home: Path, problems: list[str]) -> list[bytes]:
    """Return what one volunteer keeps, up to the first damaged record."""
    locations = Locations.from_environment({HOME_VARIABLE: str(home)})
    record_file = locations.record_file(spec.run_id, DENSE_MODULE)
    envelopes: list[bytes] = []
    if not record_file.is_file():
        problems.append(f"{home.name} has no records of this run")
        return envelopes
    try:
        log = RecordLog(record_file)
        try:
            envelopes.extend(log.all())
        finally:
            log.close()
    except CheckpointError as error:
        problems.append(f"{home.name}: {error}")
    except sqlite3.OperationalError as error:
        raise VolunteerError(
            f"{record_file} cannot be read: {error}", hint="end the agent that uses it"
        ) from error
    return envelopes


def _head(spec: RunSpec, records: dict[str, SignedRecord]) -> str:
    known = _know(spec, records)
    return choose_tip(known.headers, known.rules.genesis_id)


def _know(spec: RunSpec, records: dict[str, SignedRecord]) -> Knowledge:
    known = Knowledge(chain_rules(spec))
    for signed in records.values():
        known.add(signed.record_id, signed.record)
    return known


def _gather_blobs(
    spec: RunSpec, homes: list[Path], known: Knowledge, store: BlobStore, problems: list[str]
) -> None:
    """Copy the contributions' blobs, and a given genesis, from whoever has them, by their hash."""
    given = [spec.genesis.state_hash] if spec.genesis.is_given else []
    wanted = sorted({*given, *(c.blob_id for c in known.contributions.values())})
    for home in homes:
        locations = Locations.from_environment({HOME_VARIABLE: str(home)})
        blobs_dir = locations.blobs_dir(spec.run_id, DENSE_MODULE)
        for blob_id in wanted:
            file = blobs_dir / blob_id
            if not file.is_file():
                continue
            data = file.read_bytes()
            if blob_id_of_bytes(data) != blob_id:
                problems.append(f"{home.name} keeps a damaged blob {blob_id[:12]}")
            elif not store.has(blob_id):
                store.add_bytes(data)
    lacking = [blob_id for blob_id in given if not store.has(blob_id)]
    problems += [f"nobody has the weights that the run begins from: {i[:12]}" for i in lacking]
    for commit_id, facts in known.facts.items():
        for contribution_id in sorted(facts.listed):
            blob_id = known.contributions[contribution_id].blob_id
            if not store.has(blob_id):
                problems.append(f"commit {commit_id[:12]} lists blob {blob_id[:12]}: nobody has it")


class _Replay:
    """The chain from the genesis to the head, computed anew."""

    def __init__(
        self, spec: RunSpec, known: Knowledge, aggregator: AggregatorService, problems: list[str]
    ) -> None:
        self._spec = spec
        self._known = known
        self._aggregator = aggregator
        self._problems = problems
        self._listed_by: Counter[str] = Counter()
        self._tried = self._noticed = self._reproduced = 0

    async def run(self, num_records: int, heads: list[str]) -> DemoCheck:
        genesis = self._known.rules.genesis_id
        head = choose_tip(self._known.headers, genesis)
        chain = list(self._known.chain_down(head))[::-1][1:]
        for volunteer, own_head in enumerate(heads):
            if own_head not in (*chain, genesis):
                self._problems.append(f"volunteer {volunteer} ended on another branch")
        try:
            await self._replay_chain(chain)
        except (AggregatorLostError, AggregatorRefusedError) as error:
            self._problems.append(f"the replay ended after {self._reproduced} commits: {error}")
        self._judge_authors()
        return DemoCheck(
            run_id=self._spec.run_id,
            num_records=num_records,
            num_commits=len(chain),
            heads=heads,
            commits_reproduced=self._reproduced,
            drops_tried=self._tried,
            drops_noticed=self._noticed,
            listed_by_author=dict(self._listed_by),
            problems=self._problems,
            given_genesis=self._spec.genesis.state_hash if self._spec.genesis.is_given else "",
        )

    async def _replay_chain(self, chain: list[str]) -> None:
        built = await self._aggregator.ask(lambda i: BuildGenesis(request_id=i))
        assert isinstance(built, StateBuilt)
        state_hash = built.state_hash
        for commit_id in chain:
            if not await self._replay_commit(commit_id, state_hash):
                break
            state_hash = self._known.commits[commit_id].state_hash

    async def _replay_commit(self, commit_id: str, parent_state: str) -> bool:
        commit = self._known.commits[commit_id]
        parent = self._known.facts[commit.parent]
        works = listed_works(
            listed_in_order(commit.contributions, parent, self._known.contributions)
        )
        built = await self._apply(parent.height, parent_state, works)
        if built.state_hash != commit.state_hash:
            self._problems.append(f"commit {commit_id[:12]} gives another state than it says")
            return False
        if marked_ids(built.outcomes) != commit.marks:
            self._problems.append(f"commit {commit_id[:12]} marks other work than is bad")
            return False
        self._reproduced += 1
        content = {o.contribution_id for o in built.outcomes if o.norm > 0 and o.weight > 0}
        self._listed_by.update({w.author for w in works if w.contribution_id in content})
        # One of weight 0 was refused: leaving it out need not change anything.
        counted = tuple(work for work in works if work.contribution_id in content)
        await self._try_drops(commit_id, parent.height, parent_state, works, counted)
        return True

    async def _try_drops(
        self,
        commit_id: str,
        round_index: int,
        parent_state: str,
        works: tuple[ListedWork, ...],
        counted: tuple[ListedWork, ...],
    ) -> None:
        for left_out in counted:
            rest = tuple(work for work in works if work is not left_out)
            built = await self._apply(round_index, parent_state, rest)
            self._tried += 1
            if built.state_hash != self._known.commits[commit_id].state_hash:
                self._noticed += 1
            else:
                self._problems.append(
                    f"commit {commit_id[:12]} does not depend on {left_out.contribution_id[:12]}"
                )

    async def _apply(
        self, round_index: int, parent_state: str, works: tuple[ListedWork, ...]
    ) -> StateBuilt:
        reply = await self._aggregator.ask(
            lambda i: ApplyCommit(
                request_id=i, round_index=round_index, parent_state=parent_state, listed=works
            )
        )
        assert isinstance(reply, StateBuilt)
        return reply

    def _judge_authors(self) -> None:
        authors = {c.author for c in self._known.contributions.values()}
        for author in sorted(authors):
            if self._listed_by[author] < MIN_LISTED:
                self._problems.append(
                    f"peer {author} is listed with content in only {self._listed_by[author]} "
                    f"commits"
                )
