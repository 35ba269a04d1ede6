"""What a person sees while training runs: a live bar on a terminal, a line per epoch elsewhere, or nothing."""

import sys
import time
from abc import ABC, abstractmethod
from typing import Any, final


class Progress(ABC):
    """Told by `fit` about every step and every epoch; use as a context manager."""

    @abstractmethod
    def step(self, done: float, text: str) -> None:
        """`done` is the part of the whole run that is over, from 0 to 1; `text` is the state in a few words."""

    @abstractmethod
    def epoch(self, text: str) -> None:
        """An epoch is over; `text` sums it up in a line."""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        return None


@final
class Silent(Progress):
    def step(self, done: float, text: str) -> None:
        return None

    def epoch(self, text: str) -> None:
        return None


@final
class Lines(Progress):
    """One line per epoch with the time that is left, for logs."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._first: float | None = None
        self._done = 0.0

    def step(self, done: float, text: str) -> None:
        if self._first is None:
            self._first = done  # not zero in a resumed run
        self._done = done

    def epoch(self, text: str) -> None:
        worked = self._done - (self._first or 0.0)
        left = (time.monotonic() - self._begun) * (1 - self._done) / worked if worked > 0 else 0.0
        print(f"{text}  ·  {left / 60:.1f} min left", flush=True)


@final
class Bar(Progress):
    """A live bar with the time that is left; finished epochs do not scroll by, they update the bar."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as RichProgress

        self._bar: Any = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(),
            expand=True,
        )
        self._task = self._bar.add_task("starting", total=1.0)
        self._shown = 0.0
        self._done = 0.0

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def step(self, done: float, text: str) -> None:
        self._done = done
        if time.monotonic() - self._shown > 0.1:  # a text per step would cost more than a step of a small net
            self._shown = time.monotonic()
            self._bar.update(self._task, completed=done, description=text)

    def epoch(self, text: str) -> None:
        self._bar.update(self._task, completed=self._done, description=text)


def choose(show: bool) -> Progress:
    """A bar on a terminal, lines elsewhere, nothing when not wanted."""
    if not show:
        return Silent()
    return Bar() if sys.stdout.isatty() else Lines()
