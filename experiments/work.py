"""What a unit of the queue is, and how its own process does it: to the end, or two short epochs for an estimate."""

import json
import signal
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from sparsevd.files import atomic

RESULT = "result.json"
STOPPED = 75  # exit code of a unit that was asked to stop, and has saved where it was
# Epochs of short trainings: the first warms up, and the difference of the others is two epochs without their start.
SHORT_RUNS = (1, 1, 3)

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Images:
    """What a unit trains on, and what its error is measured on: the test set, or held-out training images."""

    train: Pair
    measured: Pair

    def part(self, part: float) -> "Images":
        """The first of both."""
        return Images(*((x[: round(part * len(x))], y[: round(part * len(y))]) for x, y in (self.train, self.measured)))


class Work(ABC):
    """What a unit does. Subclasses are frozen dataclasses of their settings, with `epochs` among them."""

    epochs: int
    part_for_estimate: float = 0.05  # of the images, in the short epochs that are measured beforehand

    @property
    def all_epochs(self) -> int:
        """As many lines as metrics.jsonl will have."""
        return self.epochs

    @abstractmethod
    def cost(self) -> str:
        """A name for what an epoch costs: units of the same name share one measurement."""

    @abstractmethod
    def images(self) -> Images: ...

    @abstractmethod
    def run(self, images: Images, folder: Path) -> dict[str, Any]:
        """Train, or go on with the training that is in the folder; returns what the record says."""

    def shortened(self, epochs: int) -> Self:
        """The same with fewer epochs, to see what one costs."""
        return replace(self, epochs=epochs)  # type: ignore[type-var]


@dataclass(frozen=True)
class Unit:
    """One place in the queue. Without `work` it waits for code that does not exist yet, and `waits_for` says which."""

    name: str
    stage: str
    item: str  # its record goes to results/<item>.json
    work: Work | None = None
    needs: tuple[str, ...] = ()  # units whose records it reads
    waits_for: str = ""


def do(work: Work, folder: Path) -> None:
    """Work to the end and write the result; on SIGTERM, save and leave with the exit code STOPPED."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes may ignore it
    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        result = work.run(work.images(), folder)
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    atomic.write(folder / RESULT, json.dumps(result, ensure_ascii=False, allow_nan=False) + "\n")


def measure(work: Work, path: Path) -> None:
    """Write what an epoch costs, from two epochs on a part of the images."""
    torch.set_num_threads(1)
    images = work.images().part(work.part_for_estimate)
    seconds = []
    for epochs in SHORT_RUNS:
        with tempfile.TemporaryDirectory() as folder:
            begun = time.process_time()
            work.shortened(epochs).run(images, Path(folder))
            seconds.append(time.process_time() - begun)
    of_short_epoch = (seconds[2] - seconds[1]) / (SHORT_RUNS[2] - SHORT_RUNS[1])
    found = {"seconds_an_epoch": max(0.0, of_short_epoch) / work.part_for_estimate, "part": work.part_for_estimate}
    atomic.write(path, json.dumps(found) + "\n")


def _as_interrupt(number: int, frame: object) -> None:
    """What Ctrl-C does, once: `fit` saves its state at the first, and gives up at a second."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.raise_signal(signal.SIGINT)
