"""How often a stream's reader tells the writer that it may go on. Runs in: agent.

One of the guards (p2p/guards.py puts it in place). Stock code sends a frame for every read, and
libp2p reads the lengths of messages byte by byte: a message of 500 bytes cost five frames of 30
bytes in return, and the negotiation of a stream twice as many.
"""

from __future__ import annotations

from typing import Final

from libp2p.stream_muxer.yamux import yamux

MIN_TOLD_BYTES: Final = 32 << 10
"""A window is 256 KiB at least, so that no writer ever waits for the last eighth of it."""

_stock = yamux.YamuxStream._auto_tune_and_send_window_update


def install() -> None:
    """Put it in place; doing so twice is harmless."""
    yamux.YamuxStream._auto_tune_and_send_window_update = tell_window


async def tell_window(stream: yamux.YamuxStream, *, bytes_read: int = 0) -> None:
    """Let the writer know that `bytes_read` more were read, now or with later ones.

    Where less than `MIN_TOLD_BYTES` come together, nothing is sent.
    """
    untold = getattr(stream, "untold_bytes", 0) + bytes_read
    is_enough = untold >= MIN_TOLD_BYTES
    stream.untold_bytes = 0 if is_enough else untold
    if is_enough:
        await _stock(stream, bytes_read=untold)
