"""Who speaks which version of the protocol. Runs in: agent. PROTOCOL.md section 9.

Two peers that have just connected say hello to each other: protocol version, program, namespaces,
and what their clocks show.
Those of one namespace whose major versions differ cannot work together. Both are told so, in words
and by this same exchange, whose form no later version changes; then the connection is closed, so
that strangers to each other do not take each other's room. Nobody is banned for it.
"""

from __future__ import annotations

import logging
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import trio

from p2p.clocks import Clocks
from p2p.conduct import Misdeed
from p2p.contain import contain
from p2p.errors import FramingError, P2PError, RequestRefusedError
from p2p.host import Host
from p2p.identity import is_peer_id
from p2p.peer_exchange import TAG_BYTES, tag_of
from p2p.requests import Requests
from p2p.swarm_types import PeerVersion, SwarmConfig
from p2p.token_buckets import TokenBuckets

HELLO_PROTOCOL: Final = "/allmende/hello/1"
MAX_HELLO_BYTES: Final = 1024
MAX_PROGRAM_CHARS: Final = 64
MAX_TAGS: Final = 16
HELLO_TIMEOUT_S: Final = 10.0
HELLOS_PER_S: Final = 0.2
HELLOS_BURST: Final = 10.0
MAX_KNOWN: Final = 1024  # peer ids cost nothing
TELL_FOR_S: Final = 3600.0  # how long one that was heard is counted among those who differ
DIAL_AGAIN_S: Final = 600.0  # by then it may have been updated
ASK_AGAIN_S: Final = 30.0  # for its clock; far below what it lets us say
WARNINGS_PER_S: Final = 0.1
WARNINGS_BURST: Final = 10.0
PURPOSE: Final = "discovery"

_VERSION: Final = struct.Struct(">HH")
_CLOCK: Final = struct.Struct(">Q")
_log = logging.getLogger("p2p.hello")


@dataclass(frozen=True, slots=True)
class Hello:
    """What a peer says of itself."""

    version: PeerVersion
    tags: tuple[bytes, ...]
    """What it belongs to, 32 bytes each (`tag_of`)."""
    utc_s: int | None = None
    """What its clock shows: whole seconds since 1970, 0..2^64-1; None: it does not say."""


def encode_hello(hello: Hello) -> bytes:
    """Encode a hello; a long program name is cut."""
    program = hello.version.program.encode("ascii", errors="replace")[:MAX_PROGRAM_CHARS]
    tags = hello.tags[:MAX_TAGS]
    return b"".join(
        (
            _VERSION.pack(hello.version.major, hello.version.minor),
            bytes([len(program)]),
            program,
            bytes([len(tags)]),
            *tags,
            b"" if hello.utc_s is None else _CLOCK.pack(hello.utc_s),
        )
    )


def parse_hello(data: bytes) -> Hello:
    """Read a hello; what follows the clock is a later version's, and is passed over.

    Raises:
        FramingError: It is none.
    """
    if not _VERSION.size < len(data) <= MAX_HELLO_BYTES:
        raise FramingError(f"a hello of {len(data)} bytes")
    major, minor = _VERSION.unpack_from(data)
    program_end = _VERSION.size + 1 + data[_VERSION.size]
    program = data[_VERSION.size + 1 : program_end]
    if major == 0 or len(program) > MAX_PROGRAM_CHARS or program_end >= len(data):
        raise FramingError("a hello whose version or program is none")
    if any(not 0x20 <= letter <= 0x7E for letter in program):
        raise FramingError("a hello whose program is no printable ASCII")
    num_tags = data[program_end]
    starts = range(program_end + 1, program_end + 1 + num_tags * TAG_BYTES, TAG_BYTES)
    if num_tags > MAX_TAGS or starts.stop > len(data):
        raise FramingError(f"a hello with {num_tags} tags in {len(data)} bytes")
    tags = tuple(data[start : start + TAG_BYTES] for start in starts)
    has_clock = len(data) >= starts.stop + _CLOCK.size
    utc_s = _CLOCK.unpack_from(data, starts.stop)[0] if has_clock else None
    return Hello(PeerVersion(major, minor, program.decode("ascii")), tags, utc_s)


def say_difference(theirs: PeerVersion, ours: PeerVersion) -> str:
    """Say that two major versions differ, and who has to be updated."""
    name = f" ({theirs.program})" if theirs.program else ""
    what_to_do = "update this program" if theirs.major > ours.major else "it has to be updated"
    return f"it speaks protocol {theirs.major}{name}, this is {ours.major}: {what_to_do}"


@dataclass(frozen=True, slots=True)
class _Heard:
    hello: Hello
    at_s: float


class Hellos:
    """Says hello, and knows who said what."""

    def __init__(
        self,
        config: SwarmConfig,
        *,
        requests: Requests,
        drop: Callable[[str], None],
        note_misdeed: Callable[[str, Misdeed], None],
        clocks: Clocks | None = None,
    ) -> None:
        """Say hello to everybody.

        Args:
            config: Which version and namespace we have.
            requests: What carries the hellos.
            drop: Closes the connections to a peer, and holds nothing against it.
            note_misdeed: Told of who breaks the rules.
            clocks: Told what the peers' clocks show; None: made here.
        """
        self.clocks = clocks or Clocks()
        self._own = Hello(
            PeerVersion(*config.protocol, config.program),
            (tag_of(config.namespace),) if config.namespace else (),
        )
        self._requests = requests
        self._drop = drop
        self._note_misdeed = note_misdeed
        self._asks = TokenBuckets(per_s=HELLOS_PER_S, burst=HELLOS_BURST)
        self._warnings = TokenBuckets(per_s=WARNINGS_PER_S, burst=WARNINGS_BURST)
        self._heard: OrderedDict[str, _Heard] = OrderedDict()
        self._asked_at_s: OrderedDict[str, float] = OrderedDict()
        self._host: Host | None = None
        self._nursery: trio.Nursery | None = None
        requests.serve(
            None,
            HELLO_PROTOCOL,
            self._respond,
            max_request_bytes=MAX_HELLO_BYTES,
            purpose=PURPOSE,
        )

    def attach(self, host: Host, nursery: trio.Nursery) -> None:
        """Use a new host, with tasks in `nursery`, which ends with it."""
        self._host, self._nursery = host, nursery

    def detach(self) -> None:
        """Note that the host is gone."""
        self._host = self._nursery = None

    def on_connected(self, peer_id: str) -> None:
        """Say hello to a new neighbour."""
        if self._nursery is not None:
            self._nursery.start_soon(self._ask, peer_id)

    async def ask_clocks(self, peer_ids: Iterable[str]) -> None:
        """Say hello again to those who were not asked just now; returns when all have answered."""
        asked_since_s = trio.current_time() - ASK_AGAIN_S
        async with trio.open_nursery() as nursery:
            for peer_id in peer_ids:
                # Also those who answered without a clock: again and again would be a misdeed.
                if self._asked_at_s.get(peer_id, -math.inf) < asked_since_s:
                    nursery.start_soon(self._ask, peer_id)

    # -- what is known

    def version_of(self, peer_id: str) -> PeerVersion | None:
        """Give what a peer said last; None: it has not said hello."""
        heard = self._heard.get(peer_id)
        return None if heard is None else heard.hello.version

    def differing(self) -> Mapping[str, PeerVersion]:
        """List who of our namespace was heard within the hour and cannot work with us."""
        oldest = trio.current_time() - TELL_FOR_S
        return {
            peer_id: heard.hello.version
            for peer_id, heard in self._heard.items()
            if heard.at_s >= oldest and self._differs(heard.hello)
        }

    def is_passed_over(self, peer_id: str) -> bool:
        """Tell whether to leave a peer undialled for now: it could not work with us just then."""
        heard = self._heard.get(peer_id)
        is_recent = heard is not None and heard.at_s >= trio.current_time() - DIAL_AGAIN_S
        return is_recent and heard is not None and self._differs(heard.hello)

    def verify_speaks(self, peer_id: str) -> None:
        """Check that a peer is not known to speak another major version.

        Raises:
            RequestRefusedError: It does; the text says what to do.
        """
        if peer_id in self._heard and self._differs(self._heard[peer_id].hello):
            difference = say_difference(self._heard[peer_id].hello.version, self._own.version)
            raise RequestRefusedError(f"peer {peer_id}: {difference}")

    def _differs(self, hello: Hello) -> bool:
        """Tell whether one of our namespace has another major version; others do not matter."""
        is_ours = not self._own.tags or not set(self._own.tags).isdisjoint(hello.tags)
        return is_ours and hello.version.major != self._own.version.major

    # -- what is said

    async def _ask(self, peer_id: str) -> None:
        host = self._host
        if host is None:
            return
        with contain("hello", peer_id=peer_id):
            asked_at_s = trio.current_time()
            try:
                answer = await self._requests.request(
                    host,
                    peer_id,
                    HELLO_PROTOCOL,
                    self._say(),
                    timeout_s=HELLO_TIMEOUT_S,
                    max_response_bytes=MAX_HELLO_BYTES,
                    purpose=PURPOSE,
                )
                hello = parse_hello(answer)
                self._note(peer_id, hello)
                if hello.utc_s is not None:
                    self.clocks.note(peer_id, hello.utc_s, asked_at_s, trio.current_time())
            except P2PError as error:
                _log.debug("peer=%s said no hello: %s", peer_id, error)
            self._asked_at_s.pop(peer_id, None)
            self._asked_at_s[peer_id] = trio.current_time()
            if len(self._asked_at_s) > MAX_KNOWN:
                self._asked_at_s.popitem(last=False)
            # Only now: it has heard from us as well, whatever it answered.
            if self.is_passed_over(peer_id):
                self._drop(peer_id)

    async def _respond(self, peer_id: str, request: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        if self._asks.take(peer_id, trio.current_time()):
            self._note_misdeed(peer_id, Misdeed.TOO_OFTEN)
            raise RequestRefusedError("you say hello too often")
        self._note(peer_id, parse_hello(request))
        return self._say()

    def _say(self) -> bytes:
        return encode_hello(replace(self._own, utc_s=self.clocks.own_utc_s()))

    def _note(self, peer_id: str, hello: Hello) -> None:
        assert is_peer_id(peer_id), "Invariant: the handshake proves peer ids"
        hello = replace(hello, utc_s=None)  # self.clocks has it
        before = self._heard.pop(peer_id, None)
        self._heard[peer_id] = _Heard(hello, trio.current_time())
        if len(self._heard) > MAX_KNOWN:
            self._heard.popitem(last=False)
        if self._differs(hello) and (before is None or before.hello != hello):
            self._warn(peer_id, hello.version)

    def _warn(self, peer_id: str, version: PeerVersion) -> None:
        is_loud = self._warnings.take("", trio.current_time()) == 0.0
        _log.log(
            logging.WARNING if is_loud else logging.DEBUG,
            "peer=%s cannot work with us: %s",
            peer_id,
            say_difference(version, self._own.version),
        )
