"""How good a network is: loss and error on data, and the variational bound on the training set."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsevd.errors import ArgumentError
from sparsevd.posterior import noisy_modules
from sparsevd.training.data import Data, batches, checked, size
from sparsevd.training.objective import kl

Loss = Callable[[Tensor, Tensor], Tensor]
EVALUATION_BATCH = 1000


@dataclass(frozen=True)
class Evaluation:
    """The mean loss, and for classification the error in %."""

    loss: float
    error: float | None


def wrong(output: object, target: Tensor) -> int | None:
    """How many examples are classified wrongly; None where this is no classification of one class per example."""
    if not isinstance(output, Tensor) or output.ndim != 2 or target.ndim != 1 or target.is_floating_point():
        return None
    return int((output.detach().argmax(dim=1) != target).sum())


def evaluate(model: nn.Module, data: Data, loss: Loss = F.cross_entropy) -> Evaluation:
    """Loss and error of the network as it will be used: in eval mode, with pruned weights and no noise."""
    with _modes_restored(model):
        return _average(model.eval(), data, loss)


def elbo(model: nn.Module, train: Data, loss: Loss = F.cross_entropy, n_train: int | None = None) -> float:
    """The variational bound (eq. 3) on the training set, with one sample of the noise per example (eq. 4), in nats.

    Only the Sparse VD layers are put in training mode, so that batch normalisation keeps its statistics.
    """
    n = n_train if n_train is not None else size(checked(train, "train"), "train")
    noisy = noisy_modules(model).values()
    with torch.no_grad():
        return -(n * noisy_loss(model, noisy, train, loss) + kl(model).item())


def noisy_loss(model: nn.Module, noisy: Iterable[nn.Module], data: Data, loss: Loss) -> float:
    """The mean loss with these modules in training mode and all others in eval mode."""
    with _modes_restored(model):
        model.eval()
        for module in noisy:
            module.train()
        return _average(model, data, loss).loss


@contextmanager
def _modes_restored(model: nn.Module) -> Iterator[None]:
    """Every module goes back to the mode it had, training or eval, also one that its owner froze in eval mode."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def device_of(model: nn.Module) -> torch.device:
    """Where the first parameter is."""
    for parameter in model.parameters():
        return parameter.device
    raise ArgumentError(f"{type(model).__name__} has no parameters")


@torch.no_grad()
def _average(model: nn.Module, data: Data, loss: Loss) -> Evaluation:
    device = device_of(model)
    total, errors, count = 0.0, 0, 0
    classification = True
    for x, y in batches(checked(data, "data"), EVALUATION_BATCH, shuffle=False):
        x, y = x.to(device), y.to(device)
        output = model(x)
        total += loss(output, y).item() * len(y)
        missed = wrong(output, y)
        classification = classification and missed is not None
        errors += missed or 0
        count += len(y)
    if count == 0:
        raise ArgumentError("the data gave no batch to evaluate on; does its DataLoader drop a last, incomplete one?")
    return Evaluation(total / count, 100 * errors / count if classification else None)
