"""A second implementation of refusals, marks and copies, written from PROTOCOL.md 17.4 alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from blake3 import blake3

if TYPE_CHECKING:
    from tests.protocol.second_state import Blob, Listed


def lower_median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def chosen_blocks(blobs: list[Blob]) -> list[int]:
    count = len(blobs[0].codes)
    if count <= 100:
        return list(range(count))
    wanted = max(100, math.floor(0.01 * count))
    stream = blake3(b"allmende/cosine-blocks/1\0" + "".join(b.blob_id for b in blobs).encode())
    chosen: set[int] = set()
    j = 0
    while len(chosen) < wanted:
        chosen.add(int.from_bytes(stream.digest(length=8, seek=8 * j), "little") % count)
        j += 1
    return sorted(chosen)


def product(one: Blob, other: Blob, blocks: list[int]) -> float:
    return math.fsum(
        (one.scales[k] * other.scales[k])
        * sum(x * y for x, y in zip(one.codes[k], other.codes[k], strict=True))
        for k in blocks
    )


def judged(
    blobs: list[Blob], listed: list[Listed]
) -> tuple[list[int], list[int], dict[int, list[int]]]:
    """Return who is left, who is marked, and the copies of each that is left (17.4.4, 5, 12)."""
    blocks = chosen_blocks(blobs)
    g = [[product(a, b, blocks) for b in blobs] for a in blobs]

    def unit(a: int, b: int) -> float:
        if not g[a][a] or not g[b][b]:
            return 0.0
        return g[a][b] / (math.sqrt(g[a][a]) * math.sqrt(g[b][b]))

    def cosines(left: list[int]) -> list[float]:
        row = {b: math.fsum(unit(b, c) for c in left) for b in left}
        found = []
        for a in left:
            others = [b for b in left if b != a]
            square = math.fsum(row[b] - unit(b, a) for b in others)
            along = math.fsum(unit(a, b) for b in others)
            found.append(0.0 if square < 1e-6 else along / math.sqrt(square))
        return found

    out = [a for a, one in enumerate(listed) if one.is_excluded or one.is_stale]
    authors = {one.author for one in listed if not one.is_excluded}
    quarter = len(authors) // 4 if len(authors) >= 5 else 0
    left = [a for a in range(len(blobs)) if a not in out]
    while len(left) >= 3 and min(found := cosines(left)) < -0.2:
        out.append(left.pop(found.index(min(found))))
    sound = [a for a in left if g[a][a]]
    size, total = len(blobs[0].codes[0]), len(blobs[0].elements)
    num_elements = sum(min(size, total - k * size) for k in blocks)
    chance = 3 / math.sqrt(num_elements)
    for _ in range(quarter):
        if len(sound) < 5:
            break
        found = cosines(sound)
        sizes = [abs(cosine) for cosine in found]
        if min(sizes) >= chance or lower_median(found) < 2 * chance:
            break
        out.append(sound.pop(sizes.index(min(sizes))))
        left.remove(out[-1])
    copies = {a: [b for b in left if b != a and unit(a, b) >= 0.99] for a in left}
    late = [
        a
        for a in left
        if quarter
        and listed[a].is_on_probation
        and any(not listed[b].is_on_probation for b in copies[a])
    ]
    left = [a for a in left if a not in late]
    struck = [a for a in (*out, *late) if not listed[a].is_excluded]
    first = list(dict.fromkeys(listed[a].author for a in struck))[:quarter]
    marked = sorted(a for a in struck if listed[a].author in first)
    return left, marked, {a: [b for b in copies[a] if b in left] for a in left}
