"""Keeping a host up: one after another, on the same ports, whatever happens. Runs in: agent.

When something in libp2p raises all the same (LIBP2P.md, fault 11), the host ends, and after a pause
that doubles the next one takes its place; callers see peers lost and found again, nothing else.
Where no byte may go any more, the host ends as well, and the next one comes when some may.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

import trio

from p2p.addresses import Address, expand_wildcard
from p2p.allowance import Allowance
from p2p.contain import contain
from p2p.errors import first_own_error
from p2p.host import Host, HostEvents, open_host
from p2p.identity import Identity
from p2p.swarm_types import SwarmConfig, Tally

if TYPE_CHECKING:
    from trio_typing import TaskStatus

RESTART_PAUSE_S: Final = 0.5  # before the host is started again; doubles
MAX_RESTART_PAUSE_S: Final = 30.0
HEALTHY_S: Final = 60.0  # a host that lived so long starts counting anew

Attach = Callable[[Host, trio.Nursery], Awaitable[None]]


class HostKeeper:
    """Runs one host after another."""

    def __init__(
        self,
        identity: Identity,
        config: SwarmConfig,
        listen: Sequence[Address],
        tally: Tally,
        allowance: Allowance,
    ) -> None:
        self._identity = identity
        self._allowance = allowance
        self._config = config
        self._wanted = tuple(listen)
        self._tally = tally
        self.host: Host | None = None
        """The host that is up; None in between."""
        self.listen = tuple(listen)
        """Where the last host listened, with real ports."""
        self._own_peer_id = identity.peer_id

    def addresses(self) -> list[Address]:
        """List where we listen, with /p2p/; for wildcards, what the interfaces have now."""
        if not self._allowance.is_open:
            return []
        return [
            Address(address.family, address.host, address.port, self._own_peer_id)
            for bound in self.listen
            for address in expand_wildcard(bound)
        ]

    async def run(
        self,
        events: HostEvents,
        attach: Attach,
        when_down: Callable[[], None],
        *,
        task_status: TaskStatus[None],
    ) -> None:
        """Run hosts until cancelled.

        Args:
            events: Whom the hosts tell about connections.
            attach: Called with each new host and a nursery that ends with it.
            when_down: Called when a host has ended.
            task_status: Told when the first host is up.

        Raises:
            P2PError: The first host could not be started.
        """
        was_up = False
        pause_s = RESTART_PAUSE_S

        def when_up() -> None:
            nonlocal was_up
            if not was_up:
                task_status.started()
            was_up = True

        if not self._allowance.is_open:
            when_up()  # nobody waits for a host that may not be
        while True:
            await self._allowance.wait_open()
            started_at = trio.current_time()
            with contain(
                "host", level=logging.ERROR if was_up else logging.DEBUG, is_quiet=False
            ) as outcome:
                await self._run_one(events, attach, when_up, when_down)
            if outcome.error is None:
                continue  # no byte may go any more
            if not was_up:
                raise first_own_error(outcome.error)
            self._tally.host_restarts += 1
            if trio.current_time() - started_at > HEALTHY_S:
                pause_s = RESTART_PAUSE_S
            await trio.sleep(pause_s)  # noqa: TID251 -- backoff
            pause_s = min(pause_s * 2, MAX_RESTART_PAUSE_S)

    async def _run_one(
        self,
        events: HostEvents,
        attach: Attach,
        when_up: Callable[[], None],
        when_down: Callable[[], None],
    ) -> None:
        """Run a host until it dies, or may no longer send and receive."""
        try:
            async with (
                open_host(
                    self._identity, self._config, self._choices(), events, self._tally
                ) as host,
                trio.open_nursery() as nursery,
            ):
                self.listen = host.listening_on()
                self.host = host
                await attach(host, nursery)
                when_up()
                await self._allowance.wait_closed()
                nursery.cancel_scope.cancel()
        finally:
            self.host = None
            when_down()

    def _choices(self) -> list[list[Address]]:
        """Say where to listen: for each address, what is to be tried, in order."""
        last_ports = {(one.family, one.host): one.port for one in self.listen if one.port}
        choices = []
        for wanted in self._wanted:
            ports = [wanted.port]
            if wanted.port == 0:
                preferred = last_ports.get((wanted.family, wanted.host))
                ports = [
                    port for port in (preferred, self._config.preferred_port) if port is not None
                ] + [0]
            choices.append(
                [Address(wanted.family, wanted.host, port, None) for port in dict.fromkeys(ports)]
            )
        return choices
