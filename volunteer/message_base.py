"""What every message between our own processes is.

Runs in: every process. Pure. The messages: messages.py and aggregator_messages.py.
"""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """One line."""
