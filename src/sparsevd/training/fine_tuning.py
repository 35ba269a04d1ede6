"""Plain fine-tuning of what pruning has left: the likelihood alone, a small rate, and zeros that stay zeros."""

from collections.abc import Iterable
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from sparsevd.errors import ArgumentError
from sparsevd.posterior import is_noisy
from sparsevd.training.data import Data
from sparsevd.training.evaluation import Loss, Metric
from sparsevd.training.history import EpochMetrics
from sparsevd.training.inputs import Forward, call
from sparsevd.training.loop import Loop
from sparsevd.training.progress import Callback
from sparsevd.training.recipes import LEARNING_RATE, FitConfig
from sparsevd.training.task import Task
from sparsevd.training.teacher import TEMPERATURE, WEIGHT, Teacher
from sparsevd.training.zeros import Zeros

POLISH_EPOCHS = 3
# Of the recipe's rate: the network is good already.
POLISH_RATE = 0.1

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


def polish(
    pruned: nn.Module,
    train: Data,
    val: Data | None = None,
    epochs: int = POLISH_EPOCHS,
    *,
    config: FitConfig | None = None,
    loss: Loss = F.cross_entropy,
    forward: Forward = call,
    metric: Metric | None = None,
    teacher: nn.Module | Tensor | None = None,
    temperature: float = TEMPERATURE,
    teacher_weight: float = WEIGHT,
    n_train: int | None = None,
    progress: bool = True,
    callbacks: Iterable[Callback] = (),
) -> list[EpochMetrics]:
    """Fine-tune a pruned network in place; every weight that is zero stays exactly zero. Returns the epochs' metrics.

        pruned = sparsevd.prune(model)
        sparsevd.polish(pruned, (x, y), (x_val, y_val), epochs=3)

    Without noise and KL the weights that are left fit the data more closely, so look at held-out data: it may help or
    not. Batch norm keeps its statistics.

    Args:
        pruned: the result of `sparsevd.prune`, or any plain network with zeros in its weights.
        train: as for `fit`.
        val: data to watch.
        epochs: passes over the training data.
        config: the recipe: rate, batch size, seed and so on. Unless given, the usual one at a tenth of its rate; the
            rate falls to zero.
        loss: mean negative log-likelihood of a batch.
        forward: how to call the model.
        metric: a number to watch on `val`.
        teacher: the dense network, say, to learn from beside the labels; this and the next two as for `fit`.
        temperature: of its term.
        teacher_weight: the weight of its term.
        n_train: how many examples there are, where the data cannot say it (an iterable of unknown length).
        progress: show a bar on a terminal, or a line per epoch elsewhere.
        callbacks: told about every step and every epoch.
    """
    if is_noisy(pruned):
        raise ArgumentError("polish trains a plain network; this one has Sparse VD layers: prune it first")
    if config is None:
        config = FitConfig(learning_rate=POLISH_RATE * LEARNING_RATE)
    config = replace(config, epochs=epochs)
    pruned.train()
    for module in pruned.modules():
        if isinstance(module, _NORMS):
            module.eval()  # which the loop respects
    taught = Teacher(teacher, temperature, teacher_weight) if teacher is not None else None
    task = Task(pruned, train, val, config, loss, forward, metric, n_train, taught)
    return Loop(task, None, callbacks, zeros=Zeros).run(resume=False, show=progress)
