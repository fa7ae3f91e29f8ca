"""The real agent, whose trainer takes no inner steps, and which notes when things happen.

Arguments as `python -m volunteer.agent`. Nothing of the agent is replaced but the program that it
starts as its trainer; around some of its functions a line is written to `$BENCH_DIR/marks`. With
$BENCH_PROFILE set, a profile of the agent goes to `$BENCH_DIR/agent.prof`.
"""

from __future__ import annotations

import cProfile
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from marks import BENCH_DIR, mark

from p2p.swarm import Swarm
from volunteer.agent import __main__ as agent
from volunteer.agent.aggregator_service import AggregatorService
from volunteer.agent.bookkeeper import Bookkeeper
from volunteer.agent.child import Child
from volunteer.messages import AggregatorCommand, AggregatorEvent

TRAINER = ["-m", "volunteer.training.trainer"]
IDLE_TRAINER = str(Path(__file__).with_name("idle_trainer.py"))


def start_idle_trainer() -> None:
    """Have the agent start our trainer in the place of the real one."""
    start = Child.start

    async def start_ours(argv: Sequence[str], *rest: object) -> object:
        at = list(argv).index(TRAINER[1]) if TRAINER[1] in argv else None
        if at is None:
            return await start(argv, *rest)
        assert list(argv[at - 1 : at + 1]) == TRAINER
        # Without -P: the file's own folder has its helpers.
        ours = [*argv[: at - 1], IDLE_TRAINER, *argv[at + 1 :]]
        return await start([one for one in ours if one != "-P"], *rest)

    Child.start = start_ours


def note_what_happens() -> None:
    """Mark fetches, what the aggregator does, and moves."""
    fetch_blob, ask, note_round = Swarm.fetch_blob, AggregatorService.ask, Bookkeeper.note_round

    async def marked_fetch(self: Swarm, blob_id: str, **options: object) -> None:
        mark("fetch", blob_id=blob_id)
        await fetch_blob(self, blob_id, **options)
        mark("fetched", blob_id=blob_id)

    async def marked_ask(
        self: AggregatorService, make: Callable[[int], AggregatorCommand]
    ) -> AggregatorEvent:
        kind = type(make(0)).__name__
        mark(f"ask {kind}")
        reply = await ask(self, make)
        mark(f"answered {kind}")
        return reply

    def marked_round(self: Bookkeeper, commit_id: str, state_hash: str) -> None:
        mark("moved", state_hash=state_hash)
        note_round(self, commit_id, state_hash)

    Swarm.fetch_blob = marked_fetch
    AggregatorService.ask = marked_ask
    Bookkeeper.note_round = marked_round


def main() -> None:
    """Run the agent."""
    start_idle_trainer()
    note_what_happens()
    if not os.environ.get("BENCH_PROFILE"):
        agent.main()
    profile = cProfile.Profile()
    try:
        profile.runcall(agent.main)
    except SystemExit as end:
        profile.dump_stats(BENCH_DIR / "agent.prof")
        sys.exit(end.code)


if __name__ == "__main__":
    main()
