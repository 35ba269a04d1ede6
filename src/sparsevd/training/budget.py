"""What the user can afford: a share of zeros to reach, an error, a loss or a metric not to exceed, bytes to fit in.

`prune` asks it for the threshold. A sparsity is a quantile of log α. Everything else is a search for the sparsest
network that still keeps to it, measured on held-out data: error against sparsity is flat and then falls off a cliff, so
a coarse walk finds the cliff, and bisection its edge.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import nn

from sparsevd import modelfile
from sparsevd.conversion import lost_already, threshold_of_sparsity
from sparsevd.errors import ArgumentError, SparseVDWarning
from sparsevd.posterior import checked_sparsity, noisy_modules, required_posteriors, threshold_for
from sparsevd.training.data import Data
from sparsevd.training.evaluation import Evaluation, Loss, Metric, evaluate
from sparsevd.training.inputs import Forward, call
from sparsevd.training.judge import Agreed, Judge

LIMITS = ("sparsity", "max_error_increase", "max_loss_increase", "max_metric_decrease", "max_bytes")
WALK = 8  # steps from what the network has lost already to one weight left
BISECTIONS = 8  # between the last step that kept to the budget and the first that did not


@dataclass(frozen=True)
class Point:
    """One network of the search: the share of zeros, its threshold, and what it measures as."""

    sparsity: float
    threshold: float
    evaluation: Evaluation | None = None
    size: int | None = None

    def __str__(self) -> str:
        parts = [f"{100 * self.sparsity:.2f} % zeros"]
        if self.evaluation is not None:
            shown = self.evaluation
            parts.append(f"error {shown.error:.2f} %" if shown.error is not None else f"loss {shown.loss:.4g}")
            parts += [f"R² {shown.r2:.3f}"] if shown.r2 is not None else []
            parts += [f"metric {shown.metric:.4g}"] if shown.metric is not None else []
        return ", ".join([*parts, *([f"{self.size:,} bytes"] if self.size is not None else [])])


@dataclass(frozen=True)
class Budget:
    """What may be lost, or must be reached; several limits hold together.

        sparsevd.prune(model, budget=sparsevd.Budget(max_error_increase=0.5, reference=dense), data=held_out)

    Args:
        sparsity: the share of the weights of Sparse VD layers that are zero, such as 0.95; alone, it is hit exactly.
        max_error_increase: points of % that the error may rise.
        max_loss_increase: how much the mean loss may rise.
        max_metric_decrease: how much `metric` may fall.
        max_bytes: of the file that `sparsevd.save(model, path, precision="posterior")` writes.
        metric: a number of your own, higher is better: the mean over a batch, of the output and the target.
        reference: what is compared with: a network, or its error in %. Without one, the model before any pruning.
    """

    sparsity: float | None = None
    max_error_increase: float | None = None
    max_loss_increase: float | None = None
    max_metric_decrease: float | None = None
    max_bytes: int | None = None
    metric: Metric | None = field(default=None, compare=False)
    reference: nn.Module | float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if all(getattr(self, name) is None for name in LIMITS):
            raise ArgumentError(f"a budget needs a limit: give {', '.join(LIMITS[:-1])} or {LIMITS[-1]}")
        for name in LIMITS:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ArgumentError(f"{name}={value!r} must be a number")
            if name != "sparsity" and value is not None and not 0 <= value < math.inf:
                raise ArgumentError(f"{name}={value!r} must be zero or a positive number")
        if self.metric is not None and not callable(self.metric):
            raise ArgumentError(f"metric={self.metric!r} must be a function of the output and the target")
        if isinstance(self.reference, bool) or not isinstance(self.reference, nn.Module | int | float | None):
            raise ArgumentError(f"reference is a {type(self.reference).__name__}; give a network, or its error in %")
        if isinstance(self.reference, int | float) and not 0 <= self.reference <= 100:
            raise ArgumentError(f"reference={self.reference!r} must be an error in %, from 0 to 100")
        if self.sparsity is not None:
            checked_sparsity(self.sparsity)
        if self.max_metric_decrease is not None and self.metric is None:
            raise ArgumentError("max_metric_decrease needs the metric that it is about; give metric=")

    @property
    def measures(self) -> bool:
        """Whether data is needed to see if it is kept."""
        return any(v is not None for v in (self.max_error_increase, self.max_loss_increase, self.max_metric_decrease))

    def __str__(self) -> str:
        """What was asked, for people and for a run that is resumed."""
        asked = [f"{name}={value:g}" for name, value in self.limits().items() if value is not None]
        if isinstance(self.reference, int | float):
            asked.append(f"reference={self.reference:g}")
        return ", ".join(asked)

    def limits(self) -> dict[str, float | None]:
        """Its numbers, by name."""
        return {name: getattr(self, name) for name in LIMITS}

    def judge(
        self,
        model: nn.Module,
        data: Data,
        loss: Loss = F.cross_entropy,
        forward: Forward = call,
        strict: bool = False,
        steady: bool = False,
        agreed: Agreed = list,
    ) -> Judge:
        """Who measures networks on this data; without a reference, against the model as it is now."""
        return Judge(
            model if self.reference is None else self.reference,
            data,
            loss,
            forward,
            self.metric,
            error=self.max_error_increase,
            loss_rise=self.max_loss_increase,
            metric_fall=self.max_metric_decrease,
            strict=strict,
            steady=steady,
            agreed=agreed,
        )

    def threshold_of(
        self, model: nn.Module, data: Data | None = None, loss: Loss = F.cross_entropy, forward: Forward = call
    ) -> float:
        """Where to cut log α: the sparsest cut that keeps to the budget, measured on this data."""
        if self.measures and data is None:
            raise ArgumentError("the budget limits what is lost on data, and there is none; give held-out data (data=)")
        if self.sparsity is not None and not self.measures and self.max_bytes is None:
            return threshold_of_sparsity(model, self.sparsity)
        return Search(self, model, data, loss, forward).run().threshold


def _threshold(model: nn.Module, sparsity: float) -> float:
    return threshold_for([(each.theta, each.log_sigma2) for each in required_posteriors(model)], sparsity)


def packed_size(model: nn.Module) -> int:
    """Bytes of the file, without a word about layers that a cut has emptied or weights that rounding loses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SparseVDWarning)
        return len(modelfile.pack(model, precision="posterior")[0])


@contextmanager
def cut_at(model: nn.Module, threshold: float) -> Iterator[None]:
    """In eval mode the network then computes as if pruned there."""
    before = {module: module.threshold for module in noisy_modules(model).values()}
    for module in before:
        module.threshold = threshold
    try:
        yield
    finally:
        for module, own in before.items():
            module.threshold = own


class Search:
    """The sparsest cut of a network that keeps to a budget."""

    def __init__(
        self,
        budget: Budget,
        model: nn.Module,
        data: Data | None = None,
        loss: Loss = F.cross_entropy,
        forward: Forward = call,
    ):
        self.budget, self.model, self.data, self.loss, self.forward = budget, model, data, loss, forward
        self.curve: list[Point] = []
        self.judge: Judge | None = None
        if budget.measures and data is not None:
            with cut_at(model, math.inf):  # the model before any pruning, where nothing else is given
                self.judge = budget.judge(model, data, loss, forward)

    def run(self) -> Point:
        """The point that was found. One that does not keep to the budget is said, with the curve."""
        start = self._at(lost_already(self.model), math.inf)
        found = self._sparsest(start) if self.budget.measures else self._largest_that_fits(start)
        enough = self.budget.sparsity is None or found.sparsity >= self.budget.sparsity - 1e-9
        return found if enough and self._good_enough(found) and not self._too_large(found) else self._cannot(found)

    def _sparsest(self, good: Point) -> Point:
        """The last one before the cliff."""
        if not self._good_enough(good):
            return good
        bad = 1.0
        for share in _walk(max(good.sparsity, self.budget.sparsity or 0.0)):
            point = self._at(share)
            if not self._good_enough(point):
                bad = point.sparsity
                break
            good = point
        for _ in range(BISECTIONS):
            middle = self._at(_between(good.sparsity, bad))
            if self._good_enough(middle):
                good = middle
            else:
                bad = middle.sparsity
        return good

    def _largest_that_fits(self, start: Point) -> Point:
        """As few zeros as the file may have: nothing else says what they cost."""
        if not self._too_large(start) and self.budget.sparsity is None:
            return start
        too_large = start.sparsity
        for share in _walk(max(start.sparsity, self.budget.sparsity or 0.0)):
            fits = self._at(share)
            if not self._too_large(fits):
                break
            too_large = share
        else:
            return fits
        for _ in range(BISECTIONS if fits.sparsity > too_large else 0):
            middle = self._at(_between(too_large, fits.sparsity))
            if self._too_large(middle):
                too_large = middle.sparsity
            else:
                fits = middle
        return fits

    def _at(self, sparsity: float, threshold: float | None = None) -> Point:
        threshold = _threshold(self.model, sparsity) if threshold is None else threshold
        measured, size = None, None
        if self.data is not None:
            with cut_at(self.model, threshold):
                measured = evaluate(self.model, self.data, self.loss, forward=self.forward, metric=self.budget.metric)
        if self.budget.max_bytes is not None:
            with cut_at(self.model, threshold):
                size = packed_size(self.model)
        self.curve.append(Point(sparsity, threshold, measured, size))
        return self.curve[-1]

    def _good_enough(self, point: Point) -> bool:
        return point.evaluation is None or self.judge is None or self.judge.room(point.evaluation) >= 0

    def _too_large(self, point: Point) -> bool:
        limit = self.budget.max_bytes
        return limit is not None and point.size is not None and point.size > limit

    def _cannot(self, best: Point) -> Point:
        shown = "\n".join(f"  {point}" for point in sorted(self.curve, key=lambda point: point.sparsity))
        warnings.warn(
            f"the budget cannot be kept; the best that was found has {best}. What was measured:\n{shown}",
            SparseVDWarning,
            stacklevel=6,
        )
        return best


def _walk(least: float) -> list[float]:
    """Shares of zeros, each with half as many weights left as the one before."""
    return [1 - (1 - least) * 0.5**step for step in range(WALK)]


def _between(good: float, bad: float) -> float:
    """In the middle, counted by the logarithm of the weights that are left."""
    left = math.sqrt(max(1 - good, 1e-9) * max(1 - bad, 1e-6))
    return 1 - left
