"""A newcomer gets a state of 100 million parameters from a liar, one that dies and an honest one.

The founder makes some rounds and then only gives, as do two that begin with a copy of what it has.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import pytest

from p2p.blobstore import BlobStore
from tests.system.agents import wait_until
from tests.system.network import Bridge, Network, _run
from tests.system.swarms import LocalSwarm, NodeAgent, local_swarm, report
from volunteer.answers import CatchUp, Status
from volunteer.rounds.records import DENSE_MODULE
from volunteer.run import ModelSpec, RunSpec, format_run_spec

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.full]

MODEL = ModelSpec(num_layers=8, dim=1024, num_heads=8, ffn_dim=2816, context_tokens=32)
"""103 million parameters: a state of 824 MB, 786 chunks."""
SMALL_MODEL = ModelSpec(num_layers=2, dim=192, num_heads=2, ffn_dim=512, context_tokens=32)
"""934,000 parameters: a state of 7.5 MB, 8 chunks."""
MIB = 1 << 20
NUM_ROUNDS = 4
JOURNAL_ROUNDS = 2
"""Rounds whose blobs are kept: fewer than there are, so that replaying them is no way."""
RATE = "120mbit"
"""Of each donor's line: 15 MB/s, so that there is time to kill somebody."""
SLOW_RATE = "1mbit"
"""Of the one honest donor's line: a minute for the small state."""
KILL_NEWCOMER_AT = 0.25
KILL_DONOR_AT = 0.6
MAX_REFETCHED_BYTES = 16 * MIB
"""Four chunks ahead from each of three donors when it was killed, and from the dying one."""
MAX_GROWTH_BYTES = 96 * MIB
"""Chunks on their way (p2p/chunk_lanes.py), and what libp2p buffers for them."""


@dataclass
class Scene:
    """A swarm whose members only give."""

    swarm: LocalSwarm
    lan: Bridge
    round_index: int
    state_hash: str

    @property
    def network(self) -> Network:
        return self.swarm.network

    def add_copy(self, lie: str = "") -> NodeAgent:
        """Add a member that has what the founder has, paused, with an identity of its own."""
        founder = self.swarm.agents[0]
        agent = self.swarm.add(self.lan)
        if lie:
            agent.program = ("tests.system.lying_agent", lie)
        run_id = self.swarm.spec.run_id
        source, target = founder.locations, agent.locations
        target.prepare()
        shutil.copytree(
            source.run_dir(run_id),
            target.run_dir(run_id),
            ignore=shutil.ignore_patterns(source.trainer_dir(run_id, DENSE_MODULE).name),
            copy_function=_link,
        )
        shutil.copy(source.data_dir / "pause.json", target.data_dir)
        return agent


def _link(source: str, target: str) -> None:
    """Share what is never written again, blobs, and copy the rest."""
    name = Path(source).name
    if len(name) == 64 or name.endswith(".hashes"):
        Path(target).hardlink_to(source)
    else:
        shutil.copy(source, target)


def spec_of(swarm: LocalSwarm) -> RunSpec:
    """Return the swarm's run with few journal rounds and small steps."""
    spec = swarm.spec
    return msgspec.structs.replace(
        spec,
        inner=msgspec.structs.replace(spec.inner, batch_sequences=1),
        rounds=msgspec.structs.replace(spec.rounds, journal_rounds=JOURNAL_ROUNDS),
        evaluation=msgspec.structs.replace(spec.evaluation, num_sequences=1),
    )


def begin(swarm: LocalSwarm, deadline_s: float) -> Scene:
    """Have a founder make the rounds, and leave it ended with its pause kept."""
    swarm.spec = spec_of(swarm)
    (swarm.folder / "run.toml").write_text(format_run_spec(swarm.spec), "utf-8")
    lan = swarm.network.add_bridge()
    founder = swarm.add(lan)
    founder.start()
    founder.wait_for("the rounds are made", lambda s: s.round_index >= NUM_ROUNDS, deadline_s)
    assert founder.allmende("pause").returncode == 0
    status = founder.status()
    founder.end()
    return Scene(swarm, lan, status.round_index, status.state_hash)


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Scene]:
    with local_swarm(tmp_path, 5.0, MODEL) as swarm:
        yield begin(swarm, 900.0)


def rx_bytes(network: Network, agent: NodeAgent) -> int:
    """Return all bytes that the machine's interface has ever received."""
    file = "/sys/class/net/eth0/statistics/rx_bytes"
    return int(_run("ip", "netns", "exec", agent.node.namespace, "cat", file))


class Watcher:
    """Follows a newcomer's fetch, and keeps its memory and what it says."""

    def __init__(self, agent: NodeAgent) -> None:
        self.agent = agent
        self.peak_bytes = 0
        self.reasons: list[str] = []
        self.fractions: list[float] = []
        self.steps_while_catching_up = 0

    def look(self) -> Status | None:
        status = self.agent.status_or_none()
        if status is not None:
            self.peak_bytes = max(self.peak_bytes, self.rss())
            if status.catch_up is not None and status.state == "catching_up":
                self.reasons.append(status.reason)
                self.fractions.append(fraction(status.catch_up))
                self.steps_while_catching_up = max(self.steps_while_catching_up, status.inner_step)
        return status

    def rss(self) -> int:
        return int(psutil.Process(self.agent.pids[-1]).memory_info().rss)

    def wait_fraction(self, least: float, deadline_s: float) -> CatchUp:
        """Wait until so much of the state is here."""

        def is_there() -> CatchUp | None:
            status = self.look()
            catch_up = status.catch_up if status else None
            return catch_up if catch_up and fraction(catch_up) >= least else None

        return wait_until(f"{least:.0%} of the state", is_there, deadline_s)

    def wait_round(self, round_index: int, deadline_s: float) -> Status:
        """Wait until it stands at this height."""

        def is_there() -> Status | None:
            status = self.look()
            return status if status and status.round_index >= round_index else None

        return wait_until(f"it stands at {round_index}", is_there, deadline_s)


def fraction(catch_up: CatchUp) -> float:
    return catch_up.held_bytes / catch_up.total_bytes


def lies_named(agent: NodeAgent, liar_id: str) -> int:
    """Count the lines of the log that name the liar."""
    return sum(liar_id in line and "misdeed=" in line for line in agent.logged().splitlines())


@pytest.mark.timeout(2400)
def test_a_large_state_comes_whatever_happens_to_donors_and_newcomer(large: Scene) -> None:
    founder = large.swarm.agents[0]
    liar, dying = large.add_copy("flip"), large.add_copy()
    donors = (founder, liar, dying)
    large.swarm.start(*donors)
    for donor in donors:
        large.network.shape(donor.node, RATE)
    states = {point.round_index: point.state_hash for point in founder.history()}
    given = BlobStore(founder.locations.blobs_dir(large.swarm.spec.run_id, DENSE_MODULE))
    size_bytes = given.size_bytes(large.state_hash)

    newcomer = large.swarm.add(large.lan)
    newcomer.start()
    watcher = Watcher(newcomer)
    rest_bytes = watcher.rss()
    watcher.wait_fraction(KILL_NEWCOMER_AT, 300)
    assert lies_named(newcomer, liar.status().peer_id) == 1
    newcomer.kill()
    rx_first = rx_bytes(large.network, newcomer)
    store = BlobStore(newcomer.locations.blobs_dir(large.swarm.spec.run_id, DENSE_MODULE))
    (kept_bytes,) = store.partial_bytes().values()
    assert kept_bytes >= (KILL_NEWCOMER_AT - 0.02) * size_bytes

    begun_s = time.monotonic()
    newcomer.start()
    resumed = watcher.wait_fraction(KILL_NEWCOMER_AT, 60)
    resumed_s = time.monotonic() - begun_s
    watcher.wait_fraction(KILL_DONOR_AT, 300)
    dying.process().send_signal(signal.SIGKILL)
    wait_until("the donor is dead", lambda: dying.processes[-1].poll() is not None, 10)
    fetched_hash = states[resumed.round_index]
    wait_until("it is all here", lambda: watcher.look() and store.has(fetched_hash), 300)
    fetched_s = time.monotonic() - begun_s
    status = watcher.wait_round(large.round_index, 300)
    stood_s = time.monotonic() - begun_s
    assert status.state_hash == large.state_hash
    assert store.verify(fetched_hash)
    assert store.verify(large.state_hash)
    assert not store.partial_bytes()

    rx_all = rx_bytes(large.network, newcomer)
    received = status.bytes_by_purpose["states"]["received"]  # since its last start
    refetched = received - (size_bytes - kept_bytes)
    report(
        f"state of {size_bytes / 1e6:.0f} MB: killed with {kept_bytes / 1e6:.0f} MB here, going on "
        f"{resumed_s:.1f} s after its next start ({fraction(resumed):.0%}), all here after "
        f"{fetched_s:.1f} s, stood on after {stood_s:.1f} s; second life received "
        f"{received / 1e6:.1f} MB, {refetched / MIB:.1f} chunks twice or wrong; interface "
        f"{rx_first / 1e6:.0f} + {(rx_all - rx_first) / 1e6:.0f} MB; agent "
        f"{rest_bytes / 1e6:.0f} MB at rest, {watcher.peak_bytes / 1e6:.0f} MB at most"
    )
    report(f"the owner saw: {watcher.reasons[len(watcher.reasons) // 2]}")
    assert refetched <= MAX_REFETCHED_BYTES
    assert lies_named(newcomer, liar.status().peer_id) == 2, "once in each life"
    assert watcher.peak_bytes - rest_bytes <= MAX_GROWTH_BYTES
    assert any("%" in reason and "MB/s from" in reason for reason in watcher.reasons)
    known = [one for one in watcher.fractions if one]
    assert known == sorted(known), "it never goes back, not even by being killed"
    assert watcher.steps_while_catching_up == 0, "none on weights of long ago"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["long", "short"])
def test_who_lies_about_lengths_is_asked_once(tmp_path: Path, kind: str) -> None:
    """The honest donor has no time to give everything before the liar is found out."""
    with local_swarm(tmp_path, 2.0, SMALL_MODEL) as swarm:
        scene = begin(swarm, 120.0)
        founder, liar = swarm.agents[0], scene.add_copy(kind)
        swarm.start(founder, liar)
        liar_id = liar.status().peer_id
        scene.network.shape(founder.node, SLOW_RATE)
        newcomer = scene.swarm.add(scene.lan)
        newcomer.start()
        begun_s = time.monotonic()
        wait_until("the liar is named", lambda: lies_named(newcomer, liar_id), 40)
        named_s = time.monotonic() - begun_s
        assert newcomer.status().round_index < scene.round_index
        scene.network.unshape(founder.node)
        newcomer.wait_for(
            "it stands where the founder stands",
            lambda s: s.round_index >= scene.round_index,
            60,
        )
        report(f"liar named after {named_s:.1f} s")
        assert newcomer.status().state_hash == scene.state_hash
        assert lies_named(newcomer, liar_id) == 1
