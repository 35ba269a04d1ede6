"""What a report shows of a run: plain data, without a word about where it was read or how it is drawn."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsevd.reporting.summary import ModelSummary

Floats = NDArray[np.floating]


@dataclass(frozen=True)
class LogAlpha:
    """log α of the weights of one layer: how many in each bin. `gone` were dropped for good in training."""

    layer: str
    edges: Floats
    counts: NDArray[np.integer]
    gone: int
    threshold: float


@dataclass(frozen=True)
class Mask:
    """Where the kept weights of a layer are: the share of kept ones at each point [row, column].

    `aspect` is height over width as it is to be drawn.
    """

    layer: str
    shares: Floats
    aspect: float
    caption: str  # what is down, what is across


@dataclass(frozen=True)
class Inputs:
    """How many kept weights read each pixel of an input [height, width], of `of` values in all."""

    layer: str
    counts: Floats
    read: int
    of: int


@dataclass(frozen=True)
class Point:
    """The network at one threshold. `score` is the error in %, or the mean loss where there is no error.

    `lost` and `won` count the examples that the network at the run's own threshold has right and this one wrong, and
    the other way round; `harms` is whether that is worse by more than the noise of measuring.
    """

    threshold: float
    kept: int
    bytes: int | None
    score: float
    lost: int | None = None
    won: int | None = None
    harms: bool = False


@dataclass(frozen=True)
class TradeOff:
    """What thresholds cost and bring; `chosen` is the index of the run's own."""

    points: tuple[Point, ...]
    chosen: int
    is_error: bool
    measured_on: str  # "5,000 held-out examples"
    held_out: bool
    auto: float | None = None  # where `threshold="auto"` would cut


@dataclass(frozen=True)
class Example:
    """An example whose prediction is another one after pruning; `image` is [channels, height, width] or None."""

    index: int
    label: int
    before: int
    after: int
    image: Floats | None


@dataclass(frozen=True)
class Changes:
    """How the predictions changed against the reference network."""

    reference: str  # "the dense network that the run began with"
    is_dense: bool
    examples: int
    measured_on: str
    lost: int
    won: int
    other: int  # wrong before and after, but another class
    reference_error: float
    error: float
    shown: tuple[Example, ...]


@dataclass(frozen=True)
class Time:
    """Milliseconds for one batch in one way."""

    way: str
    batch: int
    milliseconds: float
    times_faster: float


@dataclass
class Findings:
    """All about one run. `missing` says in sentences what is not on the page, and why."""

    name: str
    path: str
    summary: ModelSummary
    threshold: float | None
    facts: dict[str, str] = field(default_factory=dict)  # what it was trained on, by which command, where and when
    finished: bool = False
    epochs: list[Any] = field(default_factory=list)  # EpochMetrics
    remarks: list[str] = field(default_factory=list)
    log_alpha: list[LogAlpha] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    inputs: Inputs | None = None
    units: str | None = None  # "300-100-10 → 120-47-10"
    multiply_adds: tuple[int, int] | None = None  # dense, compacted
    bytes: int | None = None  # of the lossless model file
    dense_bytes: int = 0
    error: float | None = None  # of the pruned network on the test data
    error_before: float | None = None  # of the same without pruning
    paper: tuple[float, float] | None = None
    trade_off: TradeOff | None = None
    changes: Changes | None = None
    times: list[Time] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
