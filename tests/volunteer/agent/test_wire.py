"""What members say besides records: golden bytes, bounds, and hostile bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fakes.members import MODULE, PEOPLE, RUN_ID, SignedChain, sign
from volunteer.agent.record_book import verify_envelope
from volunteer.agent.wire import (
    MAX_HAVE,
    MAX_HEARTBEAT_BYTES,
    MAX_SYNC_BYTES,
    Heartbeat,
    PushRecords,
    RecordsRequest,
    SyncReply,
    SyncRequest,
    WireError,
    encode,
    parse_heartbeat,
    parse_sync_message,
    parse_sync_reply,
)
from volunteer.rounds.records import Leaving, RecordError, encode_body, encode_envelope

GOLDEN_FILE = Path(__file__).parents[2] / "golden" / "wire" / "wire.json"
RUN, TIP, STATE = "0a" * 32, "1b" * 32, "2c" * 32
IDS = (bytes.fromhex("03" * 32), bytes.fromhex("c8" * 32))

Message = Heartbeat | SyncRequest | RecordsRequest | PushRecords | SyncReply
MESSAGES: dict[str, Message] = {
    "heartbeat": Heartbeat(
        run_id=RUN,
        module_id="dense",
        tip=TIP,
        round_index=41,
        state_hash=STATE,
        is_contributing=True,
        tokens_per_s=12345.5,
        loss=1.25,
        addrs=("/ip4/192.0.2.1/tcp/4001", "/ip6/2001:db8::1/tcp/4001"),
    ),
    "heartbeat_bare": Heartbeat(
        run_id=RUN,
        module_id="dense",
        tip=TIP,
        round_index=0,
        state_hash=STATE,
        is_contributing=False,
        tokens_per_s=0.0,
        loss=None,
        addrs=(),
    ),
    "sync_request": SyncRequest(
        run_id=RUN, module_id="dense", from_height=37, have=IDS, tip=TIP, has_closed=True
    ),
    "records_request": RecordsRequest(run_id=RUN, module_id="dense", ids=IDS),
    "push_records": PushRecords(run_id=RUN, module_id="dense", envelopes=(b"\x01\x02", b"")),
    "sync_reply": SyncReply(
        envelopes=(b"\x01\x02", b"\x03"), has_more=True, want=IDS[:1], tip=TIP, has_closed=True
    ),
    "sync_reply_bare": SyncReply(),
}
PARSERS: dict[str, Callable[[bytes], Message]] = {
    "heartbeat": parse_heartbeat,
    "sync": parse_sync_message,
    "reply": parse_sync_reply,
}


def parser_of(message: Message) -> Callable[[bytes], Message]:
    if isinstance(message, Heartbeat):
        return parse_heartbeat
    return parse_sync_reply if isinstance(message, SyncReply) else parse_sync_message


@pytest.mark.parametrize("name", MESSAGES)
def test_frames_are_golden(name: str) -> None:
    golden: dict[str, str] = json.loads(GOLDEN_FILE.read_text())
    assert encode(MESSAGES[name]).hex() == golden[name]
    assert parser_of(MESSAGES[name])(bytes.fromhex(golden[name])) == MESSAGES[name]


def changed(name: str, **fields: object) -> bytes:
    raw: dict[str, Any] = msgspec.msgpack.decode(encode(MESSAGES[name]))
    return msgspec.msgpack.encode(raw | fields)


BAD = [
    ("heartbeat", {"version": 2}),
    ("heartbeat", {"version": 0}),
    ("heartbeat", {"run_id": "0A" * 32}),
    ("heartbeat", {"run_id": RUN + "\n"}),
    ("heartbeat", {"module_id": "../dense"}),
    ("heartbeat", {"round_index": -1}),
    ("heartbeat", {"round_index": 2**41}),
    ("heartbeat", {"tokens_per_s": float("nan")}),
    ("heartbeat", {"tokens_per_s": float("inf")}),
    ("heartbeat", {"tokens_per_s": -1.0}),
    ("heartbeat", {"addrs": ["/a"] * 9}),
    ("heartbeat", {"addrs": ["a" * 201]}),
    ("heartbeat", {"tip": None}),
    ("sync_request", {"version": 2}),
    ("sync_request", {"type": "other"}),
    ("sync_request", {"have": [b"short"]}),
    ("sync_request", {"have": [b"x" * 32] * (MAX_HAVE + 1)}),
    ("sync_request", {"from_height": -1}),
    ("records_request", {"ids": [b"x" * 32] * 513}),
    ("push_records", {"envelopes": [b"x"] * (MAX_HAVE + 1)}),
    ("push_records", {"envelopes": "x"}),
    ("sync_reply", {"version": 7}),
    ("sync_reply", {"want": [b"x" * 33]}),
    ("sync_reply", {"tip": "nonsense"}),
]


@pytest.mark.parametrize(("name", "fields"), BAD, ids=range(len(BAD)))
def test_what_is_out_of_bounds_is_refused(name: str, fields: dict[str, object]) -> None:
    with pytest.raises(WireError):
        parser_of(MESSAGES[name])(changed(name, **fields))


def test_size_is_checked_before_anything_is_parsed() -> None:
    with pytest.raises(WireError, match="at most"):
        parse_heartbeat(b"\x00" * (MAX_HEARTBEAT_BYTES + 1))
    with pytest.raises(WireError, match="at most"):
        parse_sync_message(b"\x00" * (MAX_SYNC_BYTES + 1))
    with pytest.raises(WireError, match="at most"):
        parse_sync_reply(b"\x00" * (MAX_SYNC_BYTES + 1))


def test_unknown_fields_are_left_to_later_versions() -> None:
    assert parse_heartbeat(changed("heartbeat", new_field=[1])) == MESSAGES["heartbeat"]


ENVELOPE = sign(SignedChain().builder.draft(SignedChain().genesis, [], proposer=PEOPLE[0].peer_id))


def verify(data: bytes) -> object:
    return verify_envelope(data, RUN_ID, MODULE)


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=80, deadline=None)
@given(data=st.binary(max_size=400))
@example(data=b"\x80")
def test_random_bytes_are_wire_errors(name: str, data: bytes) -> None:
    try:
        message = PARSERS[name](data)
    except WireError:
        return
    # All of a reply has defaults: a map without any of its fields brings nothing.
    assert message == SyncReply()
    assert name == "reply"


@settings(max_examples=80, deadline=None)
@given(data=st.binary(max_size=400))
def test_random_bytes_are_record_errors(data: bytes) -> None:
    with pytest.raises(RecordError):
        verify(data)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(MESSAGES)),
    edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.integers(0, 40),
)
def test_damaged_frames_are_messages_or_wire_errors(
    name: str, edits: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(encode(MESSAGES[name]))
    for place, value in edits:
        data[place % len(data)] = value
    damaged = bytes(data[: len(data) - cut])
    parse = parser_of(MESSAGES[name])
    try:
        message = parse(damaged)
    except WireError:
        return
    assert parse(encode(message)) == message, "what was let in has one meaning"


@settings(max_examples=100, deadline=None)
@given(place=st.integers(0, len(ENVELOPE.envelope) - 1), bit=st.integers(0, 7))
def test_every_bit_of_an_envelope_is_covered(place: int, bit: int) -> None:
    assert verify(ENVELOPE.envelope) == ENVELOPE
    data = bytearray(ENVELOPE.envelope)
    data[place] ^= 1 << bit
    with pytest.raises(RecordError):
        verify(bytes(data))


DEEP = [b"\x91" * 100_000, b"\x81\xa1a" * 30_000, b"\xdd\x00\x00\x00\x01" * 20_000]


@pytest.mark.parametrize("data", DEEP, ids=["arrays", "maps", "long arrays"])
def test_deep_nesting_is_an_error_of_ours(data: bytes) -> None:
    for parse in PARSERS.values():
        with pytest.raises(WireError):
            parse(data)
    with pytest.raises(RecordError):
        verify(data)
    unknown_field = msgspec.msgpack.encode("later") + data[:3000]
    heartbeat = encode(MESSAGES["heartbeat"])
    nested = bytes([heartbeat[0] + 1]) + heartbeat[1:] + unknown_field
    with pytest.raises(WireError):
        parse_heartbeat(nested)
    body = encode_body(ENVELOPE.record)
    with pytest.raises(RecordError):
        verify(encode_envelope(bytes([body[0] + 1]) + body[1:] + unknown_field, b"\x00" * 64))


def test_one_record_has_one_envelope() -> None:
    version, body, signature = msgspec.msgpack.decode(ENVELOPE.envelope)
    padded = msgspec.msgpack.encode([version, body, signature, b"\x00" * 60_000])
    with pytest.raises(RecordError, match="one form"):
        verify(padded)
    longer_header = b"\xdc\x00\x03" + ENVELOPE.envelope[1:]
    with pytest.raises(RecordError, match="one form"):
        verify(longer_header)


def test_only_the_author_signs() -> None:
    forged = sign(ENVELOPE.record, by=PEOPLE[1])
    with pytest.raises(RecordError, match="not its author's"):
        verify(forged.envelope)


def test_a_record_of_another_run_is_refused() -> None:
    record = Leaving(
        run_id="cd" * 32,
        module_id=MODULE,
        round_index=0,
        author=PEOPLE[0].peer_id,
        base=TIP,
    )
    with pytest.raises(RecordError, match="another run"):
        verify(sign(record).envelope)
    other_module = msgspec.structs.replace(record, run_id=RUN_ID, module_id="other")
    with pytest.raises(RecordError, match="another run"):
        verify(sign(other_module).envelope)


@pytest.mark.parametrize("author", ["", "x" * 128, "12D3KooWnobody", "ü", "1" * 60])
def test_an_author_that_is_no_peer_is_refused(author: str) -> None:
    record = Leaving(run_id=RUN_ID, module_id=MODULE, round_index=0, author=author, base=TIP)
    with pytest.raises(RecordError):
        verify(sign(record, by=PEOPLE[0]).envelope)
