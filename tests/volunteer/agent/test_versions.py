"""Members of another version: a newer minor one is in the same run, on real hosts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import trio

from p2p.errors import RequestRefusedError
from p2p.swarm import Swarm, open_swarm
from tests.fakes import newer
from tests.fakes import solo as solo_module
from tests.fakes.members import MODULE, PEOPLE, RUN_ID, SignedChain, sign
from tests.fakes.neighbours import Neighbour, run
from tests.fakes.network import FakeNetwork, FakeSwarm
from tests.fakes.solo import Disk, Solo
from tests.p2p.support import is_connected, quick_config, until
from volunteer.agent.intake import KNOWN_KINDS, NewKind, verify_incoming
from volunteer.agent.record_book import SignedRecord
from volunteer.agent.wire import Heartbeat, PushRecords, SyncReply, encode, parse_heartbeat
from volunteer.rounds.records import (
    Commit,
    Contribution,
    Leaving,
    RecordError,
    encode_body,
    encode_envelope,
    signed_bytes,
)

ROUND_S = 1.0
DEADLINE_S = 80.0  # eight rounds, on a machine that has other things to do


class HostedSwarm:
    """A real swarm that notes what is published, as a `FakeSwarm` does."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self.on_publish: Callable[[str, bytes], None] = lambda topic, payload: None
        self.store = None

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 -- whatever a swarm has
        return getattr(self._swarm, name)

    @property
    def as_swarm(self) -> Swarm:
        return cast("Swarm", self)

    async def publish(self, topic: str, payload: bytes, *, purpose: str) -> None:
        await self._swarm.publish(topic, payload, purpose=purpose)


class OneHost:
    """Stands in for the network of a `Solo`, which joins it once."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm

    def join(self, peer_id: str) -> FakeSwarm:
        assert peer_id == self._swarm.peer_id
        return cast("FakeSwarm", HostedSwarm(self._swarm))


async def start_member(
    solo: Solo, swarm: Swarm, nursery: trio.Nursery, make: Callable[..., Heartbeat]
) -> None:
    solo.machine.timing.round_s = ROUND_S
    swarm.serve_blobs(solo.disk.store, lambda _blob_id: True, lambda _blob_id: "blob")
    await solo.start()

    def heartbeat() -> Heartbeat | None:
        machine = solo.machine
        if machine.tip is None:
            return None
        return make(
            run_id=solo.spec.run_id,
            module_id=MODULE,
            tip=machine.tip,
            round_index=solo.height,
            state_hash=solo.driver.state_hash,
            is_contributing=True,
            tokens_per_s=1.0,
            loss=None,
            addrs=(),
        )

    nursery.start_soon(solo.exchange.run, 0.3, heartbeat)


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(90)
def test_a_newer_minor_version_trains_in_the_same_run(tmp_path: Path) -> None:
    async def bounded() -> None:
        with trio.fail_after(DEADLINE_S):
            await train_together(tmp_path)

    trio.run(bounded)


async def train_together(tmp_path: Path) -> None:
    """Two members train on real hosts; the older is the one neighbour of a newer listener."""
    spec = solo_module.solo_spec()
    hub = quick_config(namespace=spec.run_id, program="allmende 0.1.0", discover_every_s=60.0)
    async with open_swarm(PEOPLE[0], hub) as older_host:
        addrs = older_host.listen_addrs
        late = quick_config(
            *addrs,
            namespace=spec.run_id,
            discover_every_s=60.0,
            listen=(),
            protocol=newer.PROTOCOL,
            program=newer.PROGRAM,
        )
        async with (
            open_swarm(PEOPLE[1], late) as newer_host,
            open_swarm(PEOPLE[2], late) as listener,
            trio.open_nursery() as nursery,
        ):
            heard = await listen(listener, spec.run_id)
            older = Solo(Disk(tmp_path / "a", PEOPLE[0]), nursery, network_of(older_host))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(solo_module, "RecordBook", newer.NewerBook)
                patch.setattr(solo_module, "Exchange", newer.NewerExchange)
                disk = Disk(tmp_path / "b", PEOPLE[1], num_encoded=100)
                other = Solo(disk, nursery, network_of(newer_host))
            await until(lambda: is_connected(older_host, newer_host))
            await start_member(older, older_host, nursery, Heartbeat)
            await start_member(other, newer_host, nursery, newer.NewerHeartbeat)
            await until(lambda: older.height >= 3 and older.machine.tip == other.machine.tip)
            verify_both_worked(older, other)
            await until(lambda: any(isinstance(one, NewKind) for one in heard))
            assert not is_connected(listener, newer_host), "the older one passed it on"
            assert set(older.exchange.members()) == {newer_host.peer_id}
            (view,) = [p for p in older_host.peers() if p.peer_id == newer_host.peer_id]
            assert view.version is not None
            assert (view.version.major, view.version.minor) == newer.PROTOCOL
            for host in (older_host, newer_host, listener):
                assert not host.banned()
                assert host.statistics().misdeeds == 0
                assert host.statistics().refused_messages == 0
            nursery.cancel_scope.cancel()
        older.close()
        other.close()


def network_of(host: Swarm) -> FakeNetwork:
    return cast("FakeNetwork", OneHost(host))


async def listen(swarm: Swarm, run_id: str) -> list[SignedRecord | NewKind]:
    heard: list[SignedRecord | NewKind] = []

    async def accept(_author: str, _payload: bytes) -> bool:
        await trio.lowlevel.checkpoint()
        return True

    async def on_message(_author: str, payload: bytes) -> None:
        await trio.lowlevel.checkpoint()
        heard.append(verify_incoming(payload, run_id, MODULE))

    await swarm.subscribe(
        f"allmende/1/{run_id}/{MODULE}/records", accept, on_message, max_bytes=65536
    )
    return heard


def verify_both_worked(older: Solo, other: Solo) -> None:
    """Both are listed; both stand on one state; the newer's fields were kept as they came."""
    known = older.machine.known
    chain = list(known.chain_down(older.machine.tip or ""))
    authors = {known.contributions[i].author for c in chain for i in known.facts[c].listed}
    assert authors == {older.disk.who.peer_id, other.disk.who.peer_id}
    assert older.driver.state_hash == other.driver.state_hash
    kinds = set()
    for record_id in [*known.contributions, *known.commits]:
        record = known.record(record_id)
        assert isinstance(record, Commit | Contribution)
        envelope = older.record_log.get(record_id)
        assert other.record_log.get(record_id) == envelope
        is_newer = newer.NEW_FIELD.encode() in envelope
        who = record.proposer if isinstance(record, Commit) else record.author
        assert is_newer is (who == other.disk.who.peer_id)
        kinds.add((type(record), is_newer))
    assert {(Contribution, True), (Contribution, False)} <= kinds


# ------------------------------------------------------------------------- one exchange


def test_new_fields_are_kept_and_new_kinds_are_passed_on_and_not_kept(
    neighbours: list[Neighbour],
) -> None:
    one, other = neighbours
    chain = SignedChain()
    chain.grow(chain.genesis, 1)
    first, second, _ = (signed.record for signed in chain.all())
    signed = [newer.sign_newer(first, PEOPLE[0]), newer.sign_newer(second, PEOPLE[1])]
    applause = newer.new_kind(first, PEOPLE[0])
    push = PushRecords(run_id=RUN_ID, module_id=MODULE, envelopes=(applause, signed[0].envelope))

    async def body() -> None:
        assert await one.exchange._accept_record("p", applause)
        assert await one.exchange._accept_record("p", signed[0].envelope)
        await one.exchange._on_gossiped_record("p", applause)
        assert not one.member.ids()
        await one.exchange._respond("p", encode(push))
        assert one.member.ids() == {signed[0].record_id}
        reply = SyncReply(envelopes=(applause, signed[1].envelope))
        await one.exchange._take_reply("p", reply)
        assert one.member.ids() == {signed[0].record_id, signed[1].record_id}
        await other.exchange._sync_with(one.peer_id)
        assert other.member.ids() == one.member.ids()
        for record in signed:
            assert other.member.log.get(record.record_id) == record.envelope

    run(body)


def test_another_form_of_a_record_is_refused_on_every_way(neighbours: list[Neighbour]) -> None:
    one, _ = neighbours
    record = Leaving(
        run_id=RUN_ID, module_id=MODULE, round_index=3, author=PEOPLE[0].peer_id, base="1b" * 32
    )
    fields = msgspec.msgpack.decode(encode_body(record))
    reordered = msgspec.msgpack.encode(dict(reversed(fields.items())))
    envelope = encode_envelope(reordered, PEOPLE[0].sign(signed_bytes(reordered)))
    push = encode(PushRecords(run_id=RUN_ID, module_id=MODULE, envelopes=(envelope,)))

    async def body() -> None:
        assert await one.exchange._accept_record("p", sign(record).envelope)
        assert not await one.exchange._accept_record("p", envelope)
        with pytest.raises(RequestRefusedError, match="one form"):
            await one.exchange._respond("p", push)
        with pytest.raises(RecordError, match="one form"):
            await one.exchange._take_reply("p", SyncReply(envelopes=(envelope,)))
        assert not one.member.ids()

    run(body)


def test_what_a_newer_one_says_is_what_an_older_one_reads() -> None:
    beat = newer.NewerHeartbeat(
        run_id=RUN_ID,
        module_id=MODULE,
        tip=RUN_ID,
        round_index=1,
        state_hash=RUN_ID,
        is_contributing=True,
        tokens_per_s=1.0,
        loss=None,
        addrs=(),
    )
    assert b"mood" in encode(beat)
    assert parse_heartbeat(encode(beat)).tip == RUN_ID
    assert newer.NEW_KIND not in KNOWN_KINDS
