"""The rules on weights, one by one, at their edges, and what holds for any list."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.volunteer.training.synthetic import work
from volunteer.messages import ListedWork, Outcome
from volunteer.training.direction import refuse_by_direction
from volunteer.training.weighing import Measured, lower_median, weigh

MANY = 10**6
"""Elements, of which chance gives a cosine of 0.005 at most."""


def aligned(num: int, norms: Sequence[float] | None = None) -> Measured:
    """Contributions that nearly point the same way, as far apart as honest ones."""
    gram = [[1.0 if i == j else 0.8 for j in range(num)] for i in range(num)]
    return Measured(norms=norms or [1.0] * num, gram=gram, num_elements=MANY)


def measured_of(vectors: Sequence[Sequence[float]]) -> Measured:
    gram = gram_of(vectors)
    norms = [math.sqrt(row[i]) for i, row in enumerate(gram)]
    return Measured(norms=norms, gram=gram, num_elements=MANY)


def refuse_by_cosine(gram: Sequence[Sequence[float]]) -> dict[int, str]:
    return refuse_by_direction(gram, range(len(gram)), num_elements=MANY, most_noise=0)


def weights_of(outcomes: Sequence[Outcome]) -> list[float]:
    return [outcome.weight for outcome in outcomes]


def gram_of(vectors: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[math.fsum(x * y for x, y in zip(a, b, strict=True)) for b in vectors] for a in vectors]


def test_weights_are_tokens_within_a_tenth_and_four_times_the_median() -> None:
    listed = [work(i, tokens=tokens) for i, tokens in enumerate([1, 100, 200, 10_000])]
    total = 10 + 100 + 200 + 400  # the lower median is 100
    assert weights_of(weigh(listed, aligned(4))) == [
        pytest.approx(part / total, abs=1e-15) for part in (10, 100, 200, 400)
    ]


def test_late_counts_half_and_probation_a_quarter() -> None:
    listed = [
        work(0),
        work(1, is_late=True),
        work(2, is_on_probation=True),
        work(3, is_late=True, is_on_probation=True),
    ]
    assert weights_of(weigh(listed, aligned(4))) == [
        pytest.approx(part / 15) for part in (8, 4, 2, 1)
    ]


def test_one_alone_has_all_the_weight_whatever_it_is() -> None:
    listed = [work(0, tokens=1, is_late=True, is_on_probation=True)]
    (outcome,) = weigh(listed, aligned(1, [123.0]))
    assert (outcome.weight, outcome.norm, outcome.clip_scale) == (1.0, 123.0, 1.0)


def test_nothing_listed_is_nothing() -> None:
    assert weigh([], Measured(norms=[], gram=[], num_elements=0)) == ()


def test_the_norm_is_clipped_to_the_median_from_five_on() -> None:
    norms = [1.0, 2.0, 3.0, 4.0, 100.0]
    five = weigh([work(i) for i in range(5)], aligned(5, norms))
    assert [outcome.clip_scale for outcome in five] == [1.0, 1.0, 1.0, 0.75, 0.03]
    four = weigh([work(i) for i in range(4)], aligned(4, norms[1:]))
    assert [outcome.clip_scale for outcome in four] == [1.0] * 4


def test_carried_work_may_be_longer_in_proportion_to_its_tokens_up_to_four() -> None:
    tokens = [100, 100, 100, 300, 10_000]
    norms = [1.0, 1.0, 1.0, 6.0, 6.0]
    listed = [work(i, tokens=count) for i, count in enumerate(tokens)]
    scales = [outcome.clip_scale for outcome in weigh(listed, aligned(5, norms))]
    assert scales == [1.0, 1.0, 1.0, pytest.approx(3 / 6), pytest.approx(4 / 6)]


def test_a_zero_contribution_is_neither_clipped_nor_refused() -> None:
    measured = Measured(norms=[0.0] * 6, gram=[[0.0] * 6] * 6, num_elements=MANY)
    for outcome in weigh([work(i) for i in range(6)], measured):
        assert (outcome.clip_scale, outcome.refused_reason) == (1.0, "")


def test_nobody_has_more_than_a_quarter_from_five_authors_on() -> None:
    tokens = [1000, 1000, 4000, 4000, 1000]
    listed = [work(i, tokens=count) for i, count in enumerate(tokens)]
    assert weights_of(weigh(listed, aligned(5))) == [
        pytest.approx(share) for share in (1 / 6, 1 / 6, 0.25, 0.25, 1 / 6)
    ]
    four = weigh(listed[1:], aligned(4))
    assert max(weights_of(four)) == pytest.approx(0.4)


def test_lowering_one_may_bring_the_next_above_the_cap() -> None:
    # 40 + 24 + 12 * 3 = 100: only the first is above at once; then 24 of 80, then nobody.
    listed = [work(i, tokens=count) for i, count in enumerate([40, 24, 12, 12, 12])]
    weights = weights_of(weigh(listed, aligned(5)))
    assert weights == [pytest.approx(share) for share in (0.25, 0.25, 1 / 6, 1 / 6, 1 / 6)]


def test_an_author_is_capped_over_all_that_it_has_listed() -> None:
    listed = [work(i, author="twice" if i < 2 else "") for i in range(6)]
    weights = weights_of(weigh(listed, aligned(6)))
    assert weights[0] + weights[1] == pytest.approx(0.25)
    assert weights[2:] == [pytest.approx(0.75 / 4)] * 4


def test_the_opposite_direction_is_refused_and_the_others_are_not() -> None:
    vectors = [[1.0, 0.1], [1.0, -0.1], [-10.0, 0.0]]
    listed = [work(i) for i in range(3)]
    outcomes = weigh(listed, measured_of(vectors))
    assert weights_of(outcomes) == [0.5, 0.5, 0.0]
    assert [bool(outcome.refused_reason) for outcome in outcomes] == [False, False, True]
    assert "-1.00" in outcomes[2].refused_reason


def test_one_attacker_does_not_take_an_honest_one_with_it() -> None:
    # Against the sum that the attackers spoil, the last honest one looks wrong as well.
    vectors = [[1.0, 0.0], [1.0, 0.2], [0.3, 1.0], [-0.9, -1.0], [-0.8, -1.0]]
    gram = gram_of(vectors)
    assert set(refuse_by_cosine(gram)) == {3, 4}


def test_of_two_that_disagree_nobody_can_say_which_is_wrong() -> None:
    assert refuse_by_cosine(gram_of([[1.0], [-1.0]])) == {}


def test_the_threshold_is_minus_a_fifth() -> None:
    def third(cosine: float) -> list[list[float]]:
        return gram_of([[1.0, 0.0], [1.0, 0.0], [cosine, math.sqrt(1 - cosine * cosine)]])

    assert refuse_by_cosine(third(-0.19)) == {}
    assert set(refuse_by_cosine(third(-0.21))) == {2}


def test_refused_ones_do_not_count_in_medians() -> None:
    # With the refused ones' tokens, the median would be 1 and everyone's weight 4.
    vectors = [[1.0], [1.0], [1.0], [-1.0]]
    tokens = [100, 200, 50, 1]
    listed = [work(i, tokens=count) for i, count in enumerate(tokens)]
    outcomes = weigh(listed, measured_of(vectors))
    assert weights_of(outcomes) == [pytest.approx(part / 350) for part in (100, 200, 50)] + [0.0]


def test_vectors_that_cancel_refuse_nobody() -> None:
    angles = [0.0, 2 * math.pi / 3, 4 * math.pi / 3]
    four = [[math.cos(a), math.sin(a), 0.0] for a in angles] + [[0.0, 0.0, 1.0]]
    assert 3 not in refuse_by_cosine(gram_of(four))


def test_the_median_of_an_even_count_is_the_lower() -> None:
    assert lower_median([4, 1, 3, 2]) == 2
    assert lower_median([5, 1, 3]) == 3


works = st.builds(
    work,
    st.integers(0, 10**6),
    tokens=st.integers(1, 2**49),
    author=st.sampled_from(["", "a", "b", "c"]),
    is_late=st.booleans(),
    is_on_probation=st.booleans(),
)


@st.composite
def commits(draw: st.DrawFn) -> tuple[list[ListedWork], Measured]:
    listed = draw(st.lists(works, max_size=12))
    vector = st.lists(st.floats(-10, 10), min_size=3, max_size=3)
    vectors = [draw(vector) for _ in listed]
    return listed, measured_of(vectors)


@settings(deadline=None)
@given(commits())
def test_what_holds_for_any_commit(commit: tuple[list[ListedWork], Measured]) -> None:
    listed, measured = commit
    outcomes = weigh(listed, measured)
    kept = [i for i, outcome in enumerate(outcomes) if not outcome.refused_reason]
    assert len(kept) >= min(len(listed), 2)
    if listed:
        assert math.fsum(weights_of(outcomes)) == pytest.approx(1.0, abs=1e-12)
    shares: dict[str, float] = {}
    for i in kept:
        assert outcomes[i].weight > 0
        assert 0 < outcomes[i].clip_scale <= 1 or measured.norms[i] > 0
        shares[listed[i].author] = shares.get(listed[i].author, 0.0) + outcomes[i].weight
    if len(shares) >= 5:
        assert max(shares.values()) <= 0.25 + 1e-12
    doubled = [msgspec.structs.replace(w, tokens=2 * w.tokens) for w in listed]
    assert weigh(doubled, measured) == outcomes
