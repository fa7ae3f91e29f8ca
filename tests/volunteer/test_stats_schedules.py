"""The books close on random schedules, against a model that follows each single token."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.fakes.books import MODULE, RUN, balance, contribute
from volunteer.stats.ledger import Ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """Return an empty ledger that does not wait for the disk (test_database.py does)."""
    ledger = Ledger(tmp_path / "stats.sqlite")
    ledger._database._connection.execute("PRAGMA synchronous=OFF")
    yield ledger
    ledger.close()


@dataclass
class Model:
    """The fate of each single token, in the plainest way."""

    trained: list[int] = field(default_factory=list)
    """Tokens of the trainer's timeline, by identity: its counter is their number."""
    snapshots: list[int] = field(default_factory=lambda: [0])
    """Lengths of `trained` at the snapshots that still exist."""
    all_tokens: int = 0
    contained: dict[str, set[int]] = field(default_factory=dict)
    """The new tokens of each contribution."""
    carries: dict[str, set[str]] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    counter: int = 0

    def free(self) -> set[int]:
        """Return the done tokens that are in no contribution and not dropped."""
        used = set().union(self.dropped, *self.contained.values())
        return set(range(self.all_tokens)) - used

    def place(self, token: int) -> str:
        if token in self.dropped:
            return "dropped"
        for contribution_id, tokens in self.contained.items():
            if token in tokens:
                carriers = [i for i, carried in self.carries.items() if contribution_id in carried]
                states = {self.state[i] for i in [contribution_id, *carriers]}
                strong = [s for s in ("confirmed", "refused", "in_flight") if s in states]
                return strong[0] if strong else self.state[contribution_id]
        return "not_contributed"


def step(model: Model, ledger: Ledger, chance: random.Random) -> None:
    """Let one thing happen to both."""
    match chance.choice(["train", "train", "contribute", "mark", "mark", "damage", "discard"]):
        case "train":
            added = chance.randrange(1, 50)
            model.all_tokens += added
            model.counter += added
            ledger.set_totals(RUN, MODULE, model.counter, 0)
        case "contribute":
            free = model.free()
            if not free:
                return
            new = set(chance.sample(sorted(free), chance.randint(1, len(free))))
            direct = [i for i, state in model.state.items() if state == "pending"]
            chosen = set(chance.sample(direct, chance.randint(0, len(direct))))
            carried = chosen.union(*(model.carries[i] for i in chosen))
            contribution_id = f"c{len(model.state)}"
            model.contained[contribution_id] = new
            model.carries[contribution_id] = carried
            model.state[contribution_id] = "in_flight"
            contribute(
                ledger, contribution_id, len(new), {i: len(model.contained[i]) for i in carried}
            )
        case "mark" if model.state:
            contribution_id = chance.choice(sorted(model.state))
            state = chance.choice(["in_flight", "pending", "confirmed", "refused", "dropped"])
            model.state[contribution_id] = state
            assert ledger.mark_contribution(contribution_id, state, "why")
        case "damage":
            went_back = chance.randint(0, model.counter)
            model.counter -= went_back
            lost = sorted(model.free())[: min(went_back, len(model.free()))]
            model.dropped.update(lost)
            ledger.set_totals(RUN, MODULE, model.counter, 0)
        case "discard":
            tokens = chance.randrange(60)
            lost = sorted(model.free())[:tokens]
            model.dropped.update(lost)
            assert ledger.record_discarded(RUN, MODULE, tokens, "why") == len(lost)


@pytest.mark.parametrize("seed", range(25))
def test_the_books_close_on_random_schedules(ledger: Ledger, seed: int) -> None:
    chance = random.Random(seed)
    model = Model()
    for number in range(40):
        step(model, ledger, chance)
        if number % 8 == 7:
            places = Counter(model.place(token) for token in range(model.all_tokens))
            assert ledger.balance() == balance(**places)
            assert ledger.balance().is_exact
    stats = ledger.stats()
    assert stats.tokens_done == model.all_tokens
    assert stats.tokens_pending == places["pending"] + places["not_contributed"]
    assert stats.tokens_confirmed == places["confirmed"]
    assert stats.rounds_confirmed == Counter(model.state.values())["confirmed"]
    assert stats.rounds_refused == Counter(model.state.values())["refused"]
