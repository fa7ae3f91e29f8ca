"""Durations as people type them: `90s`, `15m`, `2h`, `1d`.

Runs in: the command line. Pure.
"""

from __future__ import annotations

import re

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PATTERN = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smhd])")
MAX_DURATION_S = 366 * 86400.0
# A longer pause is a typing mistake, or it means `allmende stop`.


def parse_duration(text: str) -> float:
    """Return the seconds that `text` names.

    Raises:
        ValueError: the message says which forms are understood.
    """
    match = _PATTERN.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(
            f"{text!r} is no duration: write a number and s, m, h or d, as in 90s or 2h"
        )
    duration_s = float(match[1]) * _UNITS_S[match[2]]
    if not 0.0 < duration_s <= MAX_DURATION_S:
        raise ValueError(f"{text!r} is out of range: more than 0 and at most 366d")
    return duration_s
