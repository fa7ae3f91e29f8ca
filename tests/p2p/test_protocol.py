"""PROTOCOL.md says what the source does: its numbers and vectors are compared with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11, PROTOCOL_ID_V12

from p2p import (
    blobs,
    dht,
    framing,
    gossip,
    gossip_guards,
    gossip_packing,
    gossip_router,
    guarded_yamux,
    guards,
    host_setup,
    kad_wire,
    mdns,
    members,
    peer_exchange,
    requests,
    tcp_stream,
)
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
    "gossip protocols": f"(`{gossip_packing.PACKED_PROTOCOL}`, which is packed, "
    f"`{PROTOCOL_ID_V12}`, `{PROTOCOL_ID_V11}`, to be offered in this order)",
    "packed window": f"a window of at most {1 << gossip_packing.WINDOW_BITS:,} bytes",
    "packed frame": f"MUST NOT unpack more than {host_setup.GOSSIP_RPC_BYTES:,} bytes of one frame",
    "held back": "wait {:g} to {:g} s, at random".format(*gossip_router.HOLD_BACK_S),
    "gossip bytes": f"or {gossip_guards.GOSSIP_BYTES_PER_S >> 10} KiB a second after a burst of "
    f"{gossip_guards.GOSSIP_BYTES_BURST >> 20} MiB (each frame counts "
    f"{gossip_guards.GOSSIP_FRAME_BYTES >> 10} KiB more than it has, each subscription and each "
    f"entry of the control part {gossip_guards.GOSSIP_ENTRY_BYTES >> 10} KiB)",
    "gossip passed on": f"more than {gossip_guards.GOSSIP_SENT_PER_S:g} messages a second to one "
    f"neighbour after a burst of {gossip_guards.GOSSIP_SENT_BURST:g}",
    "handshake": f"has {SwarmConfig().handshake_timeout_s:g} s, and "
    f"{tcp_stream.MAX_HANDSHAKE_BYTES:,} bytes,",
    "one address": f"more than {SwarmConfig().max_inbound_per_ip} connections at a time",
    "exchange": f"Peer exchange: `{peer_exchange.PEERS_PROTOCOL}`",
    "exchange sizes": f"at most {peer_exchange.MAX_REQUEST_BYTES:,} bytes, a response "
    f"{peer_exchange.MAX_RESPONSE_BYTES:,} bytes, and neither more than "
    f"{peer_exchange.MAX_ADDR_LINES} lines",
    "exchange sample": f"at most {members.MAX_SAMPLE} members, {members.MAX_ADDRS} addresses each, "
    f"that have asked it within the last {members.FRESH_S:,.0f} s",
    "exchange rate": f"exceeds {peer_exchange.ASKS_PER_S:g} requests a second after a burst of "
    f"{peer_exchange.ASKS_BURST:g}",
    "table": f"The table of all peers: `{kad_wire.KAD_PROTOCOL}`",
    "table sizes": f"at most {kad_wire.MAX_REQUEST_BYTES:,} bytes, its key at most "
    f"{kad_wire.MAX_KEY_BYTES}, an answer at most {kad_wire.MAX_RESPONSE_BYTES:,} bytes and "
    f"{kad_wire.MAX_PEERS} peers with {MAX_ADDRS_PER_PEER} addresses",
    "table records": f"newest {kad_wire.MAX_PEERS} of a key are kept, for {dht.RECORD_S:,.0f} s",
    "table rate": f"exceeds {dht.REQUESTS_PER_S:g} requests a second after a burst of "
    f"{dht.REQUESTS_BURST:g}, or {dht.MAX_REQUESTS_PER_STREAM} on one stream",
    "local service": f"the service type `{mdns.SERVICE}`",
    "local record": f"at most {mdns.MAX_TXT_BYTES:,} bytes of a TXT record",
    "streams": f"beyond {guards.MAX_INBOUND_STREAMS} that are answered",
    "open streams": f"more than {guards.MAX_OPEN_STREAMS:,} open streams",
    "unread": f"{guarded_yamux.MAX_UNREAD_BYTES >> 20} MiB that wait to be read",
    "ping": f"arrives for {SwarmConfig().ping_timeout_s:g} s MAY be closed",
    "addresses": f"at most {MAX_ADDRS_PER_PEER} of a peer count",
    "peer id": f"base58btc of `{_PEER_ID_PREFIX.hex(' ')}`",
    "empty vector": f"the empty blob is `{blob_id_of_bytes(b'')}`",
    "name vector": f"`allmende` are `{blob_id_of_bytes(b'allmende')}`",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_the_protocol_says_what_the_source_does(name: str) -> None:
    assert SENTENCES[name] in PROTOCOL
