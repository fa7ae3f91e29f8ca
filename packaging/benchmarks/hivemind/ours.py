"""Our side: real agents whose trainers pretend their inner steps (idle_agent.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import model
import msgspec
import psutil
from measure import with_children
from swarm import Case, Exchange, Swarm, wait_until

from p2p.blobstore import BlobStore
from tui.client import ControlClient
from volunteer.answers import RoundPoint, Status
from volunteer.errors import ControlError, NoAgentError
from volunteer.locations import HOME_VARIABLE, Locations
from volunteer.rounds.records import DENSE_MODULE
from volunteer.run import (
    CodecSpec,
    DataSpec,
    EvaluationSpec,
    GenesisSpec,
    InnerSpec,
    RoundSpec,
    RunSpec,
    format_run_spec,
)

AGENT_FILE = Path(__file__).with_name("idle_agent.py")
ROUND_S = {1: 60.0, 25: 240.0, 100: 600.0}
"""The grace is at least 5 % of it; the rounds are closed by their tokens, long before."""
TARGET_TOKENS = 1000
WARM_UP_ROUNDS = 1
"""It waits the grace, since nobody knows yet whom to expect."""
DEADLINE_S = 300.0
END_S = 20.0
PARTS = {
    "contributed": ("contributed", max),
    "fetched": ("fetched", max),
    "validated": ("answered ValidateBlob", max),
    "applied": ("answered ApplyCommit", max),
    "moved": ("moved", max),
}
"""Of an exchange: the mark that ends it, and whether its first or its last counts."""


def make_spec(case: Case, folder: Path) -> RunSpec:
    """Return the RunSpec of a case. Cost: computes the genesis state."""
    from volunteer.training.genesis import genesis_hash

    spec = RunSpec(
        name=f"bench-{case.parameters_m}m-{case.codec}",
        model=model.MODELS[case.parameters_m],
        genesis=GenesisSpec(seed=1, state_hash="0" * 64),
        data=DataSpec(sources=("builtin:shakespeare",)),
        inner=InnerSpec(lr=1e-3, decay_rounds=100, batch_sequences=1),
        codec=CodecSpec(id=case.codec),
        rounds=RoundSpec(round_s=ROUND_S[case.parameters_m], target_tokens=TARGET_TOKENS),
        evaluation=EvaluationSpec(num_sequences=1),
    )
    known = folder.parent / f"genesis-{case.parameters_m}"
    if not known.exists():  # the codec does not enter it
        known.write_text(genesis_hash(spec))
    genesis = GenesisSpec(seed=1, state_hash=known.read_text())
    return msgspec.structs.replace(spec, genesis=genesis)


@dataclass(slots=True)
class Volunteer:
    """One agent in a folder of its own."""

    home: Path
    spec_file: Path
    process: subprocess.Popen[bytes] | None = None
    marks: list[dict[str, object]] = field(default_factory=list)
    _read_bytes: int = 0

    @property
    def locations(self) -> Locations:
        """Where its files are."""
        return Locations.from_environment({HOME_VARIABLE: str(self.home)})

    @property
    def bench_dir(self) -> Path:
        """What it shares with this program."""
        return self.home / "bench"

    def start(self, bootstrap: str) -> None:
        """Start it; `bootstrap` is another's address, or empty."""
        self.locations.prepare()
        self.bench_dir.mkdir(exist_ok=True)
        if not (self.bench_dir / "close").exists():
            os.mkfifo(self.bench_dir / "close")
        argv = [sys.executable, str(AGENT_FILE), "--ignore-idle", "--no-mdns", "--no-dht"]
        argv += ["--device", "cpu", "--threads", "1", "--listen", "/ip4/127.0.0.1/tcp/0"]
        argv += ["--run-file", str(self.spec_file)]
        argv += ["--bootstrap", bootstrap] if bootstrap else []
        environment = {**os.environ, HOME_VARIABLE: str(self.home)}
        environment["BENCH_DIR"] = str(self.bench_dir)
        with (self.home / "stderr").open("ab") as log:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def status(self) -> Status | None:
        """Ask it how it is; None while it does not answer."""
        try:
            with ControlClient(self.locations.control_socket, deadline_s=20.0) as client:
                return client.request("status", Status)
        except (NoAgentError, ControlError):
            return None

    def history(self) -> list[RoundPoint]:
        """Ask it what the rounds were."""
        with ControlClient(self.locations.control_socket, deadline_s=60.0) as client:
            return client.request("history", list[RoundPoint])

    def close_round(self) -> None:
        """Have its trainer report the round's tokens."""
        descriptor = os.open(self.bench_dir / "close", os.O_RDWR | os.O_NONBLOCK)
        os.write(descriptor, b"1")
        os.close(descriptor)

    def look(self, what: str, since_s: float) -> Iterator[dict[str, object]]:
        """Yield what it has marked as `what` since then, the oldest first."""
        file = self.bench_dir / "marks"
        if file.exists():
            with file.open("rb") as stream:
                stream.seek(self._read_bytes)
                data = stream.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read_bytes += len(whole)
            self.marks += map(json.loads, whole.splitlines())
        yield from (m for m in self.marks if m["what"] == what and float(m["at"]) >= since_s)

    def rebased(self, round_index: int) -> dict[str, object] | None:
        """Return the mark of the trainer's standing on that round's commit."""
        found = [m for m in self.look("rebased", 0.0) if m["round_index"] == round_index]
        return found[0] if found else None


class OurSwarm(Swarm):
    """Agents of one run."""

    def __init__(self, case: Case, folder: Path) -> None:
        """Prepare; `start` starts."""
        self.name = f"allmende {case.codec}"
        self._case = case
        self._folder = folder
        self._round = 0
        self._volunteers: list[Volunteer] = []

    def start(self) -> None:
        """Start the agents, have them meet, and exchange until they know each other."""
        self._folder.mkdir(parents=True, exist_ok=True)
        spec_file = self._folder / "spec.toml"
        spec_file.write_text(format_run_spec(make_spec(self._case, self._folder)))
        self._volunteers = [
            Volunteer(self._folder / f"v{number}", spec_file) for number in range(self._case.peers)
        ]
        for volunteer in self._volunteers:
            volunteer.home.mkdir()
            self._start_one(volunteer)
        for _ in range(WARM_UP_ROUNDS):
            self.prepare()
            self.exchange()

    def _start_one(self, volunteer: Volunteer) -> None:
        first = self._volunteers[0]
        status = first.status() if volunteer is not first else None
        volunteer.start(status.listen_addrs[0] if status is not None else "")
        wait_until(
            f"{volunteer.home} is up",
            lambda: (s := volunteer.status()) is not None and bool(s.listen_addrs),
            DEADLINE_S,
        )

    def prepare(self) -> None:
        """Wait until all know each other and have trained on the round's commit."""
        others = self._case.peers - 1
        for volunteer in self._volunteers:
            wait_until(
                f"{volunteer.home} sees the others",
                lambda v=volunteer: (s := v.status()) is not None and s.num_peers >= others,
                DEADLINE_S,
            )
            wait_until(
                f"{volunteer.home} has trained in round {self._round}",
                lambda v=volunteer: any(
                    m["round_index"] == self._round for m in v.look("trained", 0.0)
                ),
                DEADLINE_S,
            )

    def exchange(self, *, kill_after_s: float | None = None) -> Exchange:
        """Close the round; it is over when every trainer stands on the new weights."""
        closed_at = time.monotonic()
        for volunteer in self._volunteers:
            volunteer.close_round()
        survivors = self._volunteers
        if kill_after_s is not None:
            time.sleep(kill_after_s)  # noqa: TID251 - a moment in the middle of the exchange
            for process in with_children([self._volunteers[-1].process.pid]):
                process.send_signal(signal.SIGKILL)
            self._volunteers[-1].process.wait()
            survivors = self._volunteers[:-1]
        self._round += 1
        marks = [
            wait_until(
                f"{v.home} stands on round {self._round}",
                lambda v=v: v.rebased(self._round),
                DEADLINE_S,
            )
            for v in survivors
        ]
        result = Exchange(
            seconds=max(float(m["at"]) for m in marks) - closed_at,
            parts_s=self._parts(survivors, closed_at),
            note=self._note(survivors[0], marks),
        )
        self._compare(survivors, marks, result)
        return result

    def _parts(self, volunteers: list[Volunteer], closed_at: float) -> dict[str, float]:
        parts = {}
        for part, (what, choose) in PARTS.items():
            found = [float(m["at"]) for v in volunteers for m in v.look(what, closed_at)]
            if found:
                parts[part] = choose(found) - closed_at
        return parts

    def _note(self, volunteer: Volunteer, marks: list[dict[str, object]]) -> str:
        points = {point.round_index: point for point in volunteer.history()}
        listed = points[self._round].num_contributions
        hashes = {str(mark["state_hash"])[:12] for mark in marks}
        return f"{listed} of {self._case.peers} listed, state {'/'.join(sorted(hashes))}"

    def _compare(
        self, volunteers: list[Volunteer], marks: list[dict[str, object]], result: Exchange
    ) -> None:
        if len({mark["state_hash"] for mark in marks}) == 1:
            return
        import torch

        from volunteer.training.state import read_state

        num = model.exact_parameters(self._case.parameters_m)
        apart_P = torch.zeros(num, dtype=torch.bool)
        states = [
            read_state(self._store(v).file_of(str(mark["state_hash"])), num).weights_P
            for v, mark in zip(volunteers, marks, strict=True)
        ]
        for state_P in states[1:]:
            apart_P |= states[0] != state_P
        result.differing_fraction = result.bit_differing_fraction = float(apart_P.float().mean())

    def _store(self, volunteer: Volunteer) -> BlobStore:
        (run_dir,) = volunteer.locations.runs_dir.iterdir()
        return BlobStore(volunteer.locations.blobs_dir(run_dir.name, DENSE_MODULE))

    def pids(self) -> list[int]:
        """Return the agents' processes."""
        return [v.process.pid for v in self._volunteers if v.process is not None]

    def stop(self) -> None:
        """End all processes, by force where they do not end by themselves."""
        family = with_children(self.pids())
        for volunteer in self._volunteers:
            if volunteer.process is not None and volunteer.process.poll() is None:
                volunteer.process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=END_S)
        for process in alive:
            process.kill()
        for volunteer in self._volunteers:
            if volunteer.process is not None:
                volunteer.process.wait()
