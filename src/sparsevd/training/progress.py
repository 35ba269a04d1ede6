"""Who watches a training: callbacks of the user's, and what a person sees.

A person sees a live bar on a terminal, a line per epoch elsewhere, or nothing.
"""

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from sparsevd.training.history import EpochMetrics

logger = logging.getLogger("sparsevd")


@dataclass(frozen=True)
class Moment:
    """How far a training is."""

    progress: float  # the part of the whole run that is over, from 0 to 1
    epoch: int  # the present one, or the one that just ended, from 1
    batch: int  # batches of the present epoch that are over
    text: str  # the state in a line
    metrics: EpochMetrics | None = None  # of the last epoch that is over


class Callback:
    """Told by `fit` about every step and every epoch; override what you want to hear of.

    An exception ends the training. The folder of the run then holds the last finished epoch.
    """

    def on_begin(self, remarks: Sequence[str]) -> None:
        """The training begins. What there is to say of it beforehand: too few steps, too much noise."""

    def on_step(self, moment: Moment) -> None:
        """A step is over. The network may be evaluated here; its layers may hold a part of their weights only, so what
        prunes, counts, saves or copies them belongs into `on_epoch`, or asks for `contract=False`."""

    def on_epoch(self, moment: Moment) -> None:
        """An epoch is over, and its checkpoint is written; `moment.metrics` are its numbers."""

    def on_end(self, remarks: Sequence[str]) -> None:
        """The training is over. What happened, in words: those of `sparsevd.reporting.diagnosis`, usually none."""


class Display(Callback):
    """What a person sees; use as a context manager. This one shows nothing: remarks go to the log."""

    def on_begin(self, remarks: Sequence[str]) -> None:
        for remark in remarks:
            self.say(f"note: {remark}")

    def on_end(self, remarks: Sequence[str]) -> None:
        self.on_begin(remarks)

    def say(self, line: str) -> None:
        """A line beside the progress."""
        logger.info("%s", line)

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *error: object) -> None:
        return None


@final
class Silence(Display):
    """Of a process that another one talks for: not even the log gets a word."""

    def say(self, line: str) -> None:
        """Nothing."""


@final
class Lines(Display):
    """One line per epoch with the time that is left, for logs."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._first: float | None = None

    def on_step(self, moment: Moment) -> None:
        if self._first is None:
            self._first = moment.progress  # not zero in a resumed run

    def on_epoch(self, moment: Moment) -> None:
        worked = moment.progress - (self._first or 0.0)
        left = (time.monotonic() - self._begun) * (1 - moment.progress) / worked if worked > 0 else 0.0
        self.say(f"{moment.text}  ·  {left / 60:.1f} min left")

    def say(self, line: str) -> None:
        print(line, flush=True)


@final
class Bar(Display):
    """A live bar with the time that is left; finished epochs do not scroll by, they update the bar."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._bar: Any = Progress(
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

    def __enter__(self) -> "Display":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def say(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False)

    def on_step(self, moment: Moment) -> None:
        if time.monotonic() - self._shown > 0.1:  # a text per step would cost more than a step of a small net
            self._shown = time.monotonic()
            self._bar.update(self._task, completed=moment.progress, description=moment.text)

    def on_epoch(self, moment: Moment) -> None:
        self._bar.update(self._task, completed=moment.progress, description=moment.text)


def display(show: bool) -> Display:
    """A bar on a terminal, lines elsewhere, nothing when not wanted."""
    if not show:
        return Display()
    return Bar() if sys.stdout.isatty() else Lines()
