"""The ledger says what the round protocol's books say, whatever happens to the members."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from tests.fakes.members import PEOPLE
from tests.fakes.network import FakeNetwork
from tests.fakes.solo import ROUND_S, Disk, Solo
from tests.fakes.virtual_time import in_nursery, run_virtual
from volunteer.agent.bookkeeper import Bookkeeper
from volunteer.messages import StateEvaluated
from volunteer.rounds import events as ev
from volunteer.rounds.credit import WorkState, new_tokens
from volunteer.stats.ledger import Ledger

pytestmark = pytest.mark.usefixtures("virtual_now")


class Life:
    """Members that are cut off, paused, killed and refused at random."""

    def __init__(self, folder: Path, seed: int, nursery: trio.Nursery) -> None:
        self.chance = random.Random(seed)
        self.network = FakeNetwork()
        self.nursery = nursery
        self.disks = [Disk(folder / str(n), PEOPLE[n]) for n in range(3)]
        self.solos: list[Solo | None] = [None, None, None]
        self.scopes: list[trio.CancelScope] = [trio.CancelScope() for _ in self.disks]

    async def start(self, number: int) -> None:
        async def live() -> None:
            with trio.CancelScope() as self.scopes[number]:
                async with trio.open_nursery() as inner:
                    solo = Solo(self.disks[number], inner, self.network)
                    self.solos[number] = solo
                    # Everybody's aggregator judges alike.
                    solo.aggregator.is_against = lambda work: work[0] in "012"
                    await solo.start()
                    await solo.exchange.run(0.5, lambda: None)

        self.nursery.start_soon(live)
        await trio.sleep(0.1)  # noqa: TID251 - virtual time

    async def kill(self, number: int) -> None:
        solo = self.solos[number]
        if solo is not None:
            self.scopes[number].cancel()
            await trio.sleep(0.01)  # noqa: TID251 - virtual time
            solo.close()
            self.solos[number] = None
            del self.network.swarms[solo.swarm.peer_id]

    async def one_thing(self) -> None:
        number = self.chance.randrange(len(self.disks))
        solo = self.solos[number]
        match self.chance.choice(["cut", "heal", "kill", "pause", "resume", "crash"]):
            case "cut":
                self.network.is_cut = True
            case "heal":
                self.network.is_cut = False
            case "kill":
                await self.kill(number)
                await self.start(number)
            case "pause" if solo is not None:
                solo.trainer.crash()
                solo.driver.post(ev.ContributingChanged(False))
            case "resume" if solo is not None:
                await solo.trainer.start()
                solo.driver.post(ev.ContributingChanged(True))
            case "crash" if solo is not None:
                solo.trainer.crash()
                await solo.trainer.start()
        await trio.sleep(self.chance.uniform(0.1, 2 * ROUND_S))  # noqa: TID251 - virtual time

    async def verify(self) -> Counter[str]:
        """Compare every member's ledger with its machine; return tokens by place."""
        places: Counter[str] = Counter()
        for solo in self.solos:
            if solo is None:
                continue
            await solo.driver.wait_quiet()
            solo.keeper.note_move()
            await solo.keeper.flush()
            balance = solo.ledger.balance()
            new = new_tokens(solo.machine.own)
            states = solo.machine.work_states()
            by_state = dict.fromkeys(WorkState, 0)
            for work, state in states.items():
                by_state[state] += new[work]
            assert balance.is_exact, balance
            assert balance.done - balance.not_contributed == sum(new.values())
            assert balance.pending == by_state[WorkState.PENDING]
            assert balance.dropped == by_state[WorkState.DROPPED]
            settled = balance.confirmed + balance.refused + balance.in_flight
            assert settled == by_state[WorkState.LISTED] + by_state[WorkState.IN_FLIGHT]
            assert balance.confirmed == solo.keeper.tokens_confirmed
            final = {
                i
                for commit in solo.machine.known.chain_down(solo.machine.final_id)
                for i in solo.machine.known.facts[commit].listed
                if i in solo.machine.own
            }
            covered = final | {k for i in final for k in solo.machine.own[i].carries}
            assert balance.confirmed + balance.refused == sum(new[i] for i in covered)
            points = solo.keeper.with_listing(
                solo.ledger.contributions(solo.machine.rules.run_id, "dense", 1000)
            )
            assert {p.contribution_id: p.commit_id for p in points} == {
                i: solo.machine.work.listed_at(i) or "" for i in solo.machine.own
            }
            for place in ("pending", "dropped", "confirmed", "refused", "in_flight"):
                places[place] += getattr(balance, place)
                told = sum(p.new_tokens for p in points if p.outcome == place)
                assert told == getattr(balance, place)
            assert all(p.reason for p in points if p.state in ("refused", "dropped"))
        return places


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_ledger_follows_the_books_through_random_lives(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()

    for seed in range(12):

        async def main(nursery: trio.Nursery, clock: MockClock, seed: int = seed) -> None:
            life = Life(tmp_path / str(seed), seed, nursery)
            for number in range(len(life.disks)):
                await life.start(number)
            for _ in range(14):
                await life.one_thing()
                seen.update(await life.verify())
            for number in range(len(life.disks)):
                await life.kill(number)

        run_virtual(in_nursery(main), jumps=True)
    assert all(seen[place] for place in ("pending", "confirmed", "refused", "in_flight")), seen


def test_errors_of_the_ledger_are_logged_and_the_books_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        solo = Solo(Disk(tmp_path / "a"), nursery)
        ledger = Ledger(tmp_path / "gone.sqlite")
        keeper = Bookkeeper(ledger, solo.machine)
        nursery.start_soon(keeper.run)
        ledger.close()
        keeper.note_contributed(5.0)
        found = StateEvaluated(
            request_id=1, state_hash="", held_out_loss=1.0, loss_stderr=0.1, num_windows=4
        )
        keeper.note_loss("c", found)
        await keeper.flush()
        assert len([r for r in caplog.records if "stats not written" in r.message]) == 2
        solo.close()

    run_virtual(in_nursery(main), jumps=True)


def test_the_queue_is_written_in_order(tmp_path: Path) -> None:
    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        solo = Solo(Disk(tmp_path / "a"), nursery)
        written: list[int] = []
        nursery.start_soon(solo.keeper.run)
        for number in range(100):
            solo.keeper.queue(partial(written.append, number))
        await solo.keeper.flush()
        assert written == list(range(100))
        solo.close()

    run_virtual(in_nursery(main), jumps=True)
