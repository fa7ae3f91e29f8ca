"""What is fetched ahead is what a commit would list, however many there are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.volunteer.rounds.chain_builder import ChainBuilder, hash_of, make_rules
from tests.volunteer.rounds.desk import Desk, only
from volunteer.rounds import events as ev
from volunteer.rounds.sampling import Draw, sample_contributions

LIMIT = 6
MANY = 4 * LIMIT
"""As many strangers as are remembered on one base."""


@given(
    st.dictionaries(
        st.integers(0, 200), st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60
    ),
    st.integers(1, 12),
    st.sets(st.integers(0, 200), max_size=20),
)
def test_a_draw_is_the_sample_of_what_can_be_had(
    kinds: dict[int, tuple[bool, bool]], limit: int, out: set[int]
) -> None:
    draw = Draw("seed", limit)
    for number, (is_first, is_vote) in kinds.items():
        draw.add(hash_of(str(number)), is_first=is_first, is_vote=is_vote)
    is_out = {hash_of(str(number)) for number in out}
    left = [hash_of(str(number)) for number in kinds if number not in out]
    first = {hash_of(str(number)) for number, (is_first, _) in kinds.items() if is_first}
    votes = {hash_of(str(number)) for number, (_, is_vote) in kinds.items() if is_vote}
    sample = sample_contributions(left, limit, seed="seed", first=first, votes=votes)
    assert sorted(draw.chosen(is_out)) == list(sample)
    assert sorted(draw.ids) == sorted(hash_of(str(number)) for number in kinds)
    assert len(draw) == len(kinds)


@given(
    st.lists(
        st.tuples(st.integers(0, 200), st.booleans(), st.booleans()),
        max_size=60,
        unique_by=lambda kind: kind[0],
    ),
    st.integers(1, 12),
    st.sets(st.integers(0, 200), max_size=20),
)
def test_what_is_not_drawn_leaves_the_draw_unchanged(
    kinds: list[tuple[int, bool, bool]], limit: int, out: set[int]
) -> None:
    draw, is_out = Draw("seed", limit), {hash_of(str(number)) for number in out}
    chosen: list[str] = []
    for number, is_first, is_vote in kinds:
        draw.add(hash_of(str(number)), is_first=is_first, is_vote=is_vote)
        was_said_to_change, before = draw.has_changed, chosen
        chosen = draw.chosen(is_out)
        assert was_said_to_change or chosen == before
        assert not draw.has_changed


def crowded_desk(num_authors: int) -> tuple[Desk, list[str]]:
    """A member that hears of all contributions on the genesis at once."""
    chain = ChainBuilder(make_rules(publisher="", max_contributions=LIMIT))
    made = [
        chain.contribution(f"p{number:02d}", chain.genesis, is_held=False)
        for number in range(num_authors)
    ]
    desk = Desk(chain, "me")
    desk.learn(held=False, verified=(chain.genesis,))
    return desk, made


def asked_for(desk: Desk) -> set[str]:
    return {action.contribution_id for action in only(desk.actions, ev.FetchBlob)}


def test_of_many_announced_only_those_that_would_be_listed_are_fetched() -> None:
    desk, made = crowded_desk(MANY)
    desk.feed(ev.ContributingChanged(True))
    desk.wait(1.0)
    listed = sample_contributions(made, LIMIT, seed=desk.chain.genesis)
    assert set(listed) <= asked_for(desk)
    desk.actions.clear()
    for contribution_id in listed:
        desk.feed(ev.BlobHeld(contribution_id))
    desk.wait(120.0)
    assert asked_for(desk) == set(), "all that a commit would list is here"


def test_few_are_all_fetched() -> None:
    desk, made = crowded_desk(LIMIT)
    desk.feed(ev.ContributingChanged(True))
    desk.wait(1.0)
    assert asked_for(desk) == set(made)


def test_who_keeps_blobs_back_does_not_keep_others_out() -> None:
    desk, made = crowded_desk(MANY)
    desk.feed(ev.ContributingChanged(True))
    desk.wait(1.0)
    withheld = sample_contributions(made, LIMIT, seed=desk.chain.genesis)
    others = sample_contributions(
        [i for i in made if i not in withheld], LIMIT, seed=desk.chain.genesis
    )
    assert not set(others) <= asked_for(desk)
    for _ in range(4):
        for contribution_id in withheld:
            desk.feed(ev.RequestFailed(contribution_id))
        desk.wait(8.0)
    assert set(others) <= asked_for(desk)
