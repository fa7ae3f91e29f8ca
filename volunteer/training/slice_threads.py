"""Works on slices of a vector in several threads, and hands the results on in order.

Runs in: trainer, aggregator.

torch and numpy let go of the interpreter while they compute. torch can use several cores in one
operation too, numpy cannot; and a slice is so small that starting and joining costs more than is
gained. So slices are taken in as many threads as torch has, each of which computes alone. What a
slice gives depends on nothing but the slice: the number of threads cannot be seen in the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
_AHEAD_PER_THREAD = 2  # enough that no thread waits for the reader; more would be memory only


def map_slices(
    work: Callable[[int, int], T], cuts: Iterable[tuple[int, int]], num_threads: int | None = None
) -> Iterator[T]:
    """Yield `work(start, stop)` of every cut, in order; a few are computed ahead.

    Args:
        work: called from any thread, for several cuts at once.
        cuts: what to work on.
        num_threads: torch's own number where none is given.
    """
    num_threads = torch.get_num_threads() if num_threads is None else num_threads
    if num_threads <= 1:
        yield from (work(start, stop) for start, stop in cuts)
        return
    ahead: deque[Future[T]] = deque()
    try:
        with ThreadPoolExecutor(num_threads, "slices", torch.set_num_threads, (1,)) as pool:
            for start, stop in cuts:
                ahead.append(pool.submit(work, start, stop))
                if len(ahead) > _AHEAD_PER_THREAD * num_threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
    finally:
        # A thread's setting is its own, but threads to come take over what was set last.
        torch.set_num_threads(num_threads)
