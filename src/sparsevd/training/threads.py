"""Threads that spin: they wait for each other at full speed, and beside another busy process for a long time.

A thread that spins keeps its core while the thread it waits for stands in the queue for one. On two cores beside one
busy process a step then takes several times as long, and more beside several. OMP_WAIT_POLICY=passive lets threads
sleep instead; OpenMP reads it once, when torch is imported, so only the command line can set it, and here one can but
say so.
"""

import os
import statistics
import time
import warnings

import torch

from sparsevd.errors import SparseVDWarning

_ALONE = 1 << 14  # numbers that torch adds on one thread ...
_SHARED = 1 << 18  # ... and that it shares among several
_TURNS = 7
_FAR_TOO_LONG = 8.0  # times what one thread would take; two that sleep need half as long, and at worst twice
_said = False


def warn_if_they_spin() -> None:
    """Say once if the threads of this process wait for each other at the cost of their work. Takes a millisecond."""
    global _said
    if _said or torch.get_num_threads() == 1 or os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive":
        return
    ratio = _median_seconds(_SHARED) / (_SHARED // _ALONE * _median_seconds(_ALONE))
    if ratio > _FAR_TOO_LONG:
        _said = True
        warnings.warn(
            f"{torch.get_num_threads()} threads take {ratio:.0f} times as long as one: another process keeps a core "
            "busy, and OpenMP's threads spin while they wait for it. Start Python with OMP_WAIT_POLICY=passive in its "
            "environment, or with OMP_NUM_THREADS=1",
            SparseVDWarning,
            stacklevel=2,
        )


def _median_seconds(count: int) -> float:
    numbers = torch.ones(count)
    seconds = []
    for _ in range(_TURNS):
        start = time.perf_counter()
        torch.add(numbers, 1, out=numbers)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
