"""hivemind's side: peers of hivemind_peer.py, each with its processes of hivemind's."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from pathlib import Path

import model
import numpy as np
import psutil
from measure import with_children
from swarm import Case, Exchange, StuckError, Swarm

PEER_FILE = Path(__file__).with_name("hivemind_peer.py")
DEADLINE_S = 300.0
TOLERANCE = 1e-2
"""Of the average's root mean square: more is not rounding, but another result."""


class Peer:
    """One started process that answers on a pipe."""

    def __init__(self, argv: list[str], log_file: Path) -> None:
        """Start it."""
        with log_file.open("ab") as log:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
            )
        self._log_file = log_file
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def tell(self, **command: object) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, object]:
        """Wait for the answer to the oldest command."""
        try:
            line = self._answers.get(timeout=DEADLINE_S)
        except queue.Empty:
            line = ""
        if not line:
            raise StuckError(f"a hivemind peer does not answer: see {self._log_file}")
        return json.loads(line)

    def kill(self) -> None:
        """SIGKILL all its processes."""
        for process in with_children([self.process.pid]):
            process.send_signal(signal.SIGKILL)


class HivemindSwarm(Swarm):
    """Peers that average in one group."""

    def __init__(self, case: Case, python: Path, folder: Path, part_bytes: int) -> None:
        """Prepare; `start` starts.

        Args:
            case: how many peers, how large, which codec.
            python: of the environment that has hivemind.
            folder: for logs and what is compared.
            part_bytes: size of the parts that hivemind cuts tensors into.
        """
        self.name = f"hivemind {case.codec}"
        self._case = case
        self._python = python
        self._folder = folder
        self._part_bytes = part_bytes
        self._peers: list[Peer] = []
        self._round = 0

    def start(self) -> None:
        """Start the peers; the first one knows nobody, the others know it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        addresses: list[str] = []
        for number in range(self._case.peers):
            argv = [str(self._python), str(PEER_FILE), "--seed", str(1 + number)]
            argv += ["--peers", str(self._case.peers), "--codec", self._case.codec]
            argv += ["--shapes", json.dumps(model.shapes(self._case.parameters_m))]
            argv += ["--part-bytes", str(self._part_bytes)]
            for address in addresses:
                argv += ["--initial-peer", address]
            self._peers.append(Peer(argv, self._folder / f"peer{number}.log"))
            if not addresses:
                addresses = [str(a) for a in self._peers[0].answer()["addresses"]]
        for peer in self._peers[1:]:
            peer.answer()
        self.prepare()
        self.exchange()

    def prepare(self) -> None:
        """Train a little and find the group."""
        self._round += 1
        for peer in self._peers:
            peer.tell(do="prepare", round=self._round)
        self._preparation_s = max(float(p.answer()["preparation_s"]) for p in self._peers)

    def exchange(self, *, kill_after_s: float | None = None) -> Exchange:
        """Close, average, take the outer step; compare the averages afterwards."""
        closed_at = time.monotonic()
        for peer in self._peers:
            peer.tell(do="exchange")
        survivors = self._peers
        if kill_after_s is not None:
            time.sleep(kill_after_s)  # noqa: TID251 - a moment in the middle of the exchange
            self._peers[-1].kill()
            survivors = self._peers[:-1]
        answers = [peer.answer() for peer in survivors]
        errors = sorted({str(a["error"]) for a in answers if a["error"]})
        sizes = sorted({int(a["group_size"]) for a in answers})
        result = Exchange(
            seconds=max(float(a["applied_at"]) for a in answers) - closed_at,
            preparation_s=self._preparation_s,
            parts_s={
                part: max(float(a[f"{part}_at"]) for a in answers) - closed_at
                for part in ("loaded", "averaged")
            },
            note=f"reports {'failure: ' + '; '.join(errors) if errors else 'success'}"
            f", group of {'/'.join(map(str, sizes))}",
        )
        self._compare(survivors, result)
        return result

    def _compare(self, survivors: list[Peer], result: Exchange) -> None:
        files = [self._folder / f"average{number}.f32" for number in range(len(survivors))]
        for peer, file in zip(survivors, files, strict=True):
            peer.tell(do="dump", file=str(file))
            peer.answer()
        first_P = np.memmap(files[0], dtype=np.float32)
        scale = float(np.sqrt(np.mean(np.square(first_P, dtype=np.float64))))
        apart_P = np.zeros(len(first_P), dtype=bool)
        bits_apart_P = np.zeros(len(first_P), dtype=bool)
        for file in files[1:]:
            other_P = np.memmap(file, dtype=np.float32)
            apart_P |= ~(np.abs(first_P - other_P) <= TOLERANCE * scale)
            bits_apart_P |= first_P.view(np.int32) != other_P.view(np.int32)
        result.differing_fraction = float(apart_P.mean())
        result.bit_differing_fraction = float(bits_apart_P.mean())
        for file in files:
            file.unlink()

    def pids(self) -> list[int]:
        """Return the peers' processes."""
        return [peer.process.pid for peer in self._peers]

    def stop(self) -> None:
        """End all processes, by force where they do not end by themselves."""
        families = [with_children([peer.process.pid]) for peer in self._peers]
        for peer in self._peers:
            if peer.process.poll() is None:
                peer.tell(do="end")
        for peer, family in zip(self._peers, families, strict=True):
            _, alive = psutil.wait_procs(family, timeout=10)
            for process in alive:
                process.kill()
            peer.process.wait()
