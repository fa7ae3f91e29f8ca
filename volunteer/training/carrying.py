"""The vector half of the books: unlisted work is put into theta, and taken out again if need be.

Runs in: trainer, at every Rebase. Pure. rounds/credit.py is the half on ids; ROUNDS.md 27 to 29.

A contribution c that carries others holds their work too, so its new part is
N_c = Q_c - sum of N_k over k in carries(c), and the N are disjoint. What is pending has to be in
theta: theta <- theta - N, with P and E untouched, makes it part of the next D = P - theta. Which N
are in theta is a set that the snapshot keeps; only differences are applied.

Invariant: `carries` of a contribution is exactly the set whose N theta held when it was encoded; no
closure is taken over it. After a switch theta may hold N_2 while the chain lists 1, which 2
carried; naming 1 as well would call it covered by a contribution that does not contain it.

Every N is a sum of whole Q with integer coefficients, so all of it is done on ids first, and then
each blob is loaded at most once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from volunteer.errors import TrainerError
from volunteer.messages import OwnWork

LoadQuantised = Callable[[OwnWork], Tensor]
"""Returns Q of one own contribution: its decoded blob, shape (P,), on theta's device."""


def new_part(work_id: str, works: Mapping[str, OwnWork], load_quantised: LoadQuantised) -> Tensor:
    """Return N of contribution `work_id`: the work it was the first to contain, shape (P,).

    Args:
        work_id: the contribution.
        works: own contributions by id: `work_id` and all that it carries.
        load_quantised: reads a blob; its tensors are not kept.

    Raises:
        TrainerError: `works` lacks one that is needed, or contradicts itself.
    """
    return _combine(_coefficients([work_id], [], works), works, load_quantised)


def carry_difference(
    in_theta: frozenset[str], pending: frozenset[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (to put in, to take out) so that theta carries exactly `pending`; both sorted."""
    return tuple(sorted(pending - in_theta)), tuple(sorted(in_theta - pending))


def carry(
    theta_P: Tensor,
    in_theta: frozenset[str],
    pending: frozenset[str],
    works: Mapping[str, OwnWork],
    load_quantised: LoadQuantised,
) -> Tensor:
    """Return theta with exactly the new parts of `pending` in it.

    theta <- theta - sum N(put in) + sum N(taken out); P and E stay as they are.

    Args:
        theta_P: local weights, shape (P,); not changed.
        in_theta: ids whose new part theta carries now.
        pending: ids whose new part it has to carry.
        works: own contributions by id: all of both sets, and all that they carry.
        load_quantised: reads a blob; called once at most for each contribution.

    Raises:
        TrainerError: `works` lacks one that is needed, or contradicts itself.
    """
    coefficients = _coefficients(*carry_difference(in_theta, pending), works)
    if not coefficients:
        return theta_P
    return theta_P - _combine(coefficients, works, load_quantised).to(theta_P.dtype)


def _coefficients(
    put_in: Iterable[str], take_out: Iterable[str], works: Mapping[str, OwnWork]
) -> dict[str, int]:
    """Return the coefficient of each Q in sum N(put in) - sum N(taken out), zeros left out."""
    memory: dict[str, dict[str, int]] = {}
    total: dict[str, int] = {}
    for ids, sign in ((put_in, 1), (take_out, -1)):
        for work_id in ids:
            _add(total, _new_part_coefficients(work_id, works, memory), sign)
    return {work_id: total[work_id] for work_id in sorted(total) if total[work_id]}


def _new_part_coefficients(
    work_id: str,
    works: Mapping[str, OwnWork],
    memory: dict[str, dict[str, int]],
    above: frozenset[str] = frozenset(),
) -> dict[str, int]:
    """Return N of `work_id` as coefficients of Q; `above` are the carriers that led here."""
    if work_id in memory:
        return memory[work_id]
    if work_id not in works:
        raise TrainerError(f"the books do not know contribution {work_id}")
    if work_id in above:
        raise TrainerError(f"contribution {work_id} carries itself")
    coefficients = {work_id: 1}
    for carried in works[work_id].carries:
        part = _new_part_coefficients(carried, works, memory, above | {work_id})
        _add(coefficients, part, -1)
    memory[work_id] = coefficients
    return coefficients


def _add(total: dict[str, int], part: Mapping[str, int], sign: int) -> None:
    for work_id, coefficient in part.items():
        total[work_id] = total.get(work_id, 0) + sign * coefficient


def _combine(
    coefficients: Mapping[str, int], works: Mapping[str, OwnWork], load_quantised: LoadQuantised
) -> Tensor:
    """Return sum of coefficient * Q, in the order of the mapping."""
    total_P: Tensor | None = None
    for work_id, coefficient in coefficients.items():
        part_P = load_quantised(works[work_id]) * coefficient
        total_P = part_P if total_P is None else total_P.add_(part_P)
    assert total_P is not None  # callers have at least one contribution
    return total_P
