"""How much each listed contribution weighs, which are refused, and which are marked as bad work.

Runs in: aggregator, lab. Stage 5 of a round. Pure Python floats, IEEE double, so equal everywhere.

The rules in their order (DESIGN.md section 4; validity comes first, in contribution_blob.py):
1. Books: the work of an excluded author, and a stale blob (one that repeats what was listed for an
   earlier base), are refused. What follows is about the rest.
2. Direction (direction.py): who disagrees most with the sum of the others' unit vectors is refused
   if its cosine is below -0.2, or if it cannot be told from noise; then all is computed anew.
3. Copies (direction.py): contributions of one and the same direction share one weight. Beside one
   by an author that is not on probation, those by newcomers are refused, with five authors or more.
4. Norm: with five or more left, a norm above the median is clipped to it. Work that was carried
   adds up over rounds, so the limit grows with the tokens: median * clip(tokens / median, 1, 4).
5. Weight: clip(tokens, 0.1 median, 4 median); times 0.5 if late; times 0.25 on probation; divided
   by the number of copies.
6. Cap: with five or more authors, nobody has more than a quarter of the total.
7. One renormalisation: the weights of a commit add up to 1.
Medians are over what rules 1 to 3 left; of an even count, the lower one.

What rules 1 to 3 refuse is marked, but for the work of who is excluded already: the worst first,
and of no more than a quarter of the authors (rounds/exclusion.py says what a mark leads to).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from volunteer.messages import ListedWork, Outcome
from volunteer.rounds.exclusion import max_struck
from volunteer.training.direction import find_copies, refuse_by_direction

MIN_FOR_CLIP = 5
MIN_AUTHORS_FOR_CAP = 5
MAX_SHARE = 0.25
LATE_FACTOR = 0.5
PROBATION_FACTOR = 0.25
MIN_OF_MEDIAN = 0.1
MAX_OF_MEDIAN = 4.0
EXCLUDED_REASON = "its author is excluded for bad work in earlier rounds"
STALE_REASON = "it repeats what was listed in an earlier round"
COPY_REASON = "its content is that of another contribution, whose author has been here longer"


@dataclass(frozen=True, slots=True)
class Measured:
    """What the rules need to know of the listed contributions' content."""

    norms: Sequence[float]
    """Euclidean norms, in list order."""
    gram: Sequence[Sequence[float]]
    """Inner products of all pairs, over the blocks that enter the cosines."""
    num_elements: int
    """Elements in those blocks: they say how small a cosine may be by chance."""


def weigh(listed: Sequence[ListedWork], measured: Measured) -> tuple[Outcome, ...]:
    """Apply the rules; return the outcomes in list order."""
    reasons = _refuse_by_books(listed)
    excluded = {index for index, work in enumerate(listed) if work.is_excluded}
    limit = max_struck(len({work.author for work in listed if not work.is_excluded}))
    rest = [index for index in range(len(listed)) if index not in reasons]
    reasons |= refuse_by_direction(
        measured.gram, rest, num_elements=measured.num_elements, most_noise=limit
    )
    rest = [index for index in rest if index not in reasons]
    copies = find_copies(measured.gram, rest)
    reasons |= _refuse_copies(listed, copies) if limit else {}
    kept = [index for index in rest if index not in reasons]
    scales = _clip_scales(listed, measured.norms, kept)
    weights = _normalise(_cap(listed, _weights(listed, kept, copies)))
    marked = _marks(listed, [index for index in reasons if index not in excluded], limit)
    return tuple(
        Outcome(
            contribution_id=work.contribution_id,
            weight=weights.get(index, 0.0),
            norm=measured.norms[index],
            clip_scale=scales.get(index, 1.0),
            refused_reason=reasons.get(index, ""),
            is_marked=index in marked,
            copies=tuple(listed[other].contribution_id for other in copies.get(index, ())),
        )
        for index, work in enumerate(listed)
    )


def _refuse_by_books(listed: Sequence[ListedWork]) -> dict[int, str]:
    """Return what the chain alone condemns, with the reasons (rule 1)."""
    reasons = {}
    for index, work in enumerate(listed):
        if work.is_excluded:
            reasons[index] = EXCLUDED_REASON
        elif work.is_stale:
            reasons[index] = STALE_REASON
    return reasons


def _refuse_copies(
    listed: Sequence[ListedWork], copies: Mapping[int, Sequence[int]]
) -> dict[int, str]:
    """Return the copies by newcomers of what others made (rule 3).

    Which of two is the copy, their content does not show: only where one author has long been here
    and the other not, it is taken to be the newcomer's. The scorers may know more (scoring.py).
    """
    return {
        index: COPY_REASON
        for index, others in copies.items()
        if listed[index].is_on_probation
        and any(not listed[other].is_on_probation for other in others)
    }


def _marks(listed: Sequence[ListedWork], refused: Sequence[int], limit: int) -> frozenset[int]:
    """Return which of the refused are marked, the worst first: works of at most `limit` authors."""
    authors: list[str] = []
    for index in refused:
        if listed[index].author not in authors:
            authors.append(listed[index].author)
    return frozenset(index for index in refused if listed[index].author in authors[:limit])


def _clip_scales(
    listed: Sequence[ListedWork], norms: Sequence[float], kept: Sequence[int]
) -> dict[int, float]:
    """Return the factor on each kept contribution's content (rule 4)."""
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


def _weights(
    listed: Sequence[ListedWork], kept: Sequence[int], copies: Mapping[int, Sequence[int]]
) -> dict[int, float]:
    """Return the weights of the kept ones before cap and normalisation (rule 5)."""
    if not kept:
        return {}
    median_tokens = lower_median([listed[index].tokens for index in kept])
    weights = {}
    for index in kept:
        work = listed[index]
        weight = min(max(work.tokens, MIN_OF_MEDIAN * median_tokens), MAX_OF_MEDIAN * median_tokens)
        weight *= LATE_FACTOR if work.is_late else 1.0
        weight *= PROBATION_FACTOR if work.is_on_probation else 1.0
        weights[index] = weight / (1 + sum(other in kept for other in copies.get(index, ())))
    return weights


def _cap(listed: Sequence[ListedWork], weights: Mapping[int, float]) -> dict[int, float]:
    """Bring every author down to MAX_SHARE of the resulting total (rule 6).

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
    """Make the weights add up to 1 (rule 7)."""
    total = math.fsum(weights.values())
    return {index: weight / total for index, weight in weights.items()}


def lower_median(values: Sequence[float]) -> float:
    """Return the median; of an even count, the lower of the two in the middle."""
    return sorted(values)[(len(values) - 1) // 2]
