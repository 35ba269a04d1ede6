"""Ctrl-C, looked at between steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible(*, terminated: bool = False) -> Iterator[threading.Event]:
    """Turns the first Ctrl-C into a flag that is looked at between steps; a second one interrupts at once.

    With `terminated` SIGTERM does so too: it is how torchrun ends its processes.
    """
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested  # only the main thread may handle signals
        return

    def handle(number: int, frame: object) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)[: 1 + terminated]}
    try:
        yield requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
