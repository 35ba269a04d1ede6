"""Whether a network keeps to what may be lost: measured on held-out data, against a reference.

Few held-out examples say little about an error: with a hundred, one more mistake is a point, and the luckiest of many
states looks better than it is. Where they are too few to see the budget, a search over states is therefore judged more
strictly: by a smaller limit, and by the loss as well. That loss is taken at the temperature that suits each network,
since a network that is trained further becomes surer or less sure of the same answers.

A run that chooses by looks alone, one without noise, has a reserve and a steadier measure (`steady`): the mean of what
the error says and of what the loss says, in points; how many points a nat is worth is seen in the looks themselves. A
loss has about two thirds of the error's uncertainty, and is lucky at other looks.
"""

import copy
import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsevd.errors import ArgumentError, SparseVDError, SparseVDWarning
from sparsevd.training.data import Data, batches, checked
from sparsevd.training.evaluation import EVALUATION_BATCH, Evaluation, Loss, Metric, device_of, evaluate
from sparsevd.training.inputs import Forward, changed
from sparsevd.training.likelihood import Likelihood
from sparsevd.training.weights_read import read_by_an_example

Agreed = Callable[[list[float]], list[float]]
# A point of error that the budget allows is about so much loss, in nats. Chosen among 0.01, 0.02 and 0.03 on breast
# cancer, wine and digits, on splits that no record has (experiments/results/budget_trials.json).
LOSS_OF_A_POINT = 0.02
# How many examples two good networks answer differently: their difference has the standard error √(share / n).
ANSWERED_DIFFERENTLY = 0.01
# Networks of one origin err on the same examples half of the time (ResNet-8 and ResNet-20 on CIFAR-10: 0.3 to 0.8).
SHARED = 0.5
# From here on a network is not dented but destroyed: points of error, and nats where there is no error.
COLLAPSE_POINTS, COLLAPSE_NATS = 3.0, 0.2
# A rate that is high enough to heal cuts may let the held-out error rise by this part of itself before the first cut.
# It rises by 0.3 of itself at the best rate for a ResNet-8 at 75 % zeros, and by 0.2 and 0.7 at a good and at a bad
# rate for a ResNet-20 (experiments/results/budget_trials.json).
BEARABLE = 0.4
FIRST_BATCHES = 5  # to see how many weights an example reads
# Temperatures to try, from surer to less sure.
TEMPERATURES = [2 ** (step / 2) for step in range(-4, 9)]
# What is known of the worth of a nat before the first look counts as a look at this rise of the loss, squared.
FIRST_GUESS = 0.01**2


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

    `rise`, `excess` and `beyond` are parts of a collapse: what was lost and what of it is more than the search aims at,
    both by the steadier measure where there is one; and what is more than the budget itself, by either measure.
    `reserve` is what lies between the two. Of several limits, that with the largest excess is meant.
    """

    evaluation: Evaluation
    room: float
    damage: float
    rise: float
    excess: float
    beyond: float
    reserve: float = 0.0

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
        steady: for a search that decides by looks alone: a standard error in reserve, and the loss counts for half.
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
        steady: bool = False,
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
        self._strict, self._steady = strict, steady
        self.worth = (0.0, 0.0)  # of a nat, in points: sums of rise · nats and of nats² over the looks
        self.compare_with(base, None)
        logits = not isinstance(loss, Likelihood)  # ours have no temperature
        if (self.few or steady) and error is not None and network is not None and logits and _classes(self.data):
            self.compare_with(base, self._measured(network, calibrated=True)[1])

    def read_by_an_example(self, model: nn.Module) -> float:
        """How many weights one of the first held-out examples reads."""
        first = list(itertools.islice(batches(self.data, EVALUATION_BATCH, shuffle=False), FIRST_BATCHES))
        device = device_of(model)
        placed = [(changed(x, lambda tensor: tensor.to(device)), y.to(device)) for x, y in first]
        return read_by_an_example(model, placed, self._forward)

    def compare_with(self, base: Evaluation, calibrated: float | None) -> None:
        """From now on, against what was measured elsewhere: a run that goes on has the reference of its start."""
        self.base, self.base_calibrated = base, calibrated
        self._limits: dict[str, Limit] = {}
        self.withheld, self.few = 0.0, False
        if self._strict and (points := self._allowed["error"]) is not None:
            resolution = self._resolution(base)
            reserve = math.sqrt(SHARED) * resolution if self._steady else max(0.0, resolution - points / 2)
            self.withheld = min(points / 2, reserve)
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
        if self.few and calibrated is not None and points is not None:
            nats = LOSS_OF_A_POINT * points
            self._calibrated_limit = Limit(calibrated, nats, math.inf, max(nats, LOSS_OF_A_POINT / 4))

    def remark(self) -> str:
        """What a user should know of how strictly a search is judged; usually nothing."""
        if not self.withheld:
            return ""
        points = self._allowed["error"] or 0.0
        if self._steady and not self.few:
            return (
                f"the search aims at a rise of {points - self.withheld:.2g} points, since the held-out examples leave "
                f"some {self.withheld:.2g} uncertain, and accepts {points:g}. More examples in val allow more zeros"
            )
        nats = LOSS_OF_A_POINT * points
        also = f", and the loss, each network's at its best temperature, may rise by {nats:.2g} nats at most"
        also = also if self._calibrated_limit is not None else ""
        return (
            f"the held-out examples are few for a budget of {points:g} points: the search may use "
            f"{points - self.withheld:.2g} of it{also}. More examples in val allow more zeros"
        )

    def _resolution(self, base: Evaluation) -> float:
        """The standard error, in points, of the difference between two networks that err on different examples."""
        n = sum(len(y) for _, y in batches(self.data, EVALUATION_BATCH, shuffle=False))
        differing = max(ANSWERED_DIFFERENTLY, (base.error or 0.0) / 100)
        return 100 * math.sqrt(max(1.0, differing * n)) / n

    def measure(self, model: nn.Module) -> Evaluation:
        return self._measured(model)[0]

    def _measured(self, model: nn.Module, calibrated: bool = False) -> tuple[Evaluation, float | None]:
        """Also the cross-entropy of the classes at the best temperature, if that is asked for."""
        metric = _WithTemperatures(self._metric) if calibrated else self._metric
        found = evaluate(model, self.data, self._loss, forward=self._forward, metric=metric)
        by_temperature = metric.losses() if isinstance(metric, _WithTemperatures) else []
        loss, error, value, *by_temperature = self._agreed(
            [found.loss, found.error or 0.0, found.metric or 0.0, *by_temperature]
        )
        agreed = replace(
            found,
            loss=loss,
            error=error if found.error is not None else None,
            metric=value if self._metric is not None else None,
        )
        return agreed, min(by_temperature) if by_temperature else None

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
        kept = [limit.excess(value) - self._reserve(limit) <= 1e-9 for limit, value in self._compared(found)]
        return all(kept)

    def look(self, model: nn.Module) -> Verdict:
        """The network as it is now."""
        found, calibrated = self._measured(model, calibrated=self.base_calibrated is not None)
        room = self.room(found)
        if self._calibrated_limit is not None and calibrated is not None and room >= 0:
            room = min(room, self._calibrated_limit.room(calibrated))
        damage = max(limit.damage(value) for limit, value in self._compared(found))
        steadier = found
        if self._steady and calibrated is not None and found.error is not None:
            steadier = replace(found, error=self._steadier(found.error, calibrated))
        compared = self._compared(steadier)
        both = [*self._compared(found), *compared]
        tightest, reached = max(compared, key=lambda pair: pair[0].excess(pair[1]))
        return Verdict(
            found,
            room,
            damage,
            rise=tightest.damage(reached),
            excess=tightest.excess(reached),
            beyond=max(limit.excess(value) - self._reserve(limit) for limit, value in both),
            reserve=self._reserve(tightest),
        )

    def is_destroyed(self, verdict: Verdict) -> bool:
        """Whether a network that has lost no weight yet has lost more than its rate may cost."""
        found = verdict.evaluation
        for limit, value in self._compared(found):
            is_error = limit is self._limits.get("error") and math.isfinite(found.loss)
            bearable = is_error and value - limit.base <= BEARABLE * limit.base
            if limit.damage(value) > 1 and not bearable:
                return True
        return False

    def _steadier(self, error: float, calibrated: float) -> float:
        """The error as it and the loss together say it."""
        assert self.base.error is not None
        points, nats = error - self.base.error, calibrated - (self.base_calibrated or 0.0)
        if not math.isfinite(nats):
            return math.nan
        if points < COLLAPSE_POINTS:  # a network that is destroyed says nothing of good ones
            self.worth = (self.worth[0] + points * nats, self.worth[1] + nats * nats)
        of_a_nat = (self.worth[0] + FIRST_GUESS / LOSS_OF_A_POINT) / (self.worth[1] + FIRST_GUESS)
        if of_a_nat <= 0:  # where training on lowers the loss, it says nothing of what cuts cost
            return error
        return self.base.error + (points + of_a_nat * nats) / 2

    def _reserve(self, limit: Limit) -> float:
        """What of a limit a search does not aim at, as a part of a collapse."""
        return self.withheld / limit.collapse if limit is self._limits.get("error") else 0.0

    def _compared(self, found: Evaluation) -> list[tuple[Limit, float]]:
        unknown = math.nan
        values = {
            "error": unknown if found.error is None else found.error,
            "loss": found.loss,
            "metric": unknown if found.metric is None else -found.metric,
        }
        return [(limit, values[name]) for name, limit in self._limits.items()]


class _WithTemperatures:
    """A metric that, on the way, sums up the cross-entropy of the classes at all temperatures."""

    def __init__(self, metric: Metric | None):
        self._metric, self._count = metric, 0
        self._sums = torch.zeros(len(TEMPERATURES), dtype=torch.float64)

    def __call__(self, output: Tensor, target: Tensor) -> float | Tensor:
        counted = (target >= 0) & (target < output.shape[-1])  # others are ignored, as an ignore_index is
        logits, classes = output.float()[counted], target[counted].long()
        losses = [F.cross_entropy(logits / temperature, classes, reduction="sum") for temperature in TEMPERATURES]
        self._sums += torch.stack(losses).cpu()
        self._count += len(classes)
        return self._metric(output, target) if self._metric is not None else 0.0

    def losses(self) -> list[float]:
        """The mean at each temperature."""
        return (self._sums / max(1, self._count)).tolist()


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
