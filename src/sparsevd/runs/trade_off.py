"""What pruning costs, measured: threshold by threshold, and example by example against the network before it."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsevd import kernels, modelfile
from sparsevd.conversion import prune
from sparsevd.errors import SparseVDWarning
from sparsevd.graph import Graph
from sparsevd.graph.cost import cost
from sparsevd.layers.modes import in_eval_mode
from sparsevd.posterior import Posterior, required_posteriors
from sparsevd.reporting.findings import Changes, Example, Point, TradeOff
from sparsevd.training.data import Batch, Data, batches, checked
from sparsevd.training.inputs import call, changed
from sparsevd.training.price import STANDARD_ERRORS, cheap_threshold

# What lower thresholds are tried: those that keep these shares of what the run's own keeps. Weights lie at other values
# of log α in every network, and shares of them give points that lie well apart in all.
SHARES = (0.15, 0.3, 0.45, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
HIGHER = (1.0, 2.0)  # than the run's own, where that changes anything
NETWORKS = len(SHARES) + len(HIGHER) + 2  # these, the run's own, and that of "auto"
# All thresholds together may take so many multiply-adds, some seconds of one core; but few examples say little.
MOST_WORK = 2e11
FEWEST, MOST = 500, 10_000
BATCH = 1000
SHOWN = 12
SMALL_RISE = 0.01  # of the loss, where errors cannot be counted
# A byte of weights takes the coder in Python about a microsecond, in C a hundredth of that.
LARGEST_PACKED = 20_000_000 if kernels.available() else 500_000


@dataclass(frozen=True)
class Sample:
    """Examples to measure on, as batches that are there, and what they are."""

    batches: list[Batch]
    described: str
    held_out: bool

    @property
    def size(self) -> int:
        return sum(len(target) for _, target in self.batches)


@dataclass(frozen=True)
class Judged:
    """A network on a sample: the mean loss, and for one class per example what it predicts and what is right."""

    loss: float
    predicted: Tensor | None
    labels: Tensor | None

    @property
    def wrong(self) -> Tensor | None:
        return None if self.predicted is None or self.labels is None else self.predicted.ne(self.labels)

    @property
    def score(self) -> float:
        """The error in %, or the loss where there is none."""
        return self.loss if self.wrong is None else 100 * self.wrong.double().mean().item()


def sample(data: Data, what: str, held_out: bool, networks: int, graph: Graph | None) -> Sample:
    """As many of the first examples as so many networks of this size can take."""
    work = max(1, cost(graph).dense) if graph else MOST_WORK / (networks * 2 * FEWEST)
    most = int(min(MOST, max(FEWEST, MOST_WORK / (networks * work))))
    found: list[Batch] = []
    count = 0
    for x, y in batches(checked(data, "data"), BATCH, shuffle=False):
        if count + len(y) >= most:
            left = most - count
            found.append((changed(x, lambda part, left=left: part[:left]), y[:left]))  # type: ignore[misc]
            count = most
            break
        found.append((x, y))
        count += len(y)
    return Sample(found, f"{count:,} {what}", held_out)


@torch.no_grad()
def judge(network: nn.Module, on: Sample) -> Judged:
    total, predicted, labels = 0.0, [], []
    with in_eval_mode(network):
        for x, y in on.batches:
            output = call(network, x)
            total += F.cross_entropy(output, y).item() * len(y)
            if output.ndim == 2 and y.ndim == 1 and not y.is_floating_point():
                predicted.append(output.argmax(1))
                labels.append(y)
    if len(labels) < len(on.batches):
        return Judged(total / on.size, None, None)
    return Judged(total / on.size, torch.cat(predicted), torch.cat(labels))


def trade_off(model: nn.Module, on: Sample, graph: Graph | None, say: Callable[[str], None]) -> TradeOff:
    """The network at thresholds around its own, where they change anything."""
    found = required_posteriors(model)
    own, auto, candidates = _candidates(found)
    with _quiet():
        chosen = prune(model)
        base = judge(chosen, on)
        say(f"measuring up to {len(candidates)} thresholds on {on.described}")
        points: dict[int, Point] = {}  # by what is kept: thresholds that change nothing are one
        for threshold in candidates:
            is_own = threshold == own
            kept = sum(int(each.kept(None if is_own else threshold).sum()) for each in found)
            if kept in points or not (kept or is_own):
                continue
            network = chosen if is_own else prune(model, threshold=threshold)
            judged = base if is_own else judge(network, on)
            lost, won = _lost_and_won(base, judged)
            size = packed_size(network, graph)
            points[kept] = Point(threshold, kept, size, judged.score, lost, won, _harms(base, judged))
    ordered = sorted(points.values(), key=lambda point: point.threshold)
    thresholds = [point.threshold for point in ordered]
    return TradeOff(
        tuple(ordered),
        thresholds.index(own),
        base.wrong is not None,
        on.described,
        on.held_out,
        auto if auto in thresholds and auto != own else None,
    )


def _candidates(found: Sequence[Posterior]) -> tuple[float, float, list[float]]:
    """The run's own threshold, that of "auto", and all that are tried: the own one first, so that it stays."""
    there = torch.cat([each.log_alpha()[each.theta != 0].flatten() for each in found]).double()
    own = max(each.threshold for each in found)
    if math.isinf(own):  # the same as any number above all log α
        own = math.ceil(there.max().item()) if len(there) else 0.0
    kept = there[there <= own].sort().values
    auto = round(cheap_threshold([each.whole() for each in found], own), 2)
    lower = {round(kept[int(share * (len(kept) - 1))].item(), 2) for share in SHARES} if len(kept) else set()
    others = {*lower, *(own + by for by in HIGHER)} - {own, auto}
    return own, auto, [own, auto, *sorted(others)] if auto < own else [own, *sorted(others)]


def packed_size(network: nn.Module, graph: Graph | None) -> int | None:
    """The bytes of the lossless model file; None where that would take too long here."""
    if sum(tensor.numel() for tensor in network.state_dict().values()) > LARGEST_PACKED:
        return None
    with _quiet():
        return len(modelfile.pack(network, graph=graph)[0])


def changes(pruned: nn.Module, reference: nn.Module, what: str, is_dense: bool, on: Sample) -> Changes | None:
    """How predictions differ from the reference's; None where this is no classification of one class per example."""
    before, after = judge(reference, on), judge(pruned, on)
    if before.predicted is None or after.predicted is None or before.labels is None:
        return None
    lost, won = _lost_and_won(before, after)
    differ = (before.predicted != after.predicted).nonzero().flatten()
    worse = before.predicted[differ] == before.labels[differ]
    order = torch.cat([differ[worse], differ[~worse]])[:SHOWN]  # what was lost comes first
    examples = tuple(
        Example(
            index,
            int(before.labels[index]),
            int(before.predicted[index]),
            int(after.predicted[index]),
            _image(on, index),
        )
        for index in order.tolist()
    )
    return Changes(
        reference=what,
        is_dense=is_dense,
        examples=on.size,
        measured_on=on.described,
        lost=lost or 0,
        won=won or 0,
        other=len(differ) - (lost or 0) - (won or 0),
        reference_error=before.score,
        error=after.score,
        shown=examples,
    )


def _image(on: Sample, index: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None:
    """The input of one example, if it is an image, grey or in colour."""
    for x, y in on.batches:
        if index < len(y):
            one = x[index] if isinstance(x, Tensor) else None
            is_image = one is not None and one.ndim == 3 and one.shape[0] in (1, 3) and max(one.shape[1:]) <= 96
            return one.float().numpy() if one is not None and is_image else None
        index -= len(y)
    return None


def _lost_and_won(before: Judged, after: Judged) -> tuple[int | None, int | None]:
    if before.wrong is None or after.wrong is None:
        return None, None
    return int((after.wrong & ~before.wrong).sum()), int((before.wrong & ~after.wrong).sum())


def _harms(before: Judged, after: Judged) -> bool:
    """Whether it is worse by more than the noise of measuring on the same examples."""
    lost, won = _lost_and_won(before, after)
    if lost is None or won is None:
        return after.loss > before.loss + SMALL_RISE * abs(before.loss)
    return lost - won > STANDARD_ERRORS * math.sqrt(lost + won)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without a word of layers that are emptied on the way: the points show it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SparseVDWarning)
        yield
