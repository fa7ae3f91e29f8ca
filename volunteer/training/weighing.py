"""How much each listed contribution weighs, and which are refused: rules on a few numbers each.

Runs in: aggregator. Stage 5 of a round. Pure Python floats, IEEE double, so equal everywhere.

The rules in their order (DESIGN.md section 4; validity comes first, in contribution_blob.py):
1. Cosine: the contribution whose direction disagrees most with the sum of the others' unit vectors
   is refused if its cosine is below -0.2; then all is computed anew without it, so that one
   attacker does not take honest ones along. Only while three or more remain: of two that disagree,
   nobody can say which is wrong.
2. Norm: with five or more left, a norm above the median is clipped to it. Work that was carried
   adds up over rounds, so the limit grows with the tokens: median * clip(tokens / median, 1, 4).
3. Weight: clip(tokens, 0.1 median, 4 median); times 0.5 if late; times 0.25 on probation.
4. Cap: with five or more authors, nobody has more than a quarter of the total.
5. One renormalisation: the weights of a commit add up to 1.
Medians are over what rule 1 left; of an even count, the lower one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from volunteer.messages import ListedWork, Outcome

MIN_COSINE = -0.2
MIN_FOR_COSINE = 3
MIN_FOR_CLIP = 5
MIN_AUTHORS_FOR_CAP = 5
MAX_SHARE = 0.25
LATE_FACTOR = 0.5
PROBATION_FACTOR = 0.25
MIN_OF_MEDIAN = 0.1
MAX_OF_MEDIAN = 4.0
_MIN_LENGTH_SQUARED = 1e-6
"""Below this, a sum of unit vectors has cancelled out and points nowhere."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the rules need to know of the listed contributions' content."""

    norms: Sequence[float]
    """Euclidean norms, in list order."""
    gram: Sequence[Sequence[float]]
    """Inner products of all pairs, over the blocks that enter the cosines."""


def weigh(listed: Sequence[ListedWork], measured: Measured) -> tuple[Outcome, ...]:
    """Apply the rules; return the outcomes in list order."""
    reasons = refuse_by_cosine(measured.gram)
    kept = [index for index in range(len(listed)) if index not in reasons]
    scales = _clip_scales(listed, measured.norms, kept)
    weights = _normalise(_cap(listed, _weights(listed, kept)))
    return tuple(
        Outcome(
            contribution_id=work.contribution_id,
            weight=weights.get(index, 0.0),
            norm=measured.norms[index],
            clip_scale=scales.get(index, 1.0),
            refused_reason=reasons.get(index, ""),
        )
        for index, work in enumerate(listed)
    )


def refuse_by_cosine(gram: Sequence[Sequence[float]]) -> dict[int, str]:
    """Return the refused indices, each with its reason, in the order of refusal (rule 1)."""
    reasons: dict[int, str] = {}
    remaining = list(range(len(gram)))
    while len(remaining) >= MIN_FOR_COSINE:
        cosines = [_cosine_to_others(gram, index, remaining) for index in remaining]
        lowest = min(cosines)
        if lowest >= MIN_COSINE:
            break
        refused = remaining.pop(cosines.index(lowest))
        reasons[refused] = (
            f"its direction disagrees with the others' (cosine {lowest:.2f}, at least {MIN_COSINE})"
        )
    return reasons


def _cosine_to_others(
    gram: Sequence[Sequence[float]], index: int, remaining: Sequence[int]
) -> float:
    """Return the cosine between one contribution and the sum of the others' unit vectors."""
    others = [other for other in remaining if other != index]
    along = math.fsum(_unit_product(gram, index, other) for other in others)
    length_squared = math.fsum(_unit_product(gram, a, b) for a in others for b in others)
    if length_squared < _MIN_LENGTH_SQUARED:
        return 0.0
    return along / math.sqrt(length_squared)


def _unit_product(gram: Sequence[Sequence[float]], a: int, b: int) -> float:
    """Return the inner product of two unit vectors; a zero vector has no direction: 0."""
    if gram[a][a] == 0.0 or gram[b][b] == 0.0:
        return 0.0
    return gram[a][b] / (math.sqrt(gram[a][a]) * math.sqrt(gram[b][b]))


def _clip_scales(
    listed: Sequence[ListedWork], norms: Sequence[float], kept: Sequence[int]
) -> dict[int, float]:
    """Return the factor on each kept contribution's content (rule 2)."""
    if len(kept) < MIN_FOR_CLIP:
        return {}
    median_norm = lower_median([norms[index] for index in kept])
    median_tokens = lower_median([listed[index].tokens for index in kept])
    scales = {}
    for index in kept:
        allowance = min(max(listed[index].tokens / median_tokens, 1.0), MAX_OF_MEDIAN)
        limit = median_norm * allowance
        scales[index] = limit / norms[index] if norms[index] > limit else 1.0
    return scales


def _weights(listed: Sequence[ListedWork], kept: Sequence[int]) -> dict[int, float]:
    """Return the weights of the kept ones before cap and normalisation (rule 3)."""
    if not kept:
        return {}
    median_tokens = lower_median([listed[index].tokens for index in kept])
    weights = {}
    for index in kept:
        work = listed[index]
        weight = min(max(work.tokens, MIN_OF_MEDIAN * median_tokens), MAX_OF_MEDIAN * median_tokens)
        weight *= LATE_FACTOR if work.is_late else 1.0
        weight *= PROBATION_FACTOR if work.is_on_probation else 1.0
        weights[index] = weight
    return weights


def _cap(listed: Sequence[ListedWork], weights: Mapping[int, float]) -> dict[int, float]:
    """Bring every author down to MAX_SHARE of the resulting total (rule 4).

    Whoever is above is set to exactly the share, which lowers the total and may bring the next one
    above; so again, until nobody is. It ends: each turn fixes an author, and of five or more at
    most three can have a quarter each while the rest has something.
    """
    authors = sorted({listed[index].author for index in weights})
    if len(authors) < MIN_AUTHORS_FOR_CAP:
        return dict(weights)
    owned = {
        author: math.fsum(w for index, w in weights.items() if listed[index].author == author)
        for author in authors
    }
    capped: set[str] = set()
    while True:
        free = math.fsum(owned[author] for author in authors if author not in capped)
        total = free / (1.0 - MAX_SHARE * len(capped))
        above = {a for a in authors if a not in capped and owned[a] > MAX_SHARE * total}
        if not above:
            break
        capped |= above
    return {
        index: w * (MAX_SHARE * total / owned[listed[index].author])
        if listed[index].author in capped
        else w
        for index, w in weights.items()
    }


def _normalise(weights: Mapping[int, float]) -> dict[int, float]:
    """Make the weights add up to 1 (rule 5)."""
    total = math.fsum(weights.values())
    return {index: weight / total for index, weight in weights.items()}


def lower_median(values: Sequence[float]) -> float:
    """Return the median; of an even count, the lower of the two in the middle."""
    return sorted(values)[(len(values) - 1) // 2]
