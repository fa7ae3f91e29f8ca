"""A swarm of real agents in a network of our own, with a model so small that six fit on two cores.

    with local_swarm(tmp_path) as swarm:
        lan = swarm.network.add_bridge()
        agents = [swarm.add(lan) for _ in range(4)]
        swarm.start(*agents)

The control sockets are files, so every agent is asked from outside its namespace.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import msgspec
import psutil

from tests.system.agents import RealAgent, is_alive, wait_until
from tests.system.network import Bridge, Network, Node, require_namespaces
from volunteer.answers import PeerStatus, Status
from volunteer.data.builtin import load_builtin_run
from volunteer.errors import NoAgentError
from volunteer.locations import HOME_VARIABLE
from volunteer.run import ModelSpec, RunSpec, format_run_spec
from volunteer.training.genesis import genesis_hash

ROUND_S = 6.0
UP_DEADLINE_S = 60.0
END_DEADLINE_S = 15.0
SLACK_S = 5.0
"""A dozen processes on two shared cores: to compute, sign, send and apply a commit."""
FLAGS = ("--ignore-idle", "--device", "cpu", "--threads", "1")


TINY_MODEL = ModelSpec(num_layers=1, dim=48, num_heads=2, ffn_dim=96, context_tokens=32)
"""35,000 parameters: a state of 0.3 MB, one chunk."""
CHUNKED_MODEL = ModelSpec(num_layers=2, dim=192, num_heads=2, ffn_dim=512, context_tokens=32)
"""934,000 parameters: a state of 7.5 MB, so that several donors have something to give."""


def tiny_spec(
    round_s: float = ROUND_S, model: ModelSpec = TINY_MODEL, min_grace_s: float | None = None
) -> RunSpec:
    """Return an open run of a small model, made from the built-in `demo`."""
    demo = load_builtin_run("demo")
    rounds = msgspec.structs.replace(demo.rounds, round_s=round_s)
    if min_grace_s is not None:
        rounds = msgspec.structs.replace(rounds, min_grace_s=min_grace_s)
    spec = msgspec.structs.replace(
        demo,
        name="tiny",
        publisher="",
        signature="",
        model=model,
        data=msgspec.structs.replace(demo.data, sources=("builtin:folio",)),
        inner=msgspec.structs.replace(demo.inner, batch_sequences=4, decay_rounds=10_000),
        rounds=rounds,
        evaluation=msgspec.structs.replace(demo.evaluation, num_sequences=16),
    )
    genesis = msgspec.structs.replace(spec.genesis, state_hash=genesis_hash(spec))
    return msgspec.structs.replace(spec, genesis=genesis)


@dataclass
class NodeAgent(RealAgent):
    """One volunteer on a machine of the network."""

    node: Node = field(kw_only=True)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list, kw_only=True)
    program: Sequence[str] = field(default=("volunteer.agent",), kw_only=True)
    """The module to run, and what comes before the flags: a test's own may misbehave."""

    def spawn(self, *flags: str) -> None:
        """Start the agent, without waiting until it answers."""
        locations = self.locations
        locations.prepare()
        command = [sys.executable, "-P", "-m", *self.program, *self.flags, *flags]
        with (locations.log_dir / "agent.log").open("ab") as log_file:
            process = subprocess.Popen(
                self.node.argv(*command),
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env={**os.environ, HOME_VARIABLE: str(self.home)},
                start_new_session=True,
            )
        self.processes.append(process)
        self.pids.append(process.pid)

    def wait_up(self) -> Status:
        """Wait until it answers and listens."""

        def look() -> Status | None:
            status = self.status_or_none()
            if status is None:
                assert self.processes[-1].poll() is None, f"{self.home.name} ended: {self.tail()}"
            return status if status and status.listen_addrs else None

        return wait_until(f"{self.home.name} is up", look, UP_DEADLINE_S)

    def start(self) -> Status:
        self.spawn()
        return self.wait_up()

    def status_or_none(self) -> Status | None:
        """Return its status, or None while nobody answers."""
        try:
            return self.status()
        except NoAgentError:
            return None

    def peers(self) -> list[PeerStatus]:
        return self.ask("peers", list[PeerStatus])

    def process(self) -> psutil.Process:
        return psutil.Process(self.pids[-1])

    def family(self) -> list[psutil.Process]:
        """Return the agent and its children."""
        return [self.process(), *self.process().children(recursive=True)]

    def is_up(self) -> bool:
        return bool(self.pids) and is_alive(self.pids[-1])

    def raw_control(self) -> socket.socket:
        """Return a connection to its control socket; BlockingIOError while its queue is full."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(10)
            connection.connect(str(self.locations.control_socket))
        except OSError:
            connection.close()
            raise
        return connection

    def tail(self) -> str:
        return "\n".join(self.logged().splitlines()[-15:])

    def ask_to_end(self) -> None:
        if self.is_up():
            self.process().send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Stop it in order, by force if need be."""
        self.ask_to_end()
        for process in self.processes:
            try:
                process.wait(END_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass
class LocalSwarm:
    """The agents of one test."""

    network: Network
    folder: Path
    spec: RunSpec
    agents: list[NodeAgent] = field(default_factory=list)

    def add(self, bridge: Bridge, *flags: str) -> NodeAgent:
        """Make a volunteer on a machine of its own; it is not started yet."""
        flags = (*FLAGS, "--run-file", str(self.folder / "run.toml"), *flags)
        home = self.folder / f"v{len(self.agents)}"
        self.agents.append(NodeAgent(home, flags, node=self.network.add_node(bridge)))
        return self.agents[-1]

    def start(self, *agents: NodeAgent) -> None:
        """Start several at once."""
        for agent in agents:
            agent.spawn()
        for agent in agents:
            agent.wait_up()

    def strays(self) -> set[int]:
        """Return the ids of processes on the machines that belong to no living agent."""
        own = {p.pid for agent in self.agents if agent.is_up() for p in agent.family()}
        return {pid for agent in self.agents for pid in self.network.pids(agent.node)} - own


@contextlib.contextmanager
def local_swarm(
    folder: Path,
    round_s: float = ROUND_S,
    model: ModelSpec = TINY_MODEL,
    *,
    min_grace_s: float | None = None,
    spec: RunSpec | None = None,
) -> Iterator[LocalSwarm]:
    """Make an empty swarm; end everything afterwards, and show the logs' ends if it failed.

    Args:
        folder: where its members live.
        round_s: of the run that is made for it.
        model: of that run.
        min_grace_s: of that run.
        spec: another run to take instead.
    """
    require_namespaces()
    spec = spec or tiny_spec(round_s, model, min_grace_s)
    (folder / "run.toml").write_text(format_run_spec(spec), "utf-8")
    with Network() as network:
        swarm = LocalSwarm(network, folder, spec)
        try:
            yield swarm
        except BaseException:
            for agent in swarm.agents:
                with contextlib.suppress(OSError):
                    sys.stderr.write(f"--- {agent.home.name}\n{agent.tail()}\n")
            raise
        finally:
            for agent in swarm.agents:
                agent.ask_to_end()
            for agent in swarm.agents:
                agent.end()


def report(text: str) -> None:
    """Put a measurement into the test's output (`pytest -rP` shows it when the test passes)."""
    sys.stdout.write(f"measured: {text}\n")


def one_tip(agents: Sequence[RealAgent]) -> str | None:
    """Return the tip that all stand on, if it is one."""
    tips = {agent.status().tip for agent in agents}
    return tips.pop() if len(tips) == 1 else None


def wait_one_tip(agents: Sequence[RealAgent], deadline_s: float) -> float:
    """Wait until all stand on one tip; return the seconds it took."""
    begun_s = time.monotonic()
    wait_until("one head", lambda: one_tip(agents), deadline_s)
    return time.monotonic() - begun_s


def wait_contributing(agents: Sequence[RealAgent], deadline_s: float) -> None:
    for agent in agents:
        agent.wait_for("it contributes", lambda s: s.state == "contributing", deadline_s)


def joint_rounds(agents: Sequence[RealAgent]) -> list[int]:
    """Return the rounds whose one commit lists a contribution of each of `agents`."""
    listed = [
        {(point.round_index, point.commit_id) for point in agent.history() if point.own_listed}
        for agent in agents
    ]
    return sorted(round_index for round_index, _ in set.intersection(*listed))


def longest_gap_s(agent: RealAgent, since_utc: str) -> float:
    """Return the longest time between two commits applied by `agent` since then, and until now."""
    points = agent.history()
    before = [p.applied_utc for p in points if p.applied_utc <= since_utc]
    after = [p.applied_utc for p in points if p.applied_utc > since_utc]
    instants = sorted([max(before, default=since_utc), *after, utc_now()])
    seconds = [datetime.fromisoformat(instant).timestamp() for instant in instants]
    return max(later - earlier for earlier, later in itertools.pairwise(seconds))


def utc_now() -> str:
    """Return the time as `RoundPoint.applied_utc` has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def unbalanced(agent: RealAgent) -> str:
    """Return what is wrong with an agent's books; empty if every token is in one place."""
    stats = agent.stats()
    parts = (
        stats.tokens_confirmed
        + stats.tokens_in_flight
        + stats.tokens_pending
        + stats.tokens_refused
        + stats.tokens_dropped
    )
    return "" if parts == stats.tokens_done else f"{agent.home.name}: parts={parts} {stats}"
