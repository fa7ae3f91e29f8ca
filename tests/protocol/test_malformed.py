"""What is malformed is refused with its reason, by the program and by a second implementation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protocol import second_records
from tests.protocol.frames import MODULE, RECORDS, RUN, all_frames, seal
from tests.protocol.malformed import MALFORMED
from tests.protocol.second_wire import MalformedError
from volunteer.agent.intake import NewKind, verify_incoming
from volunteer.rounds.records import RecordError, encode_body

RECORD_FRAMES = [frame for name, frame in all_frames().items() if name.startswith("record ")]


@pytest.mark.parametrize("name", MALFORMED)
def test_each_is_refused_with_its_reason(name: str) -> None:
    data, reason = MALFORMED[name]
    with pytest.raises(RecordError) as refused:
        verify_incoming(data, RUN, MODULE)
    assert reason in str(refused.value)


@pytest.mark.parametrize("name", MALFORMED)
def test_the_second_implementation_refuses_each(name: str) -> None:
    with pytest.raises(MalformedError):
        second_records.read_envelope(MALFORMED[name][0], RUN, MODULE)


@settings(max_examples=150, deadline=None)
@given(
    frame=st.sampled_from(RECORD_FRAMES),
    edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=3),
    cut=st.integers(0, 3),
)
def test_both_agree_on_damaged_envelopes(
    frame: bytes, edits: list[tuple[int, int]], cut: int
) -> None:
    damaged = bytearray(frame)
    for place, value in edits:
        damaged[place % len(damaged)] = value
    agree(bytes(damaged[: len(damaged) - cut]))


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(sorted(RECORDS)),
    edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=2),
    more=st.binary(max_size=3),
)
def test_both_agree_on_damaged_records_that_are_well_signed(
    kind: str, edits: list[tuple[int, int]], more: bytes
) -> None:
    body = bytearray(encode_body(RECORDS[kind]))
    for place, value in edits:
        body[place % len(body)] = value
    agree(seal(bytes(body) + more))


def agree(data: bytes) -> None:
    """Assert that both refuse, or both read the same."""
    try:
        theirs = second_records.read_envelope(data, RUN, MODULE)
    except MalformedError:
        with pytest.raises(RecordError):
            verify_incoming(data, RUN, MODULE)
        return
    ours = verify_incoming(data, RUN, MODULE)
    assert ours.record_id == theirs.record_id
    assert isinstance(ours, NewKind) is not theirs.is_known
