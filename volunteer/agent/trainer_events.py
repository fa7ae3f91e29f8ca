"""What the trainer says, as the round protocol's machine takes it.

Runs in: agent. Pure.
"""

from __future__ import annotations

from volunteer.messages import Encoded
from volunteer.rounds import events as ev


def encoded_event(event: Encoded) -> ev.ContributionEncoded:
    """Return the event for a contribution that the trainer has put on the disk."""
    return ev.ContributionEncoded(
        base=event.base,
        blob_id=event.blob_id,
        blob_bytes=event.blob_bytes,
        codec=event.codec,
        codec_version=event.codec_version,
        tokens=event.tokens,
        carries=event.carries,
    )
