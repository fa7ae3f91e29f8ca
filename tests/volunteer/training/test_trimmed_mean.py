"""The trimmed mean against a few lines that say it again, and against those who would lead it."""

from __future__ import annotations

from fractions import Fraction

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.volunteer.training.synthetic import encoded, gradient, make_spec, work
from volunteer.errors import RunSpecError
from volunteer.messages import Outcome
from volunteer.run import OuterSpec, RunSpec, format_run_spec, parse_run_spec
from volunteer.training import trimmed_mean as this
from volunteer.training.aggregation import aggregate, combine
from volunteer.training.compression import decode
from volunteer.training.trimmed_mean import MIN_FOR_TRIM, TRIM_PART, trimmed_mean

P = 2520
FEW = st.sampled_from([-3.0, -1.0, -0.0, 0.0, 0.5, 1.0, 1e-3, 7.25, 1e4])


def said_again(values: list[float], weights: list[float]) -> float:
    """Return it for one element, exactly."""
    trim = len(values) // TRIM_PART
    low, high = sorted(values)[trim], sorted(values)[-1 - trim]
    kept = [(x, w) for x, w in zip(values, weights, strict=True) if low <= x <= high]
    total = sum(Fraction(x) * Fraction(w) for x, w in kept)
    return float(total / sum(Fraction(w) for _, w in kept))


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(st.data(), st.integers(MIN_FOR_TRIM, 40))
def test_it_is_what_a_few_lines_say(data: st.DataObject, num: int) -> None:
    columns = [data.draw(st.lists(FEW, min_size=num, max_size=num)) for _ in range(3)]
    weights = data.draw(st.lists(st.floats(1e-3, 1.0), min_size=num, max_size=num))
    found_S = trimmed_mean(list(torch.tensor(columns).T.contiguous()), weights)
    due = [said_again([float(torch.tensor(x)) for x in column], weights) for column in columns]
    torch.testing.assert_close(found_S, torch.tensor(due), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("num", [*range(4, 20), 32, 63])
def test_the_bounds_are_those_of_sorting(num: int) -> None:
    rows = [
        torch.randn(100, generator=torch.Generator().manual_seed(i)).round() for i in range(num)
    ]
    in_order_S = torch.stack(rows).sort(0).values
    low_S, high_S = this._bounds(rows)
    assert torch.equal(low_S, in_order_S[num // TRIM_PART])
    assert torch.equal(high_S, in_order_S[-1 - num // TRIM_PART])


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=6, max_size=6), st.floats(1e-3, 1.0))
def test_two_of_eight_cannot_lead_it_out_of_what_the_others_say(
    honest: list[float], weight: float
) -> None:
    for lies in ([1e30, 1e30], [-1e30, 1e30], [honest[0], -1e30]):
        rows = [torch.tensor([x]) for x in (*honest, *lies)]
        (found,) = trimmed_mean(rows, [0.1] * 6 + [weight] * 2).tolist()
        least, most = min(honest), max(honest)
        slack = 1e-6 * max(abs(least), abs(most))
        assert least - slack <= found <= most + slack


def test_pieces_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [gradient(f"piece {i}", P) for i in range(9)]
    weights = [0.05 + i / 100 for i in range(9)]
    whole_P = trimmed_mean(rows, weights)
    before = [row.clone() for row in rows]
    monkeypatch.setattr(this, "_CACHED_ELEMENTS", 100)
    assert torch.equal(trimmed_mean(rows, weights), whole_P)
    assert all(torch.equal(a, b) for a, b in zip(rows, before, strict=True))


def test_a_commit_is_trimmed_after_the_clip_and_by_weight() -> None:
    blobs = [encoded(gradient("c", P) + gradient(f"n{i}", P)) for i in range(5)]
    clips, weights = [1.0, 0.5, 1.0, 1.0, 0.25], [0.1, 0.3, 0.2, 0.2, 0.2]
    outcomes = [
        Outcome(contribution_id=str(i), weight=w, norm=1.0, clip_scale=c, refused_reason="")
        for i, (w, c) in enumerate(zip(weights, clips, strict=True))
    ]
    ((_, found_P),) = combine(blobs, outcomes, P, "trimmed_mean")
    scaled = [decode(blob) * clip for blob, clip in zip(blobs, clips, strict=True)]
    due = [said_again([float(x[j]) for x in scaled], weights) for j in range(P)]
    torch.testing.assert_close(found_P, torch.tensor(due))
    ((_, mean_P),) = combine(blobs, outcomes, P)
    assert not torch.allclose(found_P, mean_P)


def test_of_three_that_count_it_is_the_mean() -> None:
    blobs = [encoded(gradient("c", P) + gradient(f"n{i}", P)) for i in range(3)]
    blobs.append(encoded(-50 * gradient("c", P)))
    listed = [work(i) for i in range(4)]
    mean_P, outcomes = aggregate(blobs, listed, P)
    assert [bool(one.refused_reason) for one in outcomes] == [False, False, False, True]
    assert torch.equal(aggregate(blobs, listed, P, "trimmed_mean")[0], mean_P)


def test_a_run_may_ask_for_it_but_not_with_a_sparse_codec() -> None:
    spec = make_spec()
    assert "aggregation" not in format_run_spec(spec), "its id is that of before"
    outer = OuterSpec(aggregation="trimmed_mean")
    trimmed = msgspec.structs.replace(spec, outer=outer)
    assert trimmed.run_id != spec.run_id
    assert parse_run_spec(format_run_spec(trimmed), source="test") == trimmed
    assert outer.at_round(3).aggregation == "trimmed_mean"
    sparse = make_spec(codec_id="topk2")
    wrong = msgspec.structs.replace(sparse.outer, aggregation="trimmed_mean", momentum=0.5)
    with pytest.raises(RunSpecError) as caught:
        parse_run_spec(spec_text(sparse, wrong), source="test")
    assert "outer.aggregation must be mean" in str(caught.value)
    assert "outer.momentum must be 0" in str(caught.value)
    with pytest.raises(RunSpecError, match="aggregation"):
        parse_run_spec(format_run_spec(trimmed).replace("trimmed_mean", "median"), source="test")


def spec_text(spec: RunSpec, outer: OuterSpec) -> str:
    return format_run_spec(msgspec.structs.replace(spec, outer=outer))
