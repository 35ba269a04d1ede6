"""Whether a network keeps to what may be lost: measured on held-out data, against a reference.

Few held-out examples say little about an error: with a hundred, one more mistake is a point, and the luckiest of many
states looks better than it is. Where they are too few to see the budget, a search over states is therefore judged more
strictly: by a smaller limit, and by the loss as well. That loss is taken at the temperature that suits each network,
since a network that is trained further becomes surer or less sure of the same answers.
"""

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsevd.errors import ArgumentError, SparseVDError, SparseVDWarning
from sparsevd.layers.modes import in_eval_mode
from sparsevd.training.data import Data, batches, checked
from sparsevd.training.evaluation import EVALUATION_BATCH, Evaluation, Loss, Metric, device_of, evaluate
from sparsevd.training.inputs import Forward, changed

Agreed = Callable[[list[float]], list[float]]
# A point of error that the budget allows is about so much loss, in nats. Chosen among 0.01, 0.02 and 0.03 on breast
# cancer, wine and digits, on splits that no record has (experiments/results/budget_trials.json).
LOSS_OF_A_POINT = 0.02
# How many examples two good networks answer differently: their difference has the standard error √(share / n).
ANSWERED_DIFFERENTLY = 0.01
# From here on a network is not dented but destroyed: points of error, and nats where there is no error.
COLLAPSE_POINTS, COLLAPSE_NATS = 3.0, 0.2
# Temperatures to try, from surer to less sure.
TEMPERATURES = [2 ** (step / 2) for step in range(-4, 9)]


@dataclass(frozen=True)
class Limit:
    """One number that may rise by so much over that of the reference, and what rise is a collapse."""

    base: float
    allowed: float
    collapse: float
    scale: float  # the unit of what is left of it

    def room(self, found: float) -> float:
        """What is left, negative beyond the limit; NaN is beyond it."""
        left = (self.base + self.allowed - found) / self.scale
        return left + 1e-9 if math.isfinite(left) else -math.inf

    def damage(self, found: float) -> float:
        """The rise, as a part of a collapse."""
        rise = (found - self.base) / self.collapse
        return rise if math.isfinite(rise) else math.inf

    def excess(self, found: float) -> float:
        """What of the rise is beyond the limit, as a part of a collapse; negative within it."""
        return self.damage(found) - self.allowed / self.collapse


@dataclass(frozen=True)
class Verdict:
    """What was measured, how much of the budget is left, in parts of it, and how near to a collapse it is.

    `excess` is what is beyond the budget, as a part of a collapse.
    """

    evaluation: Evaluation
    room: float
    damage: float
    excess: float

    @property
    def keeps(self) -> bool:
        return self.room >= 0


class Judge:
    """Measures networks on held-out data.

    Args:
        reference: the network to compare with, or its error in %.
        data: held-out data.
        error, loss_rise, metric_fall: what may be lost of each, or None.
        strict: of few examples, for a search over many states.
        agreed: numbers as process 0 has measured them, where several decide by them.
    """

    def __init__(
        self,
        reference: nn.Module | float,
        data: Data,
        loss: Loss,
        forward: Forward,
        metric: Metric | None = None,
        *,
        error: float | None = None,
        loss_rise: float | None = None,
        metric_fall: float | None = None,
        strict: bool = False,
        agreed: Agreed = list,
    ):
        self.data, self._forward, self._metric = checked(data, "the held-out data"), forward, metric
        self._agreed = agreed
        self._loss = copy.deepcopy(loss)  # one that learns from the training data must not change the measure
        self._allowed = {"error": error, "loss": loss_rise, "metric": metric_fall}
        network = reference if isinstance(reference, nn.Module) else None
        if isinstance(reference, nn.Module):
            base = self._measured_first(reference)
            unknown = [name for name in ("loss", "metric") if not math.isfinite(getattr(base, name) or 0.0)]
            if unknown:
                raise ArgumentError(
                    f"on the held-out data the {' and the '.join(unknown)} of the reference is not a finite number, so "
                    "nothing can be compared with it; look at val"
                )
        elif loss_rise is not None or metric_fall is not None:
            raise ArgumentError(f"reference={reference} is an error; for a loss or a metric give the network")
        else:
            base = Evaluation(math.nan, float(reference))
        if error is not None and base.error is None:
            raise ArgumentError("max_error_increase is for classification, and this is none; give max_loss_increase")
        if error is not None:
            _warn_of_one_class(self.data)
        self._strict = strict
        self.compare_with(base, None)
        if self.few and network is not None and _classes(self.data):
            self.compare_with(base, self._calibrated(network))

    def compare_with(self, base: Evaluation, calibrated: float | None) -> None:
        """From now on, against what was measured elsewhere: a run that goes on has the reference of its start."""
        self.base, self.base_calibrated = base, calibrated
        self._limits: dict[str, Limit] = {}
        self.withheld, self.few = 0.0, False
        if self._strict and (points := self._allowed["error"]) is not None:
            resolution = self._resolution(base)
            self.withheld = min(points / 2, max(0.0, resolution - points / 2))
            self.few = resolution > points
        if (points := self._allowed["error"]) is not None and base.error is not None:
            unit = max(points, 0.25)
            self._limits["error"] = Limit(base.error, points - self.withheld, max(COLLAPSE_POINTS, points), unit)
        if (nats := self._allowed["loss"]) is not None:
            self._limits["loss"] = Limit(base.loss, nats, max(COLLAPSE_NATS, nats), max(nats, 0.01))
        if (fall := self._allowed["metric"]) is not None and base.metric is not None:
            unit = max(fall, 0.01 * abs(base.metric), 1e-6)
            self._limits["metric"] = Limit(-base.metric, fall, 4 * unit, unit)
        self._calibrated_limit = None
        if calibrated is not None and points is not None:
            nats = LOSS_OF_A_POINT * points
            self._calibrated_limit = Limit(calibrated, nats, math.inf, max(nats, LOSS_OF_A_POINT / 4))

    def remark(self) -> str:
        """What a user should know of how strictly a search is judged; usually nothing."""
        if not self.withheld:
            return ""
        points = self._allowed["error"] or 0.0
        nats = LOSS_OF_A_POINT * points
        also = f", and the loss, each network's at its best temperature, may rise by {nats:.2g} nats at most"
        also = also if self.base_calibrated is not None else ""
        return (
            f"the held-out examples are few for a budget of {points:g} points: the search may use "
            f"{points - self.withheld:.2g} of them{also}. More examples in val allow more zeros"
        )

    def _resolution(self, base: Evaluation) -> float:
        """The standard error, in points, of the difference between two networks that err on different examples."""
        n = sum(len(y) for _, y in batches(self.data, EVALUATION_BATCH, shuffle=False))
        differing = max(ANSWERED_DIFFERENTLY, (base.error or 0.0) / 100)
        return 100 * math.sqrt(max(1.0, differing * n)) / n

    def measure(self, model: nn.Module) -> Evaluation:
        found = evaluate(model, self.data, self._loss, forward=self._forward, metric=self._metric)
        loss, error, metric = self._agreed([found.loss, found.error or 0.0, found.metric or 0.0])
        return replace(
            found,
            loss=loss,
            error=error if found.error is not None else None,
            metric=metric if found.metric is not None else None,
        )

    def _measured_first(self, reference: nn.Module) -> Evaluation:
        """The first look at this data: what does not fit together shows here."""
        try:
            return self.measure(reference)
        except SparseVDError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as problem:  # what torch raises for shapes and types
            raise ArgumentError(
                f"the network that a budget is compared with cannot be measured on the held-out data: {problem}. Its "
                "inputs, outputs and targets must be those of the training data"
            ) from problem

    def room(self, found: Evaluation) -> float:
        """What an evaluation leaves of the budget."""
        return min(limit.room(value) for limit, value in self._compared(found))

    def within(self, found: Evaluation | None) -> bool:
        """Whether the budget itself is kept, of which a search may use a part only."""
        if found is None:
            return True
        kept = [limit.room(value) + self.withheld / limit.scale >= 0 for limit, value in self._compared(found)]
        return all(kept)

    def look(self, model: nn.Module) -> Verdict:
        """The network as it is now."""
        found = self.measure(model)
        room = self.room(found)
        if self._calibrated_limit is not None and room >= 0:
            room = min(room, self._calibrated_limit.room(self._calibrated(model)))
        compared = self._compared(found)
        damage = max(limit.damage(value) for limit, value in compared)
        return Verdict(found, room, damage, max(limit.excess(value) for limit, value in compared))

    def _compared(self, found: Evaluation) -> list[tuple[Limit, float]]:
        unknown = math.nan
        values = {
            "error": unknown if found.error is None else found.error,
            "loss": found.loss,
            "metric": unknown if found.metric is None else -found.metric,
        }
        return [(limit, values[name]) for name, limit in self._limits.items()]

    @torch.no_grad()
    def _calibrated(self, model: nn.Module) -> float:
        """The cross-entropy of the classes at the best temperature."""
        device = device_of(model)
        outputs: list[Tensor] = []
        targets: list[Tensor] = []
        with in_eval_mode(model):
            for x, y in batches(self.data, EVALUATION_BATCH, shuffle=False):
                outputs.append(self._forward(model, changed(x, lambda tensor: tensor.to(device))).float().cpu())
                targets.append(y.cpu())
        logits, target = torch.cat(outputs), torch.cat(targets)
        losses = [F.cross_entropy(logits / temperature, target).item() for temperature in TEMPERATURES]
        return min(self._agreed(losses))


def _warn_of_one_class(data: Data) -> None:
    """Held-out data that was cut off a sorted set: its error says nothing of the other classes."""
    targets = [y for _, y in batches(data, EVALUATION_BATCH, shuffle=False)]
    found = torch.cat([y.flatten() for y in targets])
    if len(found) > 1 and bool((found == found[0]).all()):
        warnings.warn(
            f"all {len(found):,} held-out examples are of class {found[0].item():g}, so the budget says nothing "
            "about the others; shuffle the data before it is split",
            SparseVDWarning,
            stacklevel=6,
        )


def _classes(data: Data) -> bool:
    """Whether each example has one class."""
    _, target = next(batches(data, 2, shuffle=False))
    return target.ndim == 1 and not target.is_floating_point()
