"""How long calls take, measured so that they compare: in turns, in one run."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SLICE = 1e-3  # seconds: each turn calls often enough to take about this long, so that its caches are its own


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median over the turns, and the quarters below and above it."""

    median: float
    low: float
    high: float


def timings(calls: Sequence[Callable[[], object]], *, turns: int = 9, slice_of: float = SLICE) -> list[Timing]:
    """Time several calls in turns, so that what else the machine does meets all of them."""
    repetitions = []
    for call in calls:
        call()  # the first call may prepare things
        start = time.perf_counter()
        call()
        once = time.perf_counter() - start
        repetitions.append(max(1, round(slice_of / max(once, 1e-9))))
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(turns):
        for call, count, spent in zip(calls, repetitions, seconds, strict=True):
            call()
            start = time.perf_counter()
            for _ in range(count):
                call()
            spent.append((time.perf_counter() - start) / count)
    return [_summed_up(spent) for spent in seconds]


def _summed_up(spent: list[float]) -> Timing:
    if len(spent) < 2:
        return Timing(spent[0], spent[0], spent[0])
    low, median, high = statistics.quantiles(spent, n=4, method="inclusive")
    return Timing(median, low, high)
