"""Golden frames: the program makes and reads them, and so does a second implementation."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from libp2p.utils.varint import encode_varint_prefixed

from p2p.framing import parse_blob_request, parse_manifest
from p2p.gossip_packing import Packer
from p2p.hello import encode_hello, parse_hello
from p2p.peer_exchange import encode_addresses, encode_request, parse_addresses, parse_request
from tests.protocol import second_chain, second_judgement, second_records, second_state, second_wire
from tests.protocol.frames import (
    ADDRS,
    BASE,
    BLOB,
    IDS,
    ME,
    MODULE,
    NEW_FIELDS,
    OTHER,
    RECORDS,
    RUN,
    UTC_S,
    all_frames,
    facts,
)
from tests.protocol.second_wire import MalformedError
from volunteer.agent.intake import NewKind, verify_incoming
from volunteer.agent.record_book import SignedRecord
from volunteer.agent.wire import encode, parse_heartbeat, parse_sync_message, parse_sync_reply
from volunteer.messages import (
    control_reply_decoder,
    control_request_decoder,
    encode_line,
    parse_line,
)

GOLDEN_FILE = Path(__file__).parents[1] / "golden" / "protocol" / "frames.json"
GOLDEN: dict[str, dict[str, str]] = json.loads(GOLDEN_FILE.read_text("utf-8"))
PROTOCOL = (Path(__file__).parents[2] / "p2p" / "PROTOCOL.md").read_text("utf-8")
FRAMES = {name: bytes.fromhex(text) for name, text in GOLDEN["frames"].items()}
RECORD_NAMES = [name for name in FRAMES if name.startswith("record ")]


def test_the_program_makes_the_golden_frames() -> None:
    assert {name: frame.hex() for name, frame in all_frames().items()} == GOLDEN["frames"]
    assert facts() == GOLDEN["facts"]


# ------------------------------------------------------------------------ read by the program


@pytest.mark.parametrize("name", RECORD_NAMES)
def test_records_are_read_back(name: str) -> None:
    read = verify_incoming(FRAMES[name], RUN, MODULE)
    kind = name.removeprefix("record ").partition(",")[0]
    if kind == "of a new kind":
        assert isinstance(read, NewKind)
        assert (read.kind, read.author) == ("applause", ME.peer_id)
        return
    assert isinstance(read, SignedRecord)
    assert read.record == RECORDS[kind]
    assert read.envelope == FRAMES[name], "kept as it came"
    is_newer = name.endswith("newer")
    assert (read.record_id == GOLDEN["facts"][f"id of {kind}"]) is not is_newer


READERS: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes]]] = {
    "hello": (parse_hello, encode_hello),
    "hello, clock": (parse_hello, encode_hello),
    "heartbeat": (parse_heartbeat, encode),
    "sync request": (parse_sync_message, encode),
    "records request": (parse_sync_message, encode),
    "push request": (parse_sync_message, encode),
    "sync response": (parse_sync_reply, encode),
    "sync response, empty": (parse_sync_reply, encode),
    "peers request": (parse_request, lambda read: encode_request(*read)),
    "peers response": (parse_addresses, encode_addresses),
    "control request": (lambda d: parse_line(d, control_request_decoder), encode_line),
    "control reply": (lambda d: parse_line(d, control_reply_decoder), encode_line),
    "control fault": (lambda d: parse_line(d, control_reply_decoder), encode_line),
}


@pytest.mark.parametrize("name", READERS)
def test_messages_are_read_back(name: str) -> None:
    read, write = READERS[name]
    assert write(read(FRAMES[name])) == FRAMES[name]


def test_what_a_newer_minor_version_adds_is_passed_over() -> None:
    assert parse_heartbeat(FRAMES["heartbeat, newer"]) == parse_heartbeat(FRAMES["heartbeat"])
    newer = parse_hello(FRAMES["hello, newer"])
    assert (newer.version.major, newer.version.minor, newer.tags) == (1, 7, ())


def test_blob_frames_are_read_back() -> None:
    request = parse_blob_request(FRAMES["blob chunk request"])
    assert (request.blob_id, request.chunk_index) == (GOLDEN["facts"]["blob id"], 258)
    assert parse_manifest(FRAMES["blob manifest"])[0] == len(BLOB)


# -------------------------------------------------------- read by the second implementation


@pytest.mark.parametrize(
    "source", [second_wire, second_records, second_judgement, second_state, second_chain]
)
def test_the_second_implementation_imports_nothing_of_the_program(source: ModuleType) -> None:
    allowed = {"__future__", "blake3", "nacl", *sys.stdlib_module_names}
    tree = ast.parse(Path(str(source.__file__)).read_text("utf-8"))
    imported = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    imported += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    others = {name for name in imported if name.partition(".")[0] not in allowed}
    second = ("wire", "judgement", "state")
    assert others <= {f"tests.protocol.second_{name}" for name in second}


@pytest.mark.parametrize("name", RECORD_NAMES)
def test_the_second_one_reads_records(name: str) -> None:
    read = second_records.read_envelope(FRAMES[name], RUN, MODULE)
    kind = name.removeprefix("record ").partition(",")[0]
    if kind == "of a new kind":
        assert (read.kind, read.is_known, read.new_fields) == ("applause", False, {"loud": True})
        return
    ours = msgspec.to_builtins(RECORDS[kind])
    assert read.fields == {n: list(v) if isinstance(v, tuple) else v for n, v in ours.items()}
    is_newer = name.endswith("newer")
    assert read.new_fields == (NEW_FIELDS if is_newer else {})
    assert (read.record_id == GOLDEN["facts"][f"id of {kind}"]) is not is_newer


def test_the_second_one_reads_messages() -> None:
    heartbeat = second_records.read_heartbeat(FRAMES["heartbeat"])
    assert second_records.read_heartbeat(FRAMES["heartbeat, newer"]) == heartbeat
    assert (heartbeat["round_index"], heartbeat["addrs"]) == (300, list(ADDRS))
    request = second_records.read_request(FRAMES["sync request"])
    assert [one.hex() for one in request["have"]] == list(IDS)
    assert second_records.read_request(FRAMES["records request"])["ids"] == request["have"]
    (close, leaving) = second_records.read_request(FRAMES["push request"])["envelopes"]
    assert (close, leaving) == (FRAMES["record close"], FRAMES["record leaving"])
    response = second_records.read_response(FRAMES["sync response"])
    assert (response["tip"], response["has_more"], response["want"]) == (
        BASE,
        True,
        request["have"][:1],
    )
    assert second_records.read_response(FRAMES["sync response, empty"])["envelopes"] == []


def test_the_second_one_reads_frames_hellos_and_blobs() -> None:
    wire = second_wire
    assert wire.read_frame(FRAMES["request frame"], 4) == (b"what", b"")
    assert wire.read_answer(FRAMES["answer OK"], 1000) == ("OK", FRAMES["blob manifest"])
    assert wire.read_answer(FRAMES["answer REFUSED"], 0)[1] == b"not a member of that run"
    assert wire.read_answer(FRAMES["answer BUSY"], 0)[0] == "BUSY"
    hello = wire.read_hello(FRAMES["hello"])
    assert (hello.major, hello.minor, hello.program) == (1, 0, "allmende 0.1.0")
    assert hello.tags == [wire.tag_of(RUN), wire.tag_of("another")]
    assert wire.read_hello(FRAMES["hello, newer"]).minor == 7
    assert wire.read_hello(FRAMES["hello, clock"]).clock == UTC_S
    assert hello.clock is None
    assert wire.blob_id_of_manifest(FRAMES["blob manifest"]) == wire.blob_id(BLOB)
    request = wire.read_blob_request(FRAMES["blob chunk request"])
    assert request == ("CHUNK", wire.blob_id(BLOB), 258)
    assert wire.read_blob_request(FRAMES["blob manifest request"])[::2] == ("MANIFEST", 0)
    tag, lines = FRAMES["peers request"][:32], FRAMES["peers request"][32:]
    assert (tag, lines.decode().split("\n")) == (hello.tags[0], list(ADDRS))
    answer = FRAMES["peers response"].decode().split("\n")
    assert answer == [f"{addr}/p2p/{OTHER.peer_id}" for addr in ADDRS]


def test_the_second_one_reads_packed_gossip() -> None:
    """The bytes are the packer's choice: what is compared is what they stand for."""
    packer = Packer()
    frames = [FRAMES["record close"], FRAMES["record leaving"], b"", FRAMES["record close"]]
    stream = b"".join(encode_varint_prefixed(packer.pack(frame)) for frame in frames)
    assert second_wire.read_packed(stream) == frames
    (vector,) = re.findall(r"packed gossip, .*?`([0-9a-f]+)`", PROTOCOL)
    assert second_wire.read_packed(bytes.fromhex(vector)) == [
        b"what happened",
        b"what happened then",
    ]
    for bad in (b"\x02\x03\x00", b"\x03\xff\xff\xff"):
        with pytest.raises(MalformedError):
            second_wire.read_packed(bad)
    with pytest.raises(MalformedError):
        second_wire.read_packed(stream, len(FRAMES["record close"]) - 1)


def test_the_second_one_has_the_same_facts() -> None:
    known = GOLDEN["facts"]
    assert second_wire.genesis_id_of(RUN, MODULE) == known["genesis id"]
    assert second_wire.tag_of(RUN).hex() == known["tag"]
    assert second_wire.blob_id(BLOB) == known["blob id"]
    assert second_wire.public_key_of(ME.peer_id).hex() == (
        "8a88e3dd7409f195fd52db2d3cba5d72ca6709bf1d94121bf3748801b40f6f5c"
    )


def test_the_second_one_refuses_another_spelling_of_a_peer_id() -> None:
    for peer_id in (f"1{ME.peer_id}", f" {ME.peer_id}", ME.peer_id[:-1]):
        with pytest.raises(MalformedError):
            second_wire.public_key_of(peer_id)
