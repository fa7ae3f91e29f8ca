"""Numbers, times and foreign text, as they are shown.

Runs in: tui and command line. Pure. What is not known is `NOT_YET`, never 0.
"""

from __future__ import annotations

import math
import unicodedata
from datetime import datetime

NOT_YET = "not yet"
_SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def clean(text: str, *, limit: int = 300) -> str:
    """Make text of the agent or of a peer safe to show: no control or direction characters.

    Args:
        text: anything; a peer may have chosen it.
        limit: characters kept.
    """
    kept = "".join(" " if unicodedata.category(c)[0] in "CZ" else c for c in text[: limit + 1])
    return kept if len(text) <= limit else kept[: limit - 1] + "…"


def format_scaled(value: float) -> str:
    """Return three significant digits with k, M, G, T or P: `12.3k`."""
    for scale, suffix in _SCALES:
        # 999.95 would round to 1000 of the smaller unit.
        if abs(value) >= scale * 0.9995:
            return f"{_three_digits(value / scale)}{suffix}"
    return f"{value:.0f}" if value == int(value) else _three_digits(value)


def _three_digits(value: float) -> str:
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f}"


def format_tokens(tokens: int | None) -> str:
    """Return `12.3M tokens`."""
    if tokens is None:
        return NOT_YET
    return "1 token" if tokens == 1 else f"{format_scaled(tokens)} tokens"


def format_rate(tokens_per_s: float | None) -> str:
    """Return `12.3k tokens/s`; 0 is what the agent says before it has measured, so: not yet."""
    if tokens_per_s is None or not math.isfinite(tokens_per_s) or tokens_per_s <= 0.0:
        return NOT_YET
    return f"{format_scaled(tokens_per_s)} tokens/s"


def format_bytes(num_bytes: int) -> str:
    """Return `1.40 MB` (decimal units)."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    scaled = format_scaled(num_bytes)
    return f"{scaled[:-1]} {scaled[-1]}B"


def format_loss(loss: float | None, stderr: float | None = None, unit: str = "") -> str:
    """Return a loss with four decimals, and how sure it is where that is known."""
    if loss is None or not math.isfinite(loss):
        return NOT_YET
    sure = f" \N{PLUS-MINUS SIGN} {stderr:.4f}" if stderr else ""
    return f"{loss:.4f}{sure} {unit}".rstrip()


def format_train_loss(nats_per_token: float | None, bytes_per_token: float | None) -> str:
    """Return a training loss in the unit of the held-out loss, as soon as that can be known."""
    if nats_per_token is None or not bytes_per_token:
        return format_loss(nats_per_token, unit="nats/token")
    return format_loss(nats_per_token / bytes_per_token, unit="nats/byte")


def format_duration(duration_s: float | None) -> str:
    """Return `8 s`, `3 min 20 s`, `2 h 05 min` or `3 d 4 h`."""
    if duration_s is None or not math.isfinite(duration_s) or duration_s < 0.0:
        return NOT_YET
    seconds = round(duration_s)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    if seconds < 86400:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600} h"


def format_stopwatch(duration_s: float) -> str:
    """Return `4:10` or `1:04:10`."""
    seconds = int(duration_s) if math.isfinite(duration_s) and duration_s > 0.0 else 0
    hours, minutes = seconds // 3600, seconds % 3600 // 60
    head = f"{hours}:{minutes:02d}" if hours else f"{minutes}"
    return f"{head}:{seconds % 60:02d}"


def format_instant(instant: datetime, now: datetime) -> str:
    """Return `14:03:22`, with the date before it if that is not today."""
    local = instant.astimezone(now.tzinfo)
    return f"{local:%H:%M:%S}" if local.date() == now.date() else f"{local:%d %b %H:%M}"


def format_utc(utc_text: str, now: datetime) -> str:
    """Return an ISO 8601 UTC time as local time; not yet if empty or not a time."""
    try:
        instant = datetime.fromisoformat(utc_text)
    except ValueError:
        return NOT_YET
    if instant.tzinfo is None:
        # Fields ending in _utc are UTC, with or without an offset.
        instant = datetime.fromisoformat(f"{utc_text}+00:00")
    return format_instant(instant, now)


def short_id(identifier: str) -> str:
    """Return the last 8 characters: peer ids all begin alike."""
    text = clean(identifier, limit=200)
    return text if len(text) <= 9 else f"…{text[-8:]}"
