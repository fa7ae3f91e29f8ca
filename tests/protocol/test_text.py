"""PROTOCOL.md says what the source does: numbers, tables and vectors of sections 9 to 18."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from p2p import hello
from p2p.framing import Status, encode_frame, encode_refusal
from p2p.hello import Hello, encode_hello
from p2p.swarm_types import PROTOCOL_MAJOR, PROTOCOL_MINOR, PeerVersion
from tests.protocol.frames import UTC_S
from tests.protocol.second_wire import DEFAULTS, LATER
from volunteer.agent import exchange, intake, sync_pages, wire
from volunteer.rounds import bad_work, chain, exclusion, records
from volunteer.rounds import scoring as rounds_scoring
from volunteer.run import KNOWN_CODECS, LATER_KEYS, MAX_SPEC_BYTES, RunSpec
from volunteer.training import (
    compression_base,
    compression_float,
    contribution_blob,
    direction,
    scoring,
    similarity,
    state,
    weighing,
)

ROOT = Path(__file__).parents[2]
RAW = (ROOT / "p2p" / "PROTOCOL.md").read_text("utf-8")
TEXT = re.sub(r"\s+", " ", RAW)
GOLDEN = json.loads((ROOT / "tests" / "golden" / "protocol" / "frames.json").read_text("utf-8"))

SENTENCES = {
    "title": f"protocol, version {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}",
    "version": f"this text is {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}",
    "hello": f"saying hello: `{hello.HELLO_PROTOCOL}`",
    "hello bytes": f"of at most {hello.MAX_HELLO_BYTES:,} bytes",
    "hello program": f"its length, at most {hello.MAX_PROGRAM_CHARS};",
    "hello tags": f"how many, at most {hello.MAX_TAGS};",
    "hello rate": f"{hello.HELLOS_PER_S:g} hellos a second after a burst of {hello.HELLOS_BURST:g}",
    "dial again": f"SHOULD NOT dial it again for {hello.DIAL_AGAIN_S:g} s",
    "spec": f"TOML of at most {MAX_SPEC_BYTES:,} bytes",
    "envelope": f"It has at most {records.MAX_ENVELOPE_BYTES:,} bytes and exactly one form",
    "tokens": f"integer, 1..2^{records.MAX_TOKENS.bit_length() - 1} | trained tokens",
    "heights": f"integer, 0..2^{records.MAX_ROUND_INDEX.bit_length() - 1} |",
    "carries": f"list of at most {records.MAX_CARRIES} hashes",
    "listed": f"list of at most {records.MAX_LISTED} hashes",
    "new fields": f"at most {intake.MAX_NEW_FIELDS}, together at most "
    f"{intake.MAX_NEW_FIELD_BYTES:,} bytes",
    "new kinds": f"body of at most {intake.MAX_NEW_KIND_BYTES:,} bytes",
    "heartbeats": f"a heartbeat | {wire.MAX_HEARTBEAT_BYTES:,} bytes",
    "heard": f"not heard for {exchange.HEARD_FOR_S:g} s",
    "sync": f"Sync: `{exchange.SYNC_PROTOCOL}`",
    "sync bytes": f"of at most {wire.MAX_SYNC_BYTES:,} bytes",
    "have": f"at most {wire.MAX_HAVE:,} ids",
    "want": f"at most {wire.MAX_WANT} ids",
    "page": f"up to {wire.PAGE_BYTES:,} bytes of envelopes",
    "sync rate": f"exceeds {sync_pages.PEER_BYTES_PER_S:,} bytes a second after a burst of "
    f"{sync_pages.PEER_BURST_BYTES:,} (of envelopes, both ways, and "
    f"{sync_pages.REQUEST_COST_BYTES:,} a request)",
    "overlap": f"begins {sync_pages.OVERLAP_HEIGHTS} heights below",
    "recent": f"`seen(C)[a] > h(C) - {chain.RECENT_COMMITS}`",
    "outsiders": f"modulo {chain.OUTSIDER_RANKS}.",
    "probation": f"fewer than {chain.PROBATION_ROUNDS} commits",
    "blob format": f'`format` "{contribution_blob.FORMAT}"',
    "state format": f'`format` "{state.FORMAT}"',
    "largest fp32": f"{compression_base.MAX_MAGNITUDE / 2**16:g} * 2^16",
    "measured": f"s = amax / {compression_float.MAX_MEASURE_CODE}",
    "all blocks": f"N <= {similarity.MAX_ALL_BLOCKS};",
    "some blocks": f"floor({similarity.SAMPLED_FRACTION:g} N)",
    "cosine": f"below {direction.MIN_COSINE:g}",
    "weight": f"clip(tokens, {weighing.MIN_OF_MEDIAN:g} * median, {weighing.MAX_OF_MEDIAN:g} * med",
    "late": f"times {weighing.LATE_FACTOR:g} if late; times {weighing.PROBATION_FACTOR:g} on prob",
    "cap": f"more than {weighing.MAX_SHARE:g} * total",
    "marks": f"at most n div {exclusion.MAX_PART} of them (of none if n < {exclusion.MIN_AUTHORS})",
    "exclusion": f"to h(C) + {exclusion.EXCLUSION_ROUNDS}, and their bits are forgotten",
    "stale": f"one of the last {bad_work.STALE_ROUNDS} commits up to P lists",
    "noise": f"x = {direction.NOISE_SIGMAS:g} / sqrt(",
    "noise median": f"the median cosine is at least {direction.MIN_AGREEMENT:g} x",
    "copies": f"u(a, b) >= {direction.COPY_COSINE:g}",
    "scoring": f"by subtracting {scoring.SCORE_STEP:g} times the clipped contribution",
    "harm": f"standard errors and {100 * rounds_scoring.HARM_FRACTION:g} %",
    "verdict": f"maybe a list of at most {records.MAX_HARMFUL} hashes",
    "codecs": " ".join(f"| `{codec}` {version} |" for codec, version in KNOWN_CODECS[:1]),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_the_protocol_says_what_the_source_does(name: str) -> None:
    assert SENTENCES[name] in TEXT


def test_the_table_of_records_has_every_field_in_order() -> None:
    table = RAW.partition("| kind | field |")[2].partition("5. **New fields**")[0]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:3]] for line in table.splitlines()]
    fields: dict[str, list[str]] = {}
    kind = ""
    for cells in (row for row in rows if len(row) == 2 and row[1] not in ("", "---")):
        kind = cells[0] or kind
        fields.setdefault(kind, []).append(cells[1])
    common = fields.pop("all")
    for record in get_args(records.Record):
        of_kind = fields.pop(str(record.__struct_config__.tag))
        assert common + of_kind == ["kind", *record.__struct_fields__]
    assert not fields


def test_the_table_of_a_run_has_every_key_and_default() -> None:
    text = RAW.partition("| table | key")[2].partition("2. Its canonical form")[0]
    for key, kind in RunSpec.__annotations__.items():
        assert f"`{key}`" in text, kind
    spec_fields = {f.name: f for f in msgspec.structs.fields(RunSpec)}
    for table, defaults in DEFAULTS.items():
        fields = msgspec.structs.fields(spec_fields[table].type if table else RunSpec)
        for field in fields:
            assert f"`{field.name}`" in text
            if field.default is not msgspec.NODEFAULT and field.name != "format":
                later = LATER.get(table, {})
                assert (field.name in later) == (field.name in LATER_KEYS.get(table, ()))
                default = (defaults | later)[field.name]
                plain = tuple(default) if isinstance(default, list) else default
                assert plain == field.default
    assert [codec for codec, _ in KNOWN_CODECS] == ["int4", "int8", "fp16", "fp32", "topk2"]


def test_the_vectors_are_right() -> None:
    facts, frames = GOLDEN["facts"], GOLDEN["frames"]
    vectors = [
        encode_hello(Hello(PeerVersion(1, 0, "allmende 0.1.0"), ())).hex(),
        encode_hello(Hello(PeerVersion(1, 1, "allmende 0.1.0"), (), UTC_S)).hex(),
        encode_frame(b"what").hex(),
        encode_refusal(Status.REFUSED, "no").hex(),
        facts["tag"],
        facts["genesis id"],
        facts["id of close"],
        facts["peer id of seed 01"],
        frames["blob manifest"],
        frames["record close"],
    ]
    for vector in vectors:
        assert f"`{vector}`" in TEXT
