"""Which contributions point where no honest one does, and which point to the very same.

Runs in: aggregator, lab. Stage 5 of a round. Pure Python floats, from the gram (similarity.py).

Measured with honest workers (LOGBOOK.md, 2026-11-30; 209,000 parameters, 4, 8 and 16 workers, one
of them with a tenth of the steps, int4 and 1.56 % top-k, on the same data and each on its own): the
cosine to the others was 0.02 to 0.6 for the slow one and 0.02 to 0.9 for the rest, 0.04 to 0.9 in
int4, and falls as a run goes on; two honest ones never agreed by more than 0.89. Chance gives
1 / sqrt(elements), here 0.002.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MIN_COSINE = -0.2
MIN_FOR_COSINE = 3
MIN_FOR_NOISE = 5
"""With fewer, too little is known of the direction to call anything noise."""
NOISE_SIGMAS = 3.0
"""A random vector's cosine lies within so many standard deviations of 0 but once in 370."""
MIN_AGREEMENT = 2.0
"""What the median cosine has to be, in units of what chance gives, before anything is noise."""
COPY_COSINE = 0.99
"""What two share that are one: 14 % of noise over a copy brings it below, and is noise then."""
_MIN_LENGTH_SQUARED = 1e-6
"""Below this, a sum of unit vectors has cancelled out and points nowhere."""

Gram = Sequence[Sequence[float]]


def refuse_by_direction(
    gram: Gram, candidates: Sequence[int], *, num_elements: int, most_noise: int
) -> dict[int, str]:
    """Return the refused, each with its reason, in the order of refusal: the worst first.

    One after the other, so that one attacker does not take honest ones along. Only while three or
    more remain: of two that disagree, nobody can say which is wrong. A zero vector has no
    direction, and is never refused for it.

    Args:
        gram: inner products of all pairs.
        candidates: indices to look at; the others are not there.
        num_elements: elements that the inner products are over.
        most_noise: how many may be refused as noise.
    """
    units = _unit_products(gram)
    reasons: dict[int, str] = {}
    remaining = list(candidates)
    while len(remaining) >= MIN_FOR_COSINE:
        cosines = _cosines_to_others(units, remaining)
        lowest = min(cosines)
        if lowest >= MIN_COSINE:
            break
        reasons[remaining.pop(cosines.index(lowest))] = (
            f"its direction disagrees with the others' (cosine {lowest:.2f}, at least {MIN_COSINE})"
        )
    chance = NOISE_SIGMAS / math.sqrt(max(1, num_elements))
    remaining = [index for index in remaining if gram[index][index] != 0.0]
    for _ in range(most_noise):
        found = _find_noise(units, remaining, chance)
        if found is None:
            break
        index, cosine = found
        remaining.remove(index)
        reasons[index] = (
            f"it cannot be told from noise (cosine to the others' {cosine:.4f}; "
            f"chance gives up to {chance:.4f})"
        )
    return reasons


def _find_noise(units: Gram, remaining: Sequence[int], chance: float) -> tuple[int, float] | None:
    """Return the index that is noise, and its cosine; None if none is.

    Noise is what lies within `chance` of 0 on either side, where most others agree beyond it. Not
    all below: who learns from data of its own may come to disagree a little, and passes quickly
    where it seems to say nothing.
    """
    if len(remaining) < MIN_FOR_NOISE:
        return None
    cosines = _cosines_to_others(units, remaining)
    median = sorted(cosines)[(len(cosines) - 1) // 2]
    least = min(range(len(remaining)), key=lambda place: abs(cosines[place]))
    if abs(cosines[least]) >= chance or median < MIN_AGREEMENT * chance:
        return None
    return remaining[least], cosines[least]


def find_copies(gram: Gram, candidates: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return, for each of `candidates` that has any, the others of its very direction."""
    units = _unit_products(gram)
    copies = {
        index: tuple(j for j in candidates if j != index and units[index][j] >= COPY_COSINE)
        for index in candidates
    }
    return {index: others for index, others in copies.items() if others}


def _cosines_to_others(units: Gram, remaining: Sequence[int]) -> list[float]:
    """Return each one's cosine to the sum of the others' unit vectors; 0 where that cancels out."""
    rows = {a: math.fsum(units[a][b] for b in remaining) for a in remaining}
    cosines = []
    for index in remaining:
        others = [b for b in remaining if b != index]
        along = math.fsum(units[index][b] for b in others)
        length_squared = math.fsum(rows[b] - units[b][index] for b in others)
        is_nothing = length_squared < _MIN_LENGTH_SQUARED
        cosines.append(0.0 if is_nothing else along / math.sqrt(length_squared))
    return cosines


def _unit_products(gram: Gram) -> list[list[float]]:
    """Return the inner products of the unit vectors; 0 where one is zero, and has no direction."""
    lengths = [math.sqrt(row[index]) for index, row in enumerate(gram)]
    return [
        [
            product / (length * other) if length and other else 0.0
            for product, other in zip(row, lengths, strict=True)
        ]
        for row, length in zip(gram, lengths, strict=True)
    ]
