"""Works on slices of a vector in several threads, and hands the results on in order.

Runs in: trainer, aggregator.

torch and numpy let go of the interpreter while they compute. numpy uses one core; torch can use
several in one operation, but a slice is small, and threads that meet after every operation spin
while one of them has no core: where others compute too, that took 30 times as long. So slices are
taken in as many threads as torch has, each of which computes alone. What a slice gives depends on
nothing but the slice: the number of threads cannot be seen in the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
_AHEAD_PER_THREAD = 2  # enough that no thread waits for the reader; more would be memory only


def run_slices(work: Callable[[int, int], None], cuts: Iterable[tuple[int, int]]) -> None:
    """Call `work(start, stop)` for every cut, several at once (arguments: `map_slices`)."""
    for _ in map_slices(work, cuts):
        pass


def map_slices(work: Callable[[int, int], T], cuts: Iterable[tuple[int, int]]) -> Iterator[T]:
    """Yield `work(start, stop)` of every cut, in order; a few are computed ahead.

    Args:
        work: called from any thread, for several cuts at once; what it raises comes out here.
        cuts: what to work on; one alone is worked on in this thread.
    """
    cuts = list(cuts)
    num_threads = min(torch.get_num_threads(), len(cuts))
    if num_threads <= 1:
        yield from (work(start, stop) for start, stop in cuts)
        return
    threads_of_torch = torch.get_num_threads()
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
        torch.set_num_threads(threads_of_torch)
