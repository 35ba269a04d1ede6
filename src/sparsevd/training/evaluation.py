"""How good a network is: loss, error and a metric of one's own on data, and the variational bound."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsevd.errors import ArgumentError
from sparsevd.layers.modes import in_eval_mode, noise_restored
from sparsevd.layers.recurrent import one_sample
from sparsevd.posterior import noisy_modules, switch_noise
from sparsevd.training.data import Batch, Data, batches, checked, size
from sparsevd.training.gaussian import Gaussian, RSquared
from sparsevd.training.inputs import Forward, call, changed
from sparsevd.training.likelihood import Likelihood, counted_in, counts, ignored_by, is_cross_entropy
from sparsevd.training.objective import kl

Loss = Callable[[Tensor, Tensor], Tensor]
# (output, target) of a batch → its mean over the examples.
Metric = Callable[[Tensor, Tensor], float | Tensor]
# So many examples at once: the feature maps of a thousand images no longer fit into a cache, which takes twice as long.
EVALUATION_BATCH = 250
MOST_NATS = 700  # e to this is near the largest float


@dataclass(frozen=True)
class Evaluation:
    """The mean loss, for classification the error in %, and the mean of a metric if one was given.

    With several labels per example (`Bernoulli`) the error is the share of wrong labels; `r2` is for numbers
    (`Gaussian`), `perplexity` for cross-entropy on targets (example, position), as of texts.
    """

    loss: float
    error: float | None
    metric: float | None = None
    r2: float | None = None
    perplexity: float | None = None


def wrong(output: object, target: Tensor, loss: Loss = F.cross_entropy) -> float | None:
    """How many examples are classified wrongly; None where this is no classification of one class per example, and no
    likelihood that counts otherwise. Examples whose target is ignored are taken to be as the others of the batch."""
    found = _missed(output, target, loss)
    if found is None:
        return None
    missed, counted = found
    return missed * len(target) / counted if counted else 0.0


def _missed(output: object, target: Tensor, loss: Loss) -> tuple[float, int] | None:
    """How many targets are missed, and of how many; or None, as above."""
    if isinstance(loss, Likelihood) and isinstance(output, Tensor):
        share = loss.wrong(output, target)
        return None if share is None else (share, len(target))
    if not isinstance(output, Tensor) or output.ndim != 2 or target.ndim != 1 or target.is_floating_point():
        return None
    counted = counts(loss, target)
    missed = (output.detach().argmax(dim=1) != target) & counted
    found, of = torch.stack([missed.sum(), counted.sum()]).tolist()  # together: a GPU is waited for once
    return found, of


def evaluate(
    model: nn.Module,
    data: Data,
    loss: Loss = F.cross_entropy,
    *,
    forward: Forward = call,
    metric: Metric | None = None,
) -> Evaluation:
    """Loss and error of the network as it will be used: in eval mode, with pruned weights and no noise.

    Args:
        model: any network.
        data: as for `fit`.
        loss: mean loss of a batch, of the output and the target. With torch's cross-entropy the result is the mean over
            all targets, however they are batched, but for those of its `ignore_index`; otherwise that over examples.
        forward: how to call the model, (model, inputs) → output, where model(x), model(*x) or model(**x) is not it.
        metric: any other number to average over the examples, of the output and the target of a batch.
    """
    with in_eval_mode(model):
        return _average(model, _passed(data), loss, forward, metric)


def evaluate_batches(model: nn.Module, data: Iterable[Batch], loss: Loss, forward: Forward = call) -> Evaluation:
    """The same on batches that are there already."""
    with in_eval_mode(model):
        return _average(model, data, loss, forward)


def elbo(
    model: nn.Module,
    train: Data,
    loss: Loss = F.cross_entropy,
    n_train: int | None = None,
    *,
    forward: Forward = call,
) -> float:
    """The variational bound (eq. 3) on the training set, with one sample of the noise per example (eq. 4), in nats.

    Only the Sparse VD layers are put in training mode, so that batch normalisation keeps its statistics.
    """
    if n_train is not None and (isinstance(n_train, bool) or not isinstance(n_train, int) or n_train < 1):
        raise ArgumentError(f"n_train={n_train!r} must be a positive integer")
    examples = 0 if n_train else size(checked(train, "train"), "train")
    with _only_noisy(model, noisy_modules(model).values()):
        sums = _sums(model, _passed(train), loss, forward)
        n = n_train or examples * sums.targets_of_one  # a loader may leave out the last, incomplete batch
        return -(n * sums.evaluation().loss + kl(model).item())


@torch.no_grad()
def bound_on(model: nn.Module, data: Iterable[Batch], loss: Loss, n: int, forward: Forward = call) -> float:
    """The bound of N examples, estimated from these batches."""
    with _only_noisy(model, noisy_modules(model).values()):
        return -(n * _average(model, data, loss, forward).loss + kl(model).item())


def noisy_loss(model: nn.Module, noisy: Iterable[nn.Module], data: Data, loss: Loss, forward: Forward = call) -> float:
    """The mean loss with these modules in training mode and all others in eval mode."""
    with _only_noisy(model, noisy):
        return _average(model, _passed(data), loss, forward).loss


@contextmanager
def _only_noisy(model: nn.Module, noisy: Iterable[nn.Module]) -> Iterator[None]:
    with in_eval_mode(model), noise_restored(model):
        switch_noise(model, True)
        for module in noisy:
            module.train()
        yield


def _passed(data: Data) -> Iterator[Batch]:
    return batches(checked(data, "data"), EVALUATION_BATCH, shuffle=False)


def device_of(model: nn.Module) -> torch.device:
    """Where the first parameter is, or the first buffer of a network that has no parameters."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        return tensor.device
    raise ArgumentError(f"{type(model).__name__} has no parameters")


def _average(
    model: nn.Module, data: Iterable[Batch], loss: Loss, forward: Forward = call, metric: Metric | None = None
) -> Evaluation:
    return _sums(model, data, loss, forward, metric).evaluation()


@torch.no_grad()
def _sums(
    model: nn.Module, data: Iterable[Batch], loss: Loss, forward: Forward = call, metric: Metric | None = None
) -> "_Sums":
    device = device_of(model)
    sums = _Sums(loss, metric)
    for x, y in data:
        x, y = changed(x, lambda tensor: tensor.to(device)), y.to(device)
        with one_sample(model):
            output = forward(model, x)
        sums.add(output, y)
    return sums


class _Sums:
    """What the batches add up to. A batch may have more targets than examples, of which some may count for nothing, so
    the loss, the error and the metric are each divided by what they are a mean over."""

    def __init__(self, loss: Loss, metric: Metric | None):
        self._loss, self._metric = loss, metric
        self._total, self._measured, self._missed = 0.0, 0.0, 0.0
        self._examples, self._targets, self._classified = 0, 0, 0
        self._classification, self._tokens = True, is_cross_entropy(loss)
        self._r2 = RSquared(loss) if isinstance(loss, Gaussian) else None

    def add(self, output: Tensor, y: Tensor) -> None:
        targets = counted_in(self._loss, y)
        if targets:  # the mean over none is NaN
            self._total += self._loss(output, y).item() * targets
        self._targets += targets
        self._examples += len(y)
        self._measured += float(self._metric(output, y)) * len(y) if self._metric else 0.0
        if self._r2 is not None:
            self._r2.add(output, y)
        self._tokens = self._tokens and y.ndim == 2 and not y.is_floating_point()
        found = _missed(output, y, self._loss)
        self._classification = self._classification and found is not None
        missed, classified = found or (0, 0)
        self._missed += missed
        self._classified += classified

    @property
    def targets_of_one(self) -> float:
        """How many an example has, in the mean."""
        return self._targets / max(1, self._examples)

    def evaluation(self) -> Evaluation:
        if self._examples == 0:
            raise ArgumentError(
                "the data gave no batch to evaluate on; does its DataLoader drop a last, incomplete one?"
            )
        if self._targets == 0:
            raise ArgumentError(
                f"every target is {ignored_by(self._loss)}, which the loss ignores, so there is nothing to "
                "evaluate on; give data with other targets too"
            )
        loss = self._total / self._targets
        return Evaluation(
            loss=loss,
            error=100 * self._missed / self._classified if self._classification and self._classified else None,
            metric=self._measured / self._examples if self._metric else None,
            r2=self._r2.value() if self._r2 else None,
            perplexity=perplexity_of(loss) if self._tokens else None,
        )


def perplexity_of(loss: float) -> float:
    """e to the mean loss of a token."""
    return math.exp(loss) if loss < MOST_NATS else math.inf
