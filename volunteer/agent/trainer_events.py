"""What the trainer says, as the round protocol's machine takes it.

Runs in: agent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from volunteer.messages import Encoded
from volunteer.rounds import events as ev


async def encoded_event(
    event: Encoded, content_hash_of: Callable[[str], Awaitable[str]]
) -> ev.ContributionEncoded:
    """Return the event for a contribution that the trainer has put on the disk.

    Args:
        event: what the trainer says.
        content_hash_of: returns what a blob of ours holds, by its id.
    """
    return ev.ContributionEncoded(
        base=event.base,
        blob_id=event.blob_id,
        blob_bytes=event.blob_bytes,
        codec=event.codec,
        codec_version=event.codec_version,
        tokens=event.tokens,
        carries=event.carries,
        content_hash=await content_hash_of(event.blob_id),
    )
