"""Which inbound sockets may stay. Runs in: agent. Pure.

A socket is half open until its other end has proven who it is. Half-open ones have places of their
own, so that silent strangers take none from those who are through; when these are all taken, the
address that holds most of them loses its oldest.

Strangers have no name to be banned by; what they do is logged seldom.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from p2p.seldom import SeldomLog

MAX_HALF_OPEN: Final = 64
TOO_MANY: Final = "it holds as many connections as one address may"
NOT_LET_IN: Final = "it connected and was not let in: silent, no peer, or a refused one"

_log = logging.getLogger("p2p.admission")


class Ticket:
    """One admitted socket."""

    __slots__ = ("abort", "is_gone", "is_open", "source")

    def __init__(self, source: str, abort: Callable[[], None]) -> None:
        self.source = source
        self.abort = abort
        self.is_open = False
        self.is_gone = False


class Admission:
    """The inbound sockets of one host."""

    def __init__(
        self,
        *,
        max_open: int,
        max_per_ip: int,
        max_from_loopback: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_open = max_open
        self._max_per_ip = max_per_ip
        self._max_from_loopback = max_from_loopback
        self._num_of_source: Counter[str] = Counter()
        self._half_open: dict[Ticket, None] = {}
        self._num_open = 0
        self._seldom = SeldomLog(_log, clock)

    @property
    def num_half_open(self) -> int:
        """Sockets whose other end has not proven who it is."""
        return len(self._half_open)

    @property
    def num_open(self) -> int:
        """Inbound connections."""
        return self._num_open

    def enter(self, host: str, abort: Callable[[], None]) -> Ticket | None:
        """Admit a socket from `host`, which `abort` closes; None where it has too many."""
        source, is_loopback = _source_of(host)
        limit = self._max_from_loopback if is_loopback else self._max_per_ip
        if self._num_of_source[source] >= limit:
            self._seldom.note(f"address={source}", TOO_MANY)
            return None
        if len(self._half_open) >= MAX_HALF_OPEN:
            self._drop_one_half_open()
        ticket = Ticket(source, abort)
        self._num_of_source[source] += 1
        self._half_open[ticket] = None
        return ticket

    def open(self, ticket: Ticket) -> bool:
        """Note that its other end has proven who it is; False where no place is left for it."""
        if ticket.is_gone or self._num_open >= self._max_open:
            return False
        del self._half_open[ticket]
        ticket.is_open = True
        self._num_open += 1
        return True

    def leave(self, ticket: Ticket) -> None:
        """Note that a socket is closed; doing so twice is harmless."""
        if ticket.is_gone:
            return
        ticket.is_gone = True
        if not ticket.is_open:
            self._seldom.note(f"address={ticket.source}", NOT_LET_IN)
        self._num_open -= ticket.is_open
        self._half_open.pop(ticket, None)
        self._num_of_source[ticket.source] -= 1
        if not self._num_of_source[ticket.source]:
            del self._num_of_source[ticket.source]

    def _drop_one_half_open(self) -> None:
        counts = Counter(ticket.source for ticket in self._half_open)
        ((greediest, _),) = counts.most_common(1)
        oldest = next(ticket for ticket in self._half_open if ticket.source == greediest)
        self.leave(oldest)
        oldest.abort()


def _source_of(host: str) -> tuple[str, bool]:
    """Name whom an address belongs to: itself, or for IPv6 its /64, which one customer owns."""
    ip = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if isinstance(ip, ipaddress.IPv6Address) and not ip.is_loopback:
        return str(ipaddress.ip_network((ip, 64), strict=False)), False
    return str(ip), ip.is_loopback
