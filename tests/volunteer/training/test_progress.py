"""The token ledger: every trained token is in exactly one place, in any order of events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from volunteer.messages import Encoded, OwnWork, Rebase
from volunteer.training.progress import (
    MAX_OWN_BLOBS,
    OwnBlob,
    Progress,
    after_contribution,
    after_discard,
    after_rebase,
    after_step,
    carried_ids,
    is_superseded,
    tokens_to_contribute,
    unknown_carried,
)


def contribution(progress: Progress, blob_id: str) -> Encoded:
    return Encoded(
        base="c",
        round_index=0,
        blob_id=blob_id,
        blob_bytes=1,
        codec="int4",
        codec_version=1,
        tokens=tokens_to_contribute(progress),
        carries=carried_ids(progress),
    )


def rebase(pending: tuple[str, ...], works: tuple[OwnWork, ...]) -> Rebase:
    return Rebase(
        commit_id="c",
        round_index=3,
        state_hash="",
        pending=pending,
        works=works,
        known_contributions=(),
    )


def work(index: int, carries: tuple[str, ...] = ()) -> OwnWork:
    return OwnWork(contribution_id=f"c{index}", blob_id=f"b{index}", carries=carries)


@given(
    st.lists(st.sampled_from(["step", "contribute", "snapshot", "kill", "discard"]), max_size=60)
)
def test_the_ledger_is_exact_over_kills_and_discards(schedule: list[str]) -> None:
    progress = saved = Progress()
    num_blobs = 0
    for event in schedule:
        if event == "step":
            progress = after_step(progress, num_tokens=64)
        elif event == "contribute" and progress.tokens_since_contribution:
            num_blobs += 1
            progress = saved = after_contribution(progress, contribution(progress, f"b{num_blobs}"))
        elif event == "snapshot":
            saved = progress
        elif event == "kill":
            progress = saved
        elif event == "discard":
            progress = after_discard(progress, [f"unknown{num_blobs}"])
        contributed = sum(blob.new_tokens for blob in progress.own_blobs)
        assert contributed == progress.tokens_contributed
        assert progress.tokens_total == (
            contributed + progress.tokens_since_contribution + progress.tokens_discarded
        )


def test_a_contribution_counts_the_tokens_of_what_it_carries_once() -> None:
    progress = after_contribution(
        after_step(Progress(), num_tokens=10), contribution(Progress(), "b0")
    )
    carrying = after_rebase(progress, rebase(("c0",), ()), {"c0": work(0)})
    carrying = after_step(carrying, num_tokens=5)
    second = contribution(carrying, "b1")
    assert (second.tokens, second.carries) == (15, ("c0",))
    progress = after_contribution(carrying, second)
    assert progress.carried == ()
    works = {"c0": work(0), "c1": work(1, ("c0",))}
    both = after_rebase(progress, rebase(("c1", "c0"), ()), works)
    both = after_step(both, num_tokens=1)
    assert carried_ids(both) == ("c0", "c1")
    assert tokens_to_contribute(both) == 16  # c1's new tokens are 5, though it has 15
    only_new = after_step(after_rebase(progress, rebase(("c1",), ()), works), num_tokens=1)
    assert tokens_to_contribute(only_new) == 6


def test_a_snapshot_is_superseded_by_what_it_does_not_know() -> None:
    progress = Progress(own_blobs=(OwnBlob(blob_id="b1", new_tokens=1),))
    assert not is_superseded(progress, [])
    assert not is_superseded(progress, ["b0", "b1"])
    assert not is_superseded(Progress(), [])
    assert is_superseded(progress, ["b1", "b2"])
    assert is_superseded(Progress(), ["b1"])
    two = Progress(own_blobs=(*progress.own_blobs, OwnBlob(blob_id="b2", new_tokens=1)))
    assert not is_superseded(two, ["b1"])  # b2's record was never written: it is announced again


def test_a_discard_happens_once() -> None:
    """What is trained after it does not contain the unknown contribution, and must not go too."""
    progress = after_discard(after_step(Progress(), num_tokens=7), ["b8", "b9"])
    assert progress.tokens_discarded == 7
    progress = after_step(progress, num_tokens=7)
    assert not is_superseded(progress, ["b8", "b9"])
    assert is_superseded(progress, ["b8", "b9", "b10"])


def test_carried_work_with_unknown_tokens_is_told() -> None:
    progress = after_discard(Progress(), ["b1"])
    progress = after_rebase(progress, rebase(("c1",), ()), {"c1": work(1)})
    assert unknown_carried(progress) == ("c1",)
    assert tokens_to_contribute(progress) == 0


def test_old_contributions_are_forgotten_and_their_tokens_are_not() -> None:
    progress = Progress()
    for index in range(MAX_OWN_BLOBS + 5):
        progress = after_step(progress, num_tokens=2)
        progress = after_contribution(progress, contribution(progress, f"b{index}"))
    assert len(progress.own_blobs) == MAX_OWN_BLOBS
    assert progress.own_blobs[-1].blob_id == f"b{MAX_OWN_BLOBS + 4}"
    assert progress.tokens_contributed == progress.tokens_total == 2 * (MAX_OWN_BLOBS + 5)
