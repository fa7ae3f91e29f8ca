"""The golden frames: everything that is sent, made by the program from fixed values.

`python -m tests.protocol.frames` prints them as JSON; tests/golden/protocol/frames.json holds them.
A change there is another protocol: PROTOCOL.md section 9 says which version it needs.
"""

from __future__ import annotations

import json
import sys

import msgspec

from p2p.addresses import parse_address
from p2p.blob_hashes import hashes_of_bytes
from p2p.blobstore import blob_id_of_bytes
from p2p.framing import (
    BlobOp,
    BlobRequest,
    Status,
    encode_blob_request,
    encode_frame,
    encode_manifest,
    encode_refusal,
)
from p2p.hello import Hello, encode_hello
from p2p.identity import Identity
from p2p.peer_exchange import encode_addresses, encode_request, tag_of
from p2p.swarm_types import PeerVersion
from volunteer.agent.wire import (
    Heartbeat,
    PushRecords,
    RecordsRequest,
    SyncReply,
    SyncRequest,
    encode,
)
from volunteer.answers import PeerStatus
from volunteer.messages import ControlFault, ControlReply, ControlRequest, encode_line
from volunteer.rounds.records import (
    Close,
    Commit,
    Contribution,
    Leaving,
    Record,
    encode_body,
    encode_envelope,
    genesis_id,
    record_id_of,
    signed_bytes,
)

ME, OTHER = Identity(b"\x01" * 32), Identity(b"\x02" * 32)
RUN, MODULE = "0a" * 32, "dense"
BASE = genesis_id(RUN, MODULE)
IDS = tuple(f"{number:02x}" * 32 for number in (3, 7, 200))
BLOB = b"allmende"
ADDRS = ("/ip4/192.0.2.1/tcp/4001", "/ip6/2001:db8::1/tcp/4001")

RECORDS: dict[str, Record] = {
    "contribution": Contribution(
        run_id=RUN,
        module_id=MODULE,
        round_index=0,
        author=ME.peer_id,
        base=BASE,
        vote=True,
        blob_id=blob_id_of_bytes(BLOB),
        blob_bytes=4_194_304,
        codec="int4",
        codec_version=1,
        tokens=1_234_567,
        carries=IDS[:2],
    ),
    "commit": Commit(
        run_id=RUN,
        module_id=MODULE,
        round_index=1,
        parent=BASE,
        rank=0,
        proposer=ME.peer_id,
        contributions=IDS,
        leaving=IDS[2:],
        state_hash="2c" * 32,
    ),
    "close": Close(run_id=RUN, module_id=MODULE, round_index=0, author=ME.peer_id, base=BASE),
    "leaving": Leaving(
        run_id=RUN, module_id=MODULE, round_index=2**40, author=ME.peer_id, base=BASE
    ),
}
NEW_FIELDS = {"applause": [1, -33, None], "mood": "bright", "z": 0.5}
NEW_KIND = {
    "kind": "applause",
    "run_id": RUN,
    "module_id": MODULE,
    "round_index": 3,
    "author": ME.peer_id,
    "loud": True,
}


def seal(body: bytes, who: Identity = ME) -> bytes:
    """Return the envelope of a body."""
    return encode_envelope(body, who.sign(signed_bytes(body)))


def newer_body(record: Record) -> bytes:
    """Return the body that a newer minor version might give a record."""
    fields = msgspec.msgpack.decode(encode_body(record))
    return msgspec.msgpack.encode(fields | NEW_FIELDS)


def record_frames() -> dict[str, bytes]:
    frames = {f"record {kind}": seal(encode_body(record)) for kind, record in RECORDS.items()}
    frames["record contribution, newer"] = seal(newer_body(RECORDS["contribution"]))
    frames["record commit, newer"] = seal(newer_body(RECORDS["commit"]))
    frames["record of a new kind"] = seal(msgspec.msgpack.encode(NEW_KIND))
    return frames


def message_frames() -> dict[str, bytes]:
    ids = tuple(bytes.fromhex(one) for one in IDS)
    heartbeat = encode(
        Heartbeat(
            run_id=RUN,
            module_id=MODULE,
            tip=BASE,
            round_index=300,
            state_hash="2c" * 32,
            is_contributing=True,
            tokens_per_s=12345.5,
            loss=None,
            addrs=ADDRS,
        )
    )
    newer = msgspec.msgpack.encode(msgspec.msgpack.decode(heartbeat) | {"mood": [1, {"a": 2}]})
    envelopes = (seal(encode_body(RECORDS["close"])), seal(encode_body(RECORDS["leaving"])))
    return {
        "heartbeat": heartbeat,
        "heartbeat, newer": newer,
        "sync request": encode(
            SyncRequest(
                run_id=RUN,
                module_id=MODULE,
                from_height=37,
                have=ids,
                tip=BASE,
                has_closed=True,
            )
        ),
        "records request": encode(RecordsRequest(run_id=RUN, module_id=MODULE, ids=ids)),
        "push request": encode(PushRecords(run_id=RUN, module_id=MODULE, envelopes=envelopes)),
        "sync response": encode(
            SyncReply(envelopes=envelopes, has_more=True, want=ids[:1], tip=BASE)
        ),
        "sync response, empty": encode(SyncReply()),
    }


UTC_S = 1_796_047_402
"""2026-11-30 14:03:22 UTC."""


def p2p_frames() -> dict[str, bytes]:
    hello = Hello(PeerVersion(1, 0, "allmende 0.1.0"), (tag_of(RUN), tag_of("another")))
    own = [parse_address(text) for text in ADDRS]
    theirs = [parse_address(f"{text}/p2p/{OTHER.peer_id}") for text in ADDRS]
    blob_id = blob_id_of_bytes(BLOB)
    manifest = encode_manifest(len(BLOB), hashes_of_bytes(BLOB))
    return {
        "hello": encode_hello(hello),
        "hello, clock": encode_hello(
            Hello(PeerVersion(1, 1, "allmende 0.1.0"), (tag_of(RUN),), UTC_S)
        ),
        "hello, newer": encode_hello(Hello(PeerVersion(1, 7, ""), ())) + b"later",
        "request frame": encode_frame(b"what"),
        "answer OK": bytes([Status.OK]) + encode_frame(manifest),
        "answer REFUSED": encode_refusal(Status.REFUSED, "not a member of that run"),
        "answer BUSY": encode_refusal(Status.BUSY, "too many ask at once; come back"),
        "blob manifest request": encode_blob_request(BlobRequest(BlobOp.MANIFEST, blob_id, 0)),
        "blob chunk request": encode_blob_request(BlobRequest(BlobOp.CHUNK, blob_id, 258)),
        "blob manifest": manifest,
        "peers request": encode_request(tag_of(RUN), own),
        "peers response": encode_addresses(theirs),
    }


def control_frames() -> dict[str, bytes]:
    """Lines of the control socket: not on the network, but a format that programs rely on."""
    peer = PeerStatus(
        peer_id=OTHER.peer_id,
        addr=ADDRS[0],
        direction="outbound",
        rtt_ms=12.5,
        connected_s=60.0,
        round_index=3,
        tokens_per_s=None,
        state_hash="2c" * 32,
        last_heard_s=1.0,
        protocol="1.0",
        program="allmende 0.1.0",
    )
    fault = ControlFault(message="unknown verb 'fly'", hint="known: status", exit_code=2)
    return {
        "control request": encode_line(ControlRequest(verb="pause", args={"for_s": 60.0})),
        "control reply": encode_line(ControlReply(result=[peer])),
        "control fault": encode_line(ControlReply(fault=fault)),
    }


def all_frames() -> dict[str, bytes]:
    """Return every golden frame by name."""
    return {**p2p_frames(), **record_frames(), **message_frames(), **control_frames()}


def facts() -> dict[str, str]:
    """Return ids and keys that the frames hold or lead to."""
    ids = {kind: record_id_of(encode_body(record)) for kind, record in RECORDS.items()}
    return {
        "peer id of seed 01": ME.peer_id,
        "peer id of seed 02": OTHER.peer_id,
        "genesis id": BASE,
        "tag": tag_of(RUN).hex(),
        "kad key": (b"\x12\x20" + tag_of(RUN)).hex(),
        "blob id": blob_id_of_bytes(BLOB),
        **{f"id of {kind}": one for kind, one in ids.items()},
    }


if __name__ == "__main__":
    golden = {"facts": facts(), "frames": {k: v.hex() for k, v in all_frames().items()}}
    sys.stdout.write(json.dumps(golden, indent=1) + "\n")
