"""What a training is about: the network, the data and what to make of them, checked before anything begins."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sparsevd.errors import ArgumentError
from sparsevd.layers.wrapping import bare_model, is_compiled
from sparsevd.posterior import is_noisy
from sparsevd.training.data import Batch, Data, Taught, checked, examples_per_epoch, known_sizes, number_of_examples
from sparsevd.training.evaluation import Loss, Metric, device_of
from sparsevd.training.inputs import Forward, changed
from sparsevd.training.likelihood import Likelihood, check_loss, check_targets, counted_in, is_cross_entropy
from sparsevd.training.output_units import OutputUnits
from sparsevd.training.recipes import FitConfig
from sparsevd.training.teacher import Teacher


@dataclass
class Task:
    """What to train on what; checked before anything begins."""

    model: nn.Module
    train: Data
    val: Data | None
    config: FitConfig
    loss: Loss
    forward: Forward
    metric: Metric | None
    n_train: int | None
    teacher: Teacher | None = None

    def __post_init__(self) -> None:
        self.called = self.model  # in a step; all else, the names in a checkpoint above all, is of the network inside
        if is_compiled(self.model):
            self.model = bare_model(self.model)
        self.train = checked(self.train, "train")
        self.val = checked(self.val, "val") if self.val is not None else None
        if self.metric is not None and self.val is None:
            raise ArgumentError("metric is measured on val, and there is no val; give some")
        check_loss(self.loss, weighed=is_noisy(self.model), stacklevel=4)
        if self.teacher is not None and isinstance(self.loss, Likelihood):
            raise ArgumentError(f"a teacher is for cross-entropy, and the loss is {self.loss}; leave one of them out")
        self.n = self._counted()
        self.per_epoch = examples_per_epoch(self.train, self.n)
        self.device = device_of(self.model)
        if self.teacher is not None:
            if self.teacher.source is self.model:
                raise ArgumentError("teacher is the very network that learns; give another, or a copy of it")
            self.train = self.teacher.beside(self.train)
        last = self.config.channels_last and self.device.type == "cpu"
        self.memory_format = torch.channels_last if last else torch.contiguous_format
        # In a model in training mode, what is in eval mode was put there by its owner: frozen batch norms, say.
        self.in_eval_mode = [module for module in self.model.modules() if self.model.training and not module.training]

    def _counted(self) -> int:
        """N: what the mean of the loss is over, in the whole training set."""
        if not isinstance(self.train, tuple):
            return number_of_examples(self.train, self.n_train, or_more=is_cross_entropy(self.loss))
        examples, n = len(self.train[1]), counted_in(self.loss, self.train[1])
        if n == examples:
            return number_of_examples(self.train, self.n_train)
        if self.n_train not in (None, n):
            raise ArgumentError(
                f"n_train={self.n_train!r} but the loss is a mean over the {n:,} targets of {examples:,} examples, "
                "which weigh the KL; leave n_train out"
            )
        if not n:
            raise ArgumentError("all targets of train are such as the loss ignores; give some to learn from")
        return n

    def _check_counted(self, target: Tensor) -> None:
        """Of a first batch: whether data that comes in batches was counted as the loss counts it."""
        if isinstance(self.train, tuple) or not is_cross_entropy(self.loss) or not is_noisy(self.model):
            return
        if target.ndim < 2 or target.is_floating_point():
            number_of_examples(self.train, self.n_train)
        elif self.n_train is None or self.n_train in known_sizes(self.train):
            of_one = counted_in(self.loss, target) / len(target)
            raise ArgumentError(
                f"the loss is a mean over the targets, of which an example of the first batch has {of_one:,.4g}, so N, "
                "which weighs the KL, counts these: give n_train=…, all targets of the training set (about "
                f"{of_one * self.per_epoch:,.0f})"
            )

    def steps_per_epoch(self, batch_size: int) -> int:
        """How many steps one pass takes; a DataLoader has batches of its own, whatever the recipe says."""
        if isinstance(self.train, DataLoader):
            try:
                return max(1, len(self.train))
            except TypeError:  # a stream: it does not know
                pass
        return max(1, math.ceil(self.per_epoch / batch_size))

    def settings(self) -> dict[str, str | None]:
        """What a resumed run must have too, beside its recipe."""
        likelihood = repr(self.loss) if isinstance(self.loss, Likelihood) else None
        return {"teacher": str(self.teacher) if self.teacher else None, "likelihood": likelihood}

    def units(self, batch: Batch, *, begun: bool, processes: int = 1) -> OutputUnits | None:
        """Before the first step, or the first after a resume: the units that the likelihood wants the output in.

        `processes`: so many batches like this one are a step.
        """
        check_targets(self.loss, batch[1], weighed=is_noisy(self.model), stacklevel=6)
        self._check_counted(batch[1])
        if not isinstance(self.loss, Likelihood):
            return None
        if begun:
            return self.loss.go_on(self.model, self.forward, batch)
        every = self.train[1] if isinstance(self.train, tuple) else None
        return self.loss.begin(self.model, self.forward, batch, every, self.per_epoch // processes)

    def placed(self, batch: Batch) -> Batch:
        """A batch where the model is, and as its convolutions like it."""
        x, y = batch
        placed = changed(x, self._placed), y.to(self.device)
        return Taught(placed, batch.logits) if isinstance(batch, Taught) else placed

    def _placed(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self.device)
        return tensor.to(memory_format=self.memory_format) if tensor.ndim == 4 else tensor

    @contextmanager
    def in_memory_format(self) -> Iterator[None]:
        """The model's filters in the order of the images, while training lasts and whatever ends it."""
        _set_memory_format(self.model, self.memory_format)
        try:
            yield
        finally:
            _set_memory_format(self.model, torch.contiguous_format)


def _set_memory_format(model: nn.Module, memory_format: torch.memory_format) -> None:
    """Of everything with four dimensions: images and the filters for them.

    `to`, not `contiguous`: with one channel a tensor is both already, and only its strides tell torch which is meant.
    """
    for parameter in model.parameters():
        if parameter.ndim == 4:
            parameter.grad = None
            parameter.data = parameter.data.to(memory_format=memory_format)
