"""`allmende demo`: a whole swarm of real agents on this machine.

Runs in: a process of its own, which starts agents as anyone would: separate folders, libp2p over
loopback, two of them knowing only the first one's address. Progress goes to stderr, the result to
stdout. Afterwards everything is checked from the published records and blobs alone (verify.py).
Told to end (Ctrl+C, SIGTERM, SIGHUP), it ends the agents first, and exits with 130.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import trio

from p2p.blobstore import BlobStore
from p2p.errors import P2PError
from p2p.identity import load_or_create_identity
from volunteer.agent.demo_checks import Hindrance, last_words, verify_can_train
from volunteer.agent.demo_client import ask
from volunteer.agent.demo_run import DEFAULT_RUN, choose_demo_run, publish
from volunteer.agent.run_data import take_imports
from volunteer.agent.verify import DemoCheck, verify_demo
from volunteer.answers import RoundPoint, Status
from volunteer.data.sources import sources_on_disk
from volunteer.errors import NoAgentError, VolunteerError
from volunteer.interrupts import holding_signals
from volunteer.locations import HOME_VARIABLE, Locations
from volunteer.logs import open_log
from volunteer.run import RunSpec, format_run_spec

UP_DEADLINE_S = 60.0
SETTLE_DEADLINE_S = 30.0
END_DEADLINE_S = 30.0
POLL_S = 0.5
MIN_COMMITS = 3
MAX_VOLUNTEERS = 16
MIN_MINUTES = 1.0
"""In less, too few rounds end to judge anything by."""
MAX_MINUTES = 24 * 60.0
INTERRUPTED_EXIT_CODE = 130
"""As shells give it to what Ctrl+C ended."""
SPEC_NAME = "demo.toml"
TOKENIZER_NAME = "tokenizer.json"


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """`allmende demo --json`."""

    rounds_committed: int
    held_out_loss: list[float | None]
    """Nats per byte after each round, the first round first."""
    volunteers: list[Status]
    state_hashes: list[str]
    """One if all volunteers stand on the same state."""
    check: DemoCheck
    """What a replay of the published records and blobs found."""
    problems: list[str]
    """Empty if all is well."""
    directory: str


class Demo:
    """One swarm and its folder."""

    def __init__(
        self, folder: Path, num_volunteers: int, minutes: float, spec: RunSpec, beside: Path | None
    ) -> None:
        """Nothing is started yet; `beside` holds what the RunSpec names by its hash."""
        self._folder = folder
        self._spec = spec
        self._beside = beside
        self._num_volunteers = num_volunteers
        self._minutes = minutes
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self) -> DemoResult:
        """Train for the time given and return what came of it; the agents have ended then.

        Raises:
            VolunteerError: an agent did not come up.
        """
        homes = [self._folder / f"volunteer-{i}" for i in range(self._num_volunteers)]
        try:
            spec = self._publish(homes[0])
            self._start_all(homes)
            statuses = trio.run(functools.partial(self._train, homes))
            points = trio.run(self._history, homes[0])
        finally:
            with holding_signals(signal.SIGINT):
                self._end_all()
        say("They have ended. Now every round is computed again from what they published ...")
        check = verify_demo(self._folder)
        return _judge(spec, statuses, points, check, self._folder)

    def _publish(self, home: Path) -> RunSpec:
        """Have the first volunteer publish the run: it is the genesis roster."""
        locations = _locations(home)
        locations.prepare()
        spec = publish(self._spec, load_or_create_identity(locations.identity_file))
        (self._folder / SPEC_NAME).write_text(format_run_spec(spec), "utf-8")
        tokenizer = self._beside / TOKENIZER_NAME if self._beside is not None else None
        if tokenizer is not None and tokenizer.is_file():
            shutil.copy(tokenizer, self._folder / TOKENIZER_NAME)
        imports_dir = Locations.from_environment(os.environ).imports_dir
        if imports_dir.is_dir():  # the others fetch the weights from the first one
            take_imports(spec, BlobStore(imports_dir), BlobStore(locations.imports_dir))
        return spec

    def _start_all(self, homes: Sequence[Path]) -> None:
        first = trio.run(_wait_up, homes[0], self._start(homes[0], []))
        say(f"volunteer 1 of {len(homes)} is up, alone")
        flags = ["--bootstrap", first.listen_addrs[0]]
        started = [(home, self._start(home, flags)) for home in homes[1:]]
        for number, (home, process) in enumerate(started, start=2):
            trio.run(_wait_up, home, process)
            say(f"volunteer {number} of {len(homes)} is up")

    def _start(self, home: Path, flags: Sequence[str]) -> subprocess.Popen[bytes]:
        locations = _locations(home)
        locations.prepare()
        if sources_on_disk(self._spec.data.sources):  # whoever runs the demo has named them
            locations.config_file.write_text("allow_file_sources = true\n", "utf-8")
        argv = [sys.executable, "-P", "-m", "volunteer.agent", "--ignore-idle", "--device", "cpu"]
        argv += ["--threads", "1", "--listen", "/ip4/127.0.0.1/tcp/0", "--no-mdns"]
        argv += ["--run-file", str(self._folder / SPEC_NAME), *flags]
        log_file = os.fdopen(open_log(locations.log_dir / "agent.log"), "ab")
        with log_file, holding_signals(signal.SIGINT):
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                cwd="/",
                env={**os.environ, HOME_VARIABLE: str(home)},
                start_new_session=True,
            )
            self._processes.append(process)
        return process

    async def _train(self, homes: Sequence[Path]) -> list[Status]:
        """Watch for the time given, then until all stand on one state.

        Raises:
            VolunteerError: nobody can train.
        """
        say(f"training for {self._minutes:g} min; the volunteers' logs are in {self._folder}")
        end_s = time.monotonic() + 60.0 * self._minutes
        said, hindrance = 0, Hindrance()
        while time.monotonic() < end_s:
            await trio.sleep(POLL_S)  # noqa: TID251 - a period
            status = await _status(homes[0])
            if status.state != "contributing" or hindrance.is_told:
                every = [status, *[await _status(home) for home in homes[1:]]]
                if trouble := hindrance.look(every, time.monotonic()):
                    say(trouble)
            for point in await self._history(homes[0]):
                if point.round_index > said and point.held_out_loss is not None:
                    said = point.round_index
                    say(
                        f"round {said}: held-out loss {point.held_out_loss:.3f} nats/byte from "
                        f"{point.num_contributions} contributions, "
                        f"{status.swarm_tokens_per_s:,.0f} tokens/s"
                    )
        deadline_s = time.monotonic() + SETTLE_DEADLINE_S
        while True:
            statuses = [await _status(home) for home in homes]
            is_one = len({s.state_hash for s in statuses}) == 1
            if is_one or time.monotonic() > deadline_s:
                return statuses
            await trio.sleep(POLL_S / 5)  # noqa: TID251 - a period

    async def _history(self, home: Path) -> list[RoundPoint]:
        points = await ask(_locations(home), "history", list[RoundPoint], {"limit": 1000})
        committed = [point for point in points if point.round_index > 0]
        return sorted(committed, key=lambda point: point.round_index)

    def _end_all(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(END_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _judge(
    spec: RunSpec,
    statuses: list[Status],
    points: list[RoundPoint],
    check: DemoCheck,
    folder: Path,
) -> DemoResult:
    rounds_committed = max(status.round_index for status in statuses)
    state_hashes = sorted({status.state_hash for status in statuses})
    problems = list(check.problems)
    if rounds_committed < MIN_COMMITS:
        count = _count(rounds_committed, "round")
        problems.append(f"only {count} finished, and at least {MIN_COMMITS} were expected")
    if len(state_hashes) != 1:
        problems.append(f"the volunteers ended on {len(state_hashes)} different states")
    if check.run_id != spec.run_id:
        problems.append("the records are of another run")
    return DemoResult(
        rounds_committed=rounds_committed,
        held_out_loss=[point.held_out_loss for point in points],
        volunteers=statuses,
        state_hashes=state_hashes,
        check=check,
        problems=problems,
        directory=str(folder),
    )


def say(text: str) -> None:
    """Tell a person how it goes."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _locations(home: Path) -> Locations:
    return Locations.from_environment({HOME_VARIABLE: str(home)})


async def _status(home: Path) -> Status:
    return await ask(_locations(home), "status", Status, {})


async def _wait_up(home: Path, process: subprocess.Popen[bytes]) -> Status:
    """Wait until an agent answers and says where it listens."""
    deadline_s = time.monotonic() + UP_DEADLINE_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            status = await _status(home)
        except NoAgentError:
            pass
        else:
            if status.listen_addrs:
                return status
        await trio.sleep(POLL_S / 5)  # noqa: TID251 - a period
    log_file = _locations(home).log_dir / "agent.log"
    words = last_words(log_file) or f"see {log_file}"
    raise VolunteerError(f"an agent did not come up: {words}")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run or verify a demo; exit 0 if all is well, 1 if not, 130 if interrupted."""
    try:
        _main(argv)
    except* KeyboardInterrupt:
        say("stopped; nothing is left running")
    sys.exit(INTERRUPTED_EXIT_CODE)


def _main(argv: Sequence[str] | None) -> NoReturn:
    parser = argparse.ArgumentParser(prog="python -m volunteer.agent.demo", description=__doc__)
    parser.add_argument("--volunteers", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--run", default=DEFAULT_RUN, help="demo, commons or a RunSpec file")
    parser.add_argument("--round-s", type=float)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--verify", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    try:
        if options.verify is not None:
            check = verify_demo(options.verify)
            _tell(check, check.problems, check.sentences(), as_json=options.json)
        if options.dir is None:
            parser.error("--dir or --verify is needed")
        if not 1 <= options.volunteers <= MAX_VOLUNTEERS:
            parser.error(f"--volunteers: from 1 to {MAX_VOLUNTEERS}")
        if not MIN_MINUTES <= options.minutes <= MAX_MINUTES:
            parser.error(f"--minutes: from {MIN_MINUTES:g} to {MAX_MINUTES:g}")
        _make_folder(options.dir)
        spec = choose_demo_run(options.run, minutes=options.minutes, round_s=options.round_s)
        run_file = Path(options.run)
        beside = run_file.absolute().parent if run_file.is_file() else None
        folder = options.dir.absolute()
        verify_can_train(spec, beside, folder)
        result = Demo(folder, options.volunteers, options.minutes, spec, beside).run()
        _tell(result, result.problems, _sentences(result), as_json=options.json)
    except (VolunteerError, P2PError) as error:
        hint = getattr(error, "hint", "")
        say(f"allmende: {error}" + (f"\n  hint: {hint}" if hint else ""))
        sys.exit(getattr(error, "exit_code", 1))


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VolunteerError(f"{folder} cannot be made: {error.strerror}") from error


def _sentences(result: DemoResult) -> list[str]:
    losses = [loss for loss in result.held_out_loss if loss is not None]
    who = _count(len(result.volunteers), "volunteer")
    lines = [f"{who} finished {_count(result.rounds_committed, 'round')} of training together."]
    if losses:
        lines.append(
            f"How badly the shared model guesses text that it has not seen: {losses[0]:.3f} nats"
            f" a byte after the first round, {losses[-1]:.3f} after the last (lower is better)."
        )
    return lines + result.check.sentences()


def _tell(
    result: Any,  # noqa: ANN401 - either struct, printed as it is
    problems: Sequence[str],
    sentences: Sequence[str],
    *,
    as_json: bool,
) -> NoReturn:
    if as_json:
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in sentences))
    for problem in problems:
        say(f"problem: {problem}")
    sys.exit(1 if problems else 0)


def _end_as_by_ctrl_c() -> None:
    """Have the other signals that ask for the end do what Ctrl+C does, the first time."""

    def interrupt(number: int, frame: object) -> None:
        for wanted in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(wanted, signal.SIG_IGN)
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    for wanted in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(wanted, interrupt)


if __name__ == "__main__":
    _end_as_by_ctrl_c()
    main()
