"""Torch's global generator, for one training at a time.

Order, noise and augmentation draw from it. It is one for the whole process, so two trainings in threads would draw each
other's numbers, and neither could be repeated or resumed to the same result.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sparsevd.errors import ArgumentError

_IN_USE = threading.RLock()


@contextmanager
def reserved(device: torch.device | None = None) -> Iterator[None]:
    """The generator for the thread that asks first; another thread is refused. It is put back as it was."""
    if not _IN_USE.acquire(blocking=False):
        raise ArgumentError(
            "another thread of this process is training: both would draw from torch's one generator, and neither could "
            "be repeated; train one after the other, or in processes of their own"
        )
    try:
        with torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []):
            yield
    finally:
        _IN_USE.release()


def seed_epoch(seed: int, epoch: int) -> None:
    """All randomness of an epoch comes from these two: an epoch can be repeated without those before it."""
    torch.manual_seed(seed * 1_000_003 + epoch)
