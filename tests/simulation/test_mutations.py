"""Each rule of the round protocol, taken out of the real machine, is missed at once."""

from __future__ import annotations

import re

import pytest

from tests.simulation import adversary
from tests.simulation.mutations import MUTATIONS

pytestmark = [pytest.mark.simulation, pytest.mark.slow]


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_rule_that_is_taken_out_is_missed(name: str) -> None:
    mutation = MUTATIONS[name]
    assert not mutation.schedule(), "with the rule in, the same schedule breaks nothing"
    with mutation.applied():
        broken = mutation.schedule()
    assert re.search(mutation.breaks, broken), broken


@pytest.mark.parametrize(("faster", "slower"), [("ab", "cd"), ("cd", "ab")])
def test_halves_of_unequal_speed_go_final_again_once_they_meet(faster: str, slower: str) -> None:
    assert not adversary.halves_of_unequal_speed_meet(faster, slower)
