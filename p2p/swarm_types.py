"""The plain values that the swarm takes and gives. Runs in: agent. Pure: no libp2p, no trio."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

PROTOCOL_MAJOR: Final = 1
"""Peers of one run whose major versions differ cannot work together (PROTOCOL.md section 9)."""
PROTOCOL_MINOR: Final = 2
"""A newer minor version adds what an older one passes over."""


class PeerVersion(NamedTuple):
    """What a peer says that it speaks and is."""

    major: int
    """1..65535."""
    minor: int
    """0..65535."""
    program: str
    """Name and version, for people; printable ASCII, at most 64 characters, and hostile."""


class Ban(NamedTuple):
    """Why a peer is refused, and until when."""

    reason: str
    """For people."""
    until_utc: float | None
    """Seconds since 1970; None: for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmConfig:
    """How this volunteer takes part in the network."""

    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Addresses to accept connections on; port 0 lets the system choose one, which is then kept.
    Empty: nobody can dial in."""
    preferred_port: int | None = None
    """The port, 1..65535, to try first where `listen` says 0: the one that was used the last time.
    When it is taken, the system chooses one."""
    bootstrap: tuple[str, ...] = ()
    """Addresses, with /p2p/, of the peers to meet first; kept connected."""
    namespace: str = ""
    """Whom to look for: those with the same namespace, such as the id of a run. Empty: nobody is
    looked for beyond `bootstrap` and those who are remembered."""
    protocol: tuple[int, int] = (PROTOCOL_MAJOR, PROTOCOL_MINOR)
    """Which version is spoken: major, minor. Another one than this program's is for tests."""
    program: str = ""
    """Name and version of this program, told to every peer."""
    mdns: bool = True
    """Whether to look for peers on the local network, and to be found there."""
    dht: bool = True
    """Whether to look for peers, and to be found, in the distributed table of all peers."""
    discover_every_s: float = 60.0
    """Seconds between two searches for peers, give or take a fifth."""
    discover_alone_every_s: float = 10.0
    """The same while nobody is connected."""
    alone_after_s: float = 60.0
    """Seconds without any peer after which everybody known is tried again, whatever failed."""
    max_connections: int = 64
    """Connections at a time, both directions together; at most three quarters of them inbound."""
    max_inbound_per_ip: int = 8
    """Inbound sockets at a time from one IPv4 address or one IPv6 /64, loopback excepted."""
    max_inbound_from_loopback: int = 256
    """Inbound sockets at a time from this machine."""
    handshake_timeout_s: float = 10.0
    """Seconds in which who dials in must have proven who it is."""
    ping_every_s: float = 5.0
    """Seconds, up to half as much more, for which a connection is silent before one of the two
    pings: 60 bytes, the answer included."""
    ping_timeout_s: float = 10.0
    """Seconds without an answer or any other byte after which a connection is dropped."""
    dial_timeout_s: float = 10.0
    """Seconds that one dial may take, handshake included."""
    redial_every_s: float = 5.0
    """Seconds between two looks at who should be connected and is not."""
    redial_at_most_every_s: float = 300.0
    """Longest pause, in seconds, before a peer that could not be reached is tried again."""
    ban_s: float = 600.0
    """How long a peer that breaks the rules is refused, in seconds, for the first time; each later
    ban lasts twice as long as the one before."""
    banned: Mapping[str, Ban] = field(default_factory=dict)
    """Peers that are refused from the start: what `Swarm.banned()` gave the last time."""
    upload_bytes_per_s: int = 0
    """Bytes a second that all connections together may send; 0: no limit. Small messages do not
    wait for it: blobs, of which nearly all bytes are, make up for them."""
    download_bytes_per_s: int = 0
    """The same for what is received."""
    allowance_bytes: int | None = None
    """How many bytes may cross the sockets before the swarm goes offline (`Swarm.allow`); None: any
    number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerView:
    """A connected peer. Where two connections are open, the one that streams are opened on."""

    peer_id: str
    """The libp2p peer id, base58, proven by the handshake."""
    addr: str
    """The other end of the socket, as an address without the peer id."""
    direction: Literal["inbound", "outbound"]
    """Who dialled: they or we."""
    connected_s: float
    """Seconds since the handshake."""
    rtt_s: float | None
    """Smoothed time of a ping and its answer, in seconds; None before the first."""
    is_relayed: bool = False
    """Whether a third peer passes on all bytes; False: the connection is direct."""
    version: PeerVersion | None = None
    """What it said that it speaks; None: it has not said hello."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockView:
    """A peer's clock, compared with ours. What it says is hostile; a median of several is not."""

    peer_id: str
    """Whose."""
    ahead_s: float
    """Seconds by which it is ahead of our clock as that is now; negative: behind."""
    error_s: float
    """By how much that may be wrong at most: the way there and back, and the whole seconds that
    are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadView:
    """A blob on its way."""

    blob_id: str
    """Which."""
    size_bytes: int | None
    """Its length; None until somebody has told it."""
    held_bytes: int
    """What is on this disk and checked."""
    bytes_per_s: float
    """What has come lately, in bytes a second."""
    num_peers: int
    """Peers that are giving it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmStatistics:
    """What the swarm has done since it was opened."""

    sent_bytes_by_purpose: Mapping[str, int]
    """Payload bytes handed to streams, by the purpose that the caller named."""
    received_bytes_by_purpose: Mapping[str, int]
    """Payload bytes taken from streams, by purpose."""
    wire_sent_bytes: int
    """Bytes written to sockets: the payload, and what the protocols add."""
    wire_received_bytes: int
    """Bytes read from sockets."""
    num_peers: int
    """Peers connected now."""
    num_connections: int
    """Connections open now; a peer may have two after both dialled at once."""
    num_known_peers: int
    """Peers of whom an address is known."""
    host_restarts: int
    """How often the network layer died and was started again."""
    dropped_messages: int
    """Gossiped messages lost here: queues were full, or a neighbour sent too many."""
    refused_messages: int
    """Gossiped messages that were too large or that `accept` refused."""
    failed_handlers: int
    """Callbacks of the caller that raised; the stream was reset or the message skipped."""
    refused_requests: int
    """Requests from peers that were refused or malformed."""
    bad_chunks: int
    """Blob chunks and manifests from peers that did not match their hash."""
    dropped_peers: int
    """Connections that were lost, whatever the reason."""
    misdeeds: int
    """Times that a peer broke a rule of the network."""
    num_banned: int
    """Peers refused now."""
    found_peers_by_way: Mapping[str, int]
    """New peers or addresses heard of, by the way of hearing: mdns, dht, exchange."""
    dialled_us_by_scope: Mapping[str, int]
    """Connections that peers opened to us, by where they came from: global, private (this network),
    loopback (this machine)."""


@dataclass(slots=True)
class Tally:
    """The counters behind SwarmStatistics; one object, shared by the parts of one swarm."""

    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    host_restarts: int = 0
    dropped_messages: int = 0
    refused_messages: int = 0
    failed_handlers: int = 0
    refused_requests: int = 0
    bad_chunks: int = 0
    dropped_peers: int = 0
    misdeeds: int = 0
    found: Counter[str] = field(default_factory=Counter)
    dialled_us: Counter[str] = field(default_factory=Counter)

    def statistics(
        self,
        *,
        wire_bytes: tuple[int, int],
        num_peers: int,
        num_connections: int,
        num_known_peers: int,
        num_dropped_now: int,
        num_banned: int,
    ) -> SwarmStatistics:
        """Put the counters together with what is so now (fields: SwarmStatistics).

        Args:
            wire_bytes: Written to and read from all sockets that there were.
            num_peers: Connected.
            num_connections: Open.
            num_known_peers: With an address.
            num_dropped_now: Gossiped messages that the present host has lost.
            num_banned: Refused.
        """
        return SwarmStatistics(
            sent_bytes_by_purpose=dict(self.sent),
            received_bytes_by_purpose=dict(self.received),
            wire_sent_bytes=wire_bytes[0],
            wire_received_bytes=wire_bytes[1],
            num_peers=num_peers,
            num_connections=num_connections,
            num_known_peers=num_known_peers,
            host_restarts=self.host_restarts,
            dropped_messages=self.dropped_messages + num_dropped_now,
            refused_messages=self.refused_messages,
            failed_handlers=self.failed_handlers,
            refused_requests=self.refused_requests,
            bad_chunks=self.bad_chunks,
            dropped_peers=self.dropped_peers,
            misdeeds=self.misdeeds,
            num_banned=num_banned,
            found_peers_by_way=dict(self.found),
            dialled_us_by_scope=dict(self.dialled_us),
        )
