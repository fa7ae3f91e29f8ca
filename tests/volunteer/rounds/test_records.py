"""Records are final formats: golden bytes and ids, bounds, and hostile bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from volunteer.rounds.records import (
    MAX_ENVELOPE_BYTES,
    MAX_HARMFUL,
    MAX_LISTED,
    Close,
    Commit,
    Contribution,
    Leaving,
    Record,
    RecordError,
    author_of,
    encode_body,
    encode_envelope,
    genesis_id,
    parse_body,
    parse_envelope,
    record_id_of,
    signed_bytes,
)

GOLDEN_FILE = Path(__file__).parents[2] / "golden" / "records" / "records.json"
RUN = "0a" * 32
BASE = "1b" * 32
IDS = tuple(f"{i:02x}" * 32 for i in (3, 7, 200))

RECORDS: dict[str, Record] = {
    "contribution": Contribution(
        run_id=RUN,
        module_id="dense",
        round_index=41,
        author="12D3KooWExample",
        base=BASE,
        vote=True,
        blob_id=IDS[0],
        blob_bytes=4_194_304,
        codec="int4-block",
        codec_version=1,
        tokens=1_234_567,
        carries=IDS[1:],
    ),
    "contribution_bare": Contribution(
        run_id=RUN,
        module_id="path-3.module_1",
        round_index=0,
        author="p",
        base=BASE,
        vote=False,
        blob_id=IDS[0],
        blob_bytes=1,
        codec="topk",
        codec_version=2,
        tokens=1,
    ),
    "commit": Commit(
        run_id=RUN,
        module_id="dense",
        round_index=42,
        parent=BASE,
        rank=2,
        proposer="12D3KooWExample",
        contributions=IDS,
        leaving=IDS[:1],
        state_hash=IDS[2],
    ),
    "contribution_scoring": Contribution(
        run_id=RUN,
        module_id="dense",
        round_index=41,
        author="12D3KooWExample",
        base=BASE,
        vote=True,
        blob_id=IDS[0],
        blob_bytes=4_194_304,
        codec="int4",
        codec_version=1,
        tokens=1_234_567,
        content_hash=IDS[1],
        harmful=IDS[1:],
    ),
    "contribution_finding_nothing": Contribution(
        run_id=RUN,
        module_id="dense",
        round_index=41,
        author="p",
        base=BASE,
        vote=False,
        blob_id=IDS[0],
        blob_bytes=1,
        codec="int4",
        codec_version=1,
        tokens=1,
        content_hash=IDS[1],
        harmful=(),
    ),
    "commit_marking": Commit(
        run_id=RUN,
        module_id="dense",
        round_index=42,
        parent=BASE,
        rank=0,
        proposer="12D3KooWExample",
        contributions=IDS,
        state_hash=IDS[2],
        marked=IDS[1:2],
    ),
    "close": Close(run_id=RUN, module_id="dense", round_index=41, author="p", base=BASE),
    "leaving": Leaving(run_id=RUN, module_id="dense", round_index=41, author="p", base=BASE),
}


def golden() -> dict[str, dict[str, str]]:
    return json.loads(GOLDEN_FILE.read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", RECORDS)
def test_bytes_and_ids_are_golden(name: str) -> None:
    body = encode_body(RECORDS[name])
    expected = golden()[name]
    assert body.hex() == expected["body"]
    assert record_id_of(body) == expected["id"]
    assert encode_envelope(body, b"\x5a" * 64).hex() == expected["envelope"]


@pytest.mark.parametrize("name", RECORDS)
def test_golden_bytes_are_read_back(name: str) -> None:
    envelope = parse_envelope(bytes.fromhex(golden()[name]["envelope"]))
    assert envelope.signature == b"\x5a" * 64
    assert parse_body(envelope.body) == RECORDS[name]


def test_genesis_ids_are_golden() -> None:
    assert genesis_id(RUN, "dense") == golden()["genesis"]["id"]
    assert genesis_id(RUN, "other") != genesis_id(RUN, "dense")


def test_the_signature_covers_a_context() -> None:
    body = encode_body(RECORDS["close"])
    assert signed_bytes(body) == b"allmende/record/1\x00" + body


def test_the_author_of_a_commit_is_its_proposer() -> None:
    assert author_of(RECORDS["commit"]) == "12D3KooWExample"
    assert author_of(RECORDS["leaving"]) == "p"


def changed(name: str, **fields: object) -> bytes:
    raw: dict[str, Any] = msgspec.msgpack.decode(encode_body(RECORDS[name]))
    return msgspec.msgpack.encode(raw | fields)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("contribution", {"round_index": -1}),
        ("contribution", {"round_index": 2**40 + 1}),
        ("contribution", {"tokens": 0}),
        ("contribution", {"tokens": 2**50 + 1}),
        ("contribution", {"blob_bytes": 0}),
        ("contribution", {"author": ""}),
        ("contribution", {"author": "p" * 129}),
        ("contribution", {"base": "1B" * 32}),
        ("contribution", {"base": "1b" * 31}),
        ("contribution", {"base": "1b" * 32 + "\n"}),
        ("contribution", {"codec": "../int4"}),
        ("contribution", {"codec": "int4\n"}),
        ("contribution", {"vote": 1}),
        ("contribution", {"carries": list(IDS[::-1])}),
        ("contribution", {"carries": [IDS[0], IDS[0]]}),
        ("contribution", {"carries": [f"{i:064x}" for i in range(65)]}),
        ("commit", {"contributions": list(IDS[::-1])}),
        ("commit", {"contributions": [f"{i:064x}" for i in range(MAX_LISTED + 1)]}),
        ("commit", {"leaving": [IDS[1], IDS[1]]}),
        ("commit", {"marked": []}),  # else an honest commit had two forms
        ("commit", {"marked": ["5" * 64]}),
        ("commit", {"marked": [IDS[1], IDS[0]]}),
        ("commit", {"marked": None}),
        ("contribution", {"harmful": [IDS[1], IDS[1]]}),
        ("contribution", {"harmful": [f"{i:064x}" for i in range(MAX_HARMFUL + 1)]}),
        ("contribution", {"content_hash": ""}),
        ("contribution", {"content_hash": None}),
        ("commit", {"round_index": 0}),
        ("commit", {"rank": -1}),
        ("commit", {"kind": "contribution"}),
        ("close", {"kind": "unheard-of"}),
        ("close", {"module_id": "Dense"}),
    ],
)
def test_what_breaks_a_bound_is_no_record(name: str, fields: dict[str, object]) -> None:
    with pytest.raises(RecordError):
        parse_body(changed(name, **fields))


@pytest.mark.parametrize("name", RECORDS)
def test_every_field_but_the_lists_is_needed(name: str) -> None:
    raw: dict[str, Any] = msgspec.msgpack.decode(encode_body(RECORDS[name]))
    for field in raw.keys() - {"carries", "leaving", "content_hash", "harmful", "marked"}:
        less = {key: value for key, value in raw.items() if key != field}
        with pytest.raises(RecordError):
            parse_body(msgspec.msgpack.encode(less))


def test_the_largest_commit_fits_in_an_envelope() -> None:
    ids = [f"{i:064x}" for i in range(MAX_LISTED)]
    body = changed("commit", contributions=ids, leaving=ids, marked=ids)
    assert parse_body(parse_envelope(encode_envelope(body, b"s" * 80)).body).round_index == 42


def test_envelopes_that_are_too_large_or_of_another_version_are_refused() -> None:
    with pytest.raises(RecordError, match="at most"):
        parse_envelope(b"\x00" * (MAX_ENVELOPE_BYTES + 1))
    with pytest.raises(RecordError, match="version 2"):
        parse_envelope(msgspec.msgpack.encode([2, b"body", b"signature"]))


@given(st.binary(max_size=400))
def test_only_record_errors_escape_from_any_bytes(data: bytes) -> None:
    for parse in (parse_envelope, parse_body):
        try:
            parse(data)
        except RecordError:
            continue


@settings(max_examples=300)
@given(
    st.sampled_from(sorted(RECORDS)),
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), min_size=1, max_size=6),
    st.integers(0, 500),
)
def test_only_record_errors_escape_from_damaged_records(
    name: str, damage: list[tuple[int, int]], length: int
) -> None:
    body = bytearray(encode_body(RECORDS[name]))
    for position, value in damage:
        body[position % len(body)] = value
    data = bytes(body[: max(1, length)])
    for parse in (parse_envelope, parse_body):
        try:
            record = parse(data)
        except RecordError:
            continue
        if not isinstance(record, msgspec.Struct):
            raise AssertionError(record)


nested = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.sampled_from(sorted(RECORDS)), st.data())
def test_only_record_errors_escape_from_fields_of_any_type(name: str, data: st.DataObject) -> None:
    raw: dict[str, Any] = msgspec.msgpack.decode(encode_body(RECORDS[name]))
    field = data.draw(st.sampled_from(sorted(raw)))
    raw[field] = data.draw(nested)
    try:
        record = parse_body(msgspec.msgpack.encode(raw))
    except RecordError:
        return
    # Whatever passes is a record that goes out as it came in.
    assert parse_body(encode_body(record)) == record


def test_deep_nesting_is_a_record_error() -> None:
    deep = b"\x91" * 60_000 + b"\xc0"
    body = encode_body(RECORDS["close"])
    one_more_field = bytes([body[0] + 1]) + body[1:] + b"\xa1x" + deep
    for data in (deep, one_more_field):
        with pytest.raises(RecordError):
            parse_body(data)
        with pytest.raises(RecordError):
            parse_envelope(data)
