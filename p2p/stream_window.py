"""How a stream's reader tells the writer that it may go on, and how that one waits for it.

Runs in: agent.

One of the guards (p2p/guards.py puts it in place). Stock code sends a frame for every read, and
libp2p reads the lengths of messages byte by byte: a message of 500 bytes cost five frames of 30
bytes in return, and the negotiation of a stream twice as many.
"""

from __future__ import annotations

from typing import Final

import trio
from libp2p.stream_muxer.yamux import yamux

MIN_TOLD_BYTES: Final = 32 << 10
"""A window is 256 KiB at least, so that no writer ever waits for the last eighth of it."""
TOLD_FRACTION: Final = 8
"""Of a larger window; for the same reason."""
LOOK_EVERY_S: Final = 0.25
"""At whether a stream whose window is closed has ended."""

_stock = yamux.YamuxStream._auto_tune_and_send_window_update


def install() -> None:
    """Put it in place; doing so twice is harmless."""
    yamux.YamuxStream._auto_tune_and_send_window_update = tell_window


async def tell_window(stream: yamux.YamuxStream, *, bytes_read: int = 0) -> None:
    """Let the writer know that `bytes_read` more were read, now or with later ones.

    Where less than `MIN_TOLD_BYTES` come together, nothing is sent.
    """
    untold = getattr(stream, "untold_bytes", 0) + bytes_read
    is_enough = untold >= max(MIN_TOLD_BYTES, stream.target_recv_window // TOLD_FRACTION)
    stream.untold_bytes = 0 if is_enough else untold
    if is_enough:
        await _stock(stream, bytes_read=untold)


async def widen(stream: yamux.YamuxStream, num_bytes: int) -> None:
    """Let the writer send `num_bytes` ahead, if that is more than it may."""
    if stream.target_recv_window < num_bytes <= yamux.MAX_WINDOW_SIZE:
        more = num_bytes - stream.target_recv_window
        stream.target_recv_window = num_bytes
        stream.recv_window += more
        await stream.send_window_update(more)


def note_opened(stream: yamux.YamuxStream) -> None:
    """The reader has told that more may be sent: wake up who waits for it."""
    opened = getattr(stream, "window_opened", None)
    if opened is not None:
        opened.set()


async def wait_window(stream: yamux.YamuxStream, wanted: int, timeout_s: float) -> None:
    """Wait until `wanted` bytes may be sent, the stream has ended, or the time is over.

    Stock code looks every 10 ms, so each full window cost the rest of 10 ms.
    """
    with trio.move_on_after(timeout_s):
        while stream.send_window < wanted and not (stream.closed or stream.send_closed):
            stream.window_opened = trio.Event()
            with trio.move_on_after(LOOK_EVERY_S):
                await stream.window_opened.wait()
    stream.window_opened = None
