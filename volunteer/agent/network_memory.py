"""The port and the bans of the last time, kept over a restart.

Runs in: agent. A small JSON file, replaced atomically. The same port again lets peers find us where
they remember us; a ban that a restart would lift is none. A damaged file is written anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import trio

from p2p.swarm_types import Ban
from volunteer.errors import StorageFullError
from volunteer.files import replace_file

log = logging.getLogger(__name__)
MAX_BANS = 1024
MAX_FILE_BYTES = 1024 * 1024
SAVE_EVERY_S = 5.0


class _KeptBan(msgspec.Struct, frozen=True, kw_only=True):
    reason: Annotated[str, msgspec.Meta(max_length=300)]
    until_utc: float | None


class NetworkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What `network.json` holds."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    bans: dict[str, _KeptBan] = msgspec.field(default_factory=dict)


_decoder = msgspec.json.Decoder(NetworkFacts)


def read_network_facts(file: Path) -> NetworkFacts:
    """Return what was kept; nothing where the file is absent or damaged."""
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise msgspec.ValidationError(f"larger than {MAX_FILE_BYTES} bytes")
        return _decoder.decode(data)
    except FileNotFoundError:
        return NetworkFacts()
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        log.warning("%s is not readable and will be written anew: %s", file, error)
        return NetworkFacts()


def bans_of(facts: NetworkFacts) -> dict[str, Ban]:
    """Return the bans as the swarm takes them."""
    return {peer: Ban(ban.reason, ban.until_utc) for peer, ban in facts.bans.items()}


def port_of(listen_addrs: tuple[str, ...]) -> int | None:
    """Return the first TCP port of our own addresses."""
    for addr in listen_addrs:
        _, found, rest = addr.partition("/tcp/")
        digits = rest.partition("/")[0]
        if found and digits.isdigit() and 1 <= int(digits) <= 65535:
            return int(digits)
    return None


async def keep_network_facts(
    file: Path,
    listen_addrs: Callable[[], tuple[str, ...]],
    bans: Callable[[], Mapping[str, Ban]],
    port: int | None = None,
) -> None:
    """Write port and bans whenever they have changed, for ever.

    Args:
        file: where to.
        listen_addrs: where we listen now; where nowhere, the last port stays.
        bans: who is refused now.
        port: that of the last time.
    """
    written: NetworkFacts | None = None
    while True:
        newest = list(bans().items())[-MAX_BANS:]
        port = port_of(listen_addrs()) or port
        facts = NetworkFacts(
            port=port,
            bans={p: _KeptBan(reason=b.reason[:300], until_utc=b.until_utc) for p, b in newest},
        )
        if facts != written:
            written = facts
            await trio.to_thread.run_sync(_write, file, facts)
        await trio.sleep(SAVE_EVERY_S)  # noqa: TID251 - a period


def _write(file: Path, facts: NetworkFacts) -> None:
    try:
        replace_file(file, msgspec.json.encode(facts))
    except (StorageFullError, OSError) as error:  # only costs the next start some time
        log.warning("port and bans not remembered: %s", error)
