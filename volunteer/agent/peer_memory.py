"""Peers met before, so that a restarted agent finds its swarm again without being introduced.

Runs in: agent. A small JSON file, replaced atomically; what it says is only a hint where to dial,
since the handshake proves who is there. A damaged file is no loss: it is written anew.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import trio

from volunteer.errors import StorageFullError
from volunteer.files import replace_file

log = logging.getLogger(__name__)
MAX_PEERS = 64
MAX_FILE_BYTES = 256 * 1024
SAVE_EVERY_S = 5.0
MAX_ADDRS = 8
_ADDR = re.compile(r"/[ !#-\[\]-~]{1,199}")

_Addrs = Annotated[
    tuple[Annotated[str, msgspec.Meta(max_length=200)], ...], msgspec.Meta(max_length=MAX_ADDRS)
]
_decoder = msgspec.json.Decoder(dict[str, _Addrs])


class PeerMemory:
    """Addresses of the peers heard last."""

    def __init__(self, file: Path) -> None:
        """Keep them in `file`."""
        self._file = file
        self._addrs: dict[str, tuple[str, ...]] = {}
        self._is_changed = False

    def load(self) -> Mapping[str, tuple[str, ...]]:
        """Read what was known when the agent last ran."""
        try:
            data = self._file.read_bytes()
            if len(data) > MAX_FILE_BYTES:
                raise msgspec.ValidationError(f"larger than {MAX_FILE_BYTES} bytes")
            known = _decoder.decode(data)
            self._addrs = dict(list(known.items())[-MAX_PEERS:])
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("%s is not readable and will be written anew: %s", self._file, error)
        return dict(self._addrs)

    def note(self, peer_id: str, addrs: tuple[str, ...]) -> None:
        """A peer says where it listens."""
        # What is no address may fill the file: JSON writes one odd character as six.
        addrs = tuple(addr for addr in addrs if _ADDR.fullmatch(addr))[:MAX_ADDRS]
        if not addrs or self._addrs.get(peer_id) == addrs:
            return
        self._addrs.pop(peer_id, None)
        self._addrs[peer_id] = addrs
        while len(self._addrs) > MAX_PEERS:
            del self._addrs[next(iter(self._addrs))]
        self._is_changed = True

    async def run(self) -> None:
        """Save changes every few seconds, for ever."""
        while True:
            await trio.sleep(SAVE_EVERY_S)  # noqa: TID251 - a period
            if self._is_changed:
                await trio.to_thread.run_sync(self._save)

    def _save(self) -> None:
        self._is_changed = False
        try:
            replace_file(self._file, msgspec.json.encode(self._addrs))
        except (StorageFullError, OSError) as error:  # only costs the next start some time
            log.warning("peers not remembered: %s", error)
