"""Finding peers on the local network by multicast DNS. Runs in: agent, in a thread of its own.

libp2p's own mDNS blocks the event loop for more than a second, advertises 0.0.0.0 where it listens
there, and follows up every announcement with retries and sleeps (LIBP2P.md, fault 10). This uses
the same `zeroconf` library, which libp2p imports anyway, and keeps it away from the event loop: one
thread starts it, waits and closes it, and what it hears is handed over.

The service is `_allmende._udp.local.`; its TXT record holds `dnsaddr=` entries as libp2p's mDNS
specification has them (one for each address); the instance is named by a hash of the namespace and
a random number. Only IPv4 multicast is used; IPv6 addresses are announced in it.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVarTuple

import trio
from zeroconf import (
    DNSQuestionType,
    IPVersion,
    ServiceBrowser,
    ServiceInfo,
    ServiceListener,
    Zeroconf,
)
from zeroconf import Error as ZeroconfError

from p2p.address_scope import Scope, scope_of
from p2p.addresses import MAX_ADDRS_PER_PEER, Address, parse_peer_address
from p2p.errors import AddressError
from p2p.token_buckets import TokenBuckets

SERVICE: Final = "_allmende._udp.local."
TXT_KEY: Final = b"dnsaddr="
MAX_TXT_BYTES: Final = 4 << 10
MAX_INSTANCES: Final = 256
EVENTS_PER_S: Final = 10.0  # of the whole local network
EVENTS_BURST: Final = 200.0
LOOK_AT_INTERFACES_EVERY_S: Final = 5.0
RETRY_EVERY_S: Final = 60.0
GOODBYE_S: Final = 1.5  # to tell the network that we leave
MDNS_PORT: Final = 5353
LOOKUPS_PER_S: Final = 0.2
LOOKUPS_BURST: Final = 5.0
LOOKUP_MS: Final = 500  # for a record that did not come with the announcement

_log = logging.getLogger("p2p.mdns")

Args = TypeVarTuple("Args")
Found = Callable[[str, Sequence[Address]], None]


def encode_txt(addresses: Sequence[Address]) -> bytes:
    """Encode a TXT record: each entry has its length, 1 byte, before it."""
    entries = [TXT_KEY + str(address).encode("ascii") for address in addresses]
    return b"".join(bytes([len(entry)]) + entry for entry in entries if len(entry) < 256)


def parse_txt(text: bytes) -> tuple[str, list[Address]] | None:
    """Read a TXT record: the peer and its addresses, or None where it names none, or several."""
    found: list[Address] = []
    start = 0
    text = text[:MAX_TXT_BYTES]
    while start < len(text) and len(found) < MAX_ADDRS_PER_PEER:
        entry = text[start + 1 : start + 1 + text[start]]
        start += 1 + text[start]
        if entry.startswith(TXT_KEY):
            with contextlib.suppress(AddressError, UnicodeDecodeError):
                found.append(parse_peer_address(entry[len(TXT_KEY) :].decode("ascii")))
    peers = {address.peer_id for address in found}
    peer_id = found[0].peer_id if len(peers) == 1 else None
    return None if peer_id is None else (peer_id, found)


def announced(addresses: Sequence[Address]) -> list[Address]:
    """Pick what is announced: without loopback addresses, unless there are no others."""
    outside = [one for one in addresses if scope_of(one.host) is not Scope.LOOPBACK]
    return (outside or list(addresses))[:MAX_ADDRS_PER_PEER]


class LocalPeers:
    """The peers that the local network has announced, bounded in number. In the event loop."""

    def __init__(self, own_peer_id: str) -> None:
        self._own_peer_id = own_peer_id
        self._known: OrderedDict[str, tuple[str, list[Address]]] = OrderedDict()

    def take(self, instance: str, text: bytes) -> tuple[str, list[Address]] | None:
        """Note an instance's TXT record; gives the peer and its addresses."""
        parsed = parse_txt(text)
        if parsed is None or parsed[0] == self._own_peer_id:
            return None
        self._known[instance] = parsed
        self._known.move_to_end(instance)
        if len(self._known) > MAX_INSTANCES:
            self._known.popitem(last=False)
        return parsed

    def remove(self, instance: str) -> None:
        """Note that an instance has said goodbye."""
        self._known.pop(instance, None)

    def known(self) -> list[tuple[str, list[Address]]]:
        """List the peers that are announced now."""
        return list(self._known.values())


class _Lookup(ServiceInfo):
    """What is known of an instance, and asked for."""

    _asking: Coroutine[Any, Any, bool] | None = None

    def async_request(
        self,
        zc: Zeroconf,
        timeout: float,
        question_type: DNSQuestionType | None = None,
        addr: str | None = None,
        port: int = MDNS_PORT,
    ) -> Coroutine[Any, Any, bool]:
        """Ask, and remember how."""
        self._asking = super().async_request(zc, timeout, question_type, addr, port)
        return self._asking

    def give_up(self) -> None:
        """End a question that zeroconf's loop, which has ended, will never come to.

        Python would complain of it whenever it is found to be garbage.
        """
        if self._asking is not None:
            self._asking.close()


@dataclass(frozen=True, slots=True)
class _SessionEvents:
    """Whom a session tells, from its threads."""

    heard: Callable[[str, bytes], None]
    """An instance has this TXT record."""
    lost: Callable[[str], None]
    """An instance said goodbye, or was not heard for its time to live."""
    failed: Callable[[str], None]
    """Multicast cannot be used, for this reason."""
    ended: Callable[[], None]
    """The thread has ended."""


class _Session(ServiceListener):
    """One use of zeroconf, on the interfaces that there are; everything here runs in threads."""

    def __init__(
        self, name: str, prefix: str, addresses: Sequence[Address], events: _SessionEvents
    ) -> None:
        self._name = name
        self._prefix = prefix
        self._addresses = addresses
        self._tell = events
        self._is_over = threading.Event()
        self._events = TokenBuckets(per_s=EVENTS_PER_S, burst=EVENTS_BURST)
        self._lookups = TokenBuckets(per_s=LOOKUPS_PER_S, burst=LOOKUPS_BURST)

    def start(self) -> None:
        """Start the thread; a daemon, so that nothing the network does can hold up our end."""
        threading.Thread(target=self._run, name="allmende-mdns", daemon=True).start()

    def stop(self) -> None:
        """Have the thread say goodbye and end."""
        self._is_over.set()

    def _run(self) -> None:
        hosts = [one.host for one in self._addresses if one.family == "ip4"]
        try:
            zeroconf = Zeroconf(interfaces=list(dict.fromkeys(hosts)), ip_version=IPVersion.V4Only)
            try:
                # The name is random: there is nobody to ask whether it is taken.
                zeroconf.register_service(self._service(), cooperating_responders=True)
                # QM: several programs share the port; answers to one of them would reach another.
                ServiceBrowser(zeroconf, SERVICE, listener=self, question_type=DNSQuestionType.QM)
                self._is_over.wait()
            finally:
                zeroconf.close()
        except (OSError, ZeroconfError, ValueError, RuntimeError) as error:
            self._tell.failed(f"{type(error).__name__}: {error}")
        finally:
            self._tell.ended()

    def _service(self) -> ServiceInfo:
        return ServiceInfo(
            SERVICE,
            f"{self._name}.{SERVICE}",
            port=self._addresses[0].port,
            parsed_addresses=[address.host for address in self._addresses],
            properties=encode_txt(self._addresses),
            server=f"{self._name}.local.",
        )

    def add_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        """Take an instance that zeroconf has heard of, unless it is one too many."""
        if not name.startswith(self._prefix) or self._events.take("", time.monotonic()):
            return
        service = _Lookup(type_, name)
        service.load_from_cache(zc)
        if not service.text and not self._lookups.take("", time.monotonic()):
            try:
                service.request(zc, LOOKUP_MS, question_type=DNSQuestionType.QM)
            except (AssertionError, ZeroconfError):  # so it says that it is being closed
                service.give_up()
                if not self._is_over.is_set():
                    raise
        if service.text:
            self._tell.heard(name, service.text[:MAX_TXT_BYTES])

    update_service = add_service

    def remove_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        """Forget an instance."""
        if name.startswith(self._prefix):
            self._tell.lost(name)


class Mdns:
    """Announces us on the local network and hears of others."""

    def __init__(
        self,
        tag: bytes,
        own_peer_id: str,
        own_addresses: Callable[[], Sequence[Address]],
        found: Found,
    ) -> None:
        """Look for those of one namespace.

        Args:
            tag: What stands for the namespace.
            own_peer_id: Who we are.
            own_addresses: Where we listen now; for wildcards, what the interfaces have.
            found: Called in the event loop with a peer and its addresses; hearsay.
        """
        self._prefix = tag[:4].hex() + "-"
        self._name = self._prefix + secrets.token_hex(8)
        self._peers = LocalPeers(own_peer_id)
        self._own_addresses = own_addresses
        self._found = found
        self._has_complained = False

    def look_again(self) -> None:
        """Report again whom the local network has announced."""
        for peer_id, addresses in self._peers.known():
            self._found(peer_id, addresses)

    async def run(self) -> None:
        """Announce and listen until cancelled, anew whenever our addresses change."""
        while True:
            addresses = announced(self._own_addresses())
            is_over = trio.Event()
            if any(address.family == "ip4" for address in addresses):
                async with self._session(addresses, is_over):
                    await self._wait_changed(addresses, is_over)
            else:
                await self._wait_changed(addresses, is_over)
            if is_over.is_set():  # it failed: try again later, or when something has changed
                with trio.move_on_after(RETRY_EVERY_S):
                    await self._wait_changed(addresses, trio.Event())

    @contextlib.asynccontextmanager
    async def _session(
        self, addresses: Sequence[Address], is_over: trio.Event
    ) -> AsyncIterator[None]:
        token = trio.lowlevel.current_trio_token()

        def in_loop(call: Callable[[*Args], None]) -> Callable[[*Args], None]:
            def tell(*args: *Args) -> None:
                with contextlib.suppress(trio.RunFinishedError):
                    token.run_sync_soon(call, *args)

            return tell

        events = _SessionEvents(
            heard=in_loop(self._heard),
            lost=in_loop(self._peers.remove),
            failed=in_loop(self._complain),
            ended=in_loop(is_over.set),
        )
        session = _Session(self._name, self._prefix, addresses, events)
        session.start()
        try:
            yield
        finally:
            session.stop()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + GOODBYE_S):
                await is_over.wait()

    async def _wait_changed(self, addresses: Sequence[Address], is_over: trio.Event) -> None:
        """Wait until our addresses are others, or the session is over."""
        while not is_over.is_set() and announced(self._own_addresses()) == addresses:
            with trio.move_on_after(LOOK_AT_INTERFACES_EVERY_S):
                await is_over.wait()

    def _heard(self, instance: str, text: bytes) -> None:
        taken = self._peers.take(instance, text)
        if taken is not None:
            self._found(*taken)

    def _complain(self, reason: str) -> None:
        level = logging.DEBUG if self._has_complained else logging.WARNING
        self._has_complained = True
        _log.log(level, "the local network is not searched for peers: %s", reason)
