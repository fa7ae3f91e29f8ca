"""PROTOCOL.md says what the source does: its numbers and vectors are compared with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11, PROTOCOL_ID_V12

from p2p import blobs, framing, gossip, gossip_guards, guards, requests
from p2p.addresses import MAX_ADDRS_PER_PEER
from p2p.blobstore import CHUNK_BYTES, MAX_BLOB_BYTES, blob_id_of_bytes
from p2p.identity import _PEER_ID_PREFIX
from p2p.swarm_types import SwarmConfig

PROTOCOL = re.sub(
    r"\s+", " ", (Path(__file__).parents[2] / "p2p" / "PROTOCOL.md").read_text(encoding="utf-8")
)

SENTENCES = {
    "chunk": f"chunks of {CHUNK_BYTES:,} bytes",
    "largest blob": f"at most {MAX_BLOB_BYTES:,} bytes (16 GiB)",
    "blob protocol": f"Blobs: `{blobs.BLOB_PROTOCOL}`",
    "blob request": f"requests of {framing.BLOB_REQUEST_BYTES} bytes",
    "operations": f"{framing.BlobOp.MANIFEST:d} MANIFEST, {framing.BlobOp.CHUNK:d} CHUNK",
    "status": ", ".join(f"{status:d} {status.name}" for status in framing.Status),
    "reason": f"at most {framing.MAX_REASON_BYTES} bytes of UTF-8",
    "busy": f"BUSY to a request that waited for {blobs.BUSY_AFTER_S:g} s",
    "stall": f"the client after {blobs.STALL_S:g} s, the server after {blobs.IDLE_DEADLINE_S:g} s",
    "request": f"a request has at most {requests.MAX_REQUEST_BYTES >> 20} MiB",
    "gossip": f"A payload has at most {gossip.MAX_MESSAGE_BYTES:,} bytes",
    "topic": f"at most {gossip_guards.MAX_TOPIC_CHARS} characters",
    "gossip rate": f"exceeds {gossip_guards.GOSSIP_PER_FORWARDER_S:g} a second",
    "gossip burst": f"after a burst of {gossip_guards.GOSSIP_BURST:g}",
    "gossip protocols": f"(`{PROTOCOL_ID_V12}`, `{PROTOCOL_ID_V11}`)",
    "streams": f"beyond {guards.MAX_INBOUND_STREAMS} that are answered",
    "open streams": f"beyond {guards.MAX_OPEN_STREAMS:,} open streams",
    "unread": f"{guards.MAX_UNREAD_BYTES >> 20} MiB that wait to be read",
    "ping": f"arrives for {SwarmConfig().ping_timeout_s:g} s MAY be closed",
    "addresses": f"at most {MAX_ADDRS_PER_PEER} of a peer count",
    "peer id": f"base58btc of `{_PEER_ID_PREFIX.hex(' ')}`",
    "empty vector": f"the empty blob is `{blob_id_of_bytes(b'')}`",
    "name vector": f"`allmende` are `{blob_id_of_bytes(b'allmende')}`",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_the_protocol_says_what_the_source_does(name: str) -> None:
    assert SENTENCES[name] in PROTOCOL
