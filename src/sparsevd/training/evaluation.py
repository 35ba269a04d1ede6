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
from sparsevd.training.likelihood import Likelihood, counted_in, is_cross_entropy
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
    likelihood that counts otherwise."""
    if isinstance(loss, Likelihood) and isinstance(output, Tensor):
        return loss.wrong(output, target)
    if not isinstance(output, Tensor) or output.ndim != 2 or target.ndim != 1 or target.is_floating_point():
        return None
    return int((output.detach().argmax(dim=1) != target).sum())


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
        loss: mean loss of a batch, of the output and the target.
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
    train = checked(train, "train")
    n = n_train or (counted_in(loss, train[1]) if isinstance(train, tuple) else size(train, "train"))
    return bound_on(model, _passed(train), loss, n, forward)


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


@torch.no_grad()
def _average(
    model: nn.Module, data: Iterable[Batch], loss: Loss, forward: Forward = call, metric: Metric | None = None
) -> Evaluation:
    device = device_of(model)
    total, measured, count = 0.0, 0.0, 0
    errors: float = 0
    classification, tokens = True, is_cross_entropy(loss)
    r2 = RSquared(loss) if isinstance(loss, Gaussian) else None
    for x, y in data:
        x, y = changed(x, lambda tensor: tensor.to(device)), y.to(device)
        with one_sample(model):
            output = forward(model, x)
        total += loss(output, y).item() * len(y)
        measured += float(metric(output, y)) * len(y) if metric else 0.0
        if r2 is not None:
            r2.add(output, y)
        tokens = tokens and y.ndim == 2 and not y.is_floating_point()
        missed = wrong(output, y, loss)
        classification = classification and missed is not None
        errors += missed or 0
        count += len(y)
    if count == 0:
        raise ArgumentError("the data gave no batch to evaluate on; does its DataLoader drop a last, incomplete one?")
    error = 100 * errors / count if classification else None
    return Evaluation(
        loss=total / count,
        error=error,
        metric=measured / count if metric else None,
        r2=r2.value() if r2 else None,
        perplexity=perplexity_of(total / count) if tokens else None,
    )


def perplexity_of(loss: float) -> float:
    """e to the mean loss of a token."""
    return math.exp(loss) if loss < MOST_NATS else math.inf
