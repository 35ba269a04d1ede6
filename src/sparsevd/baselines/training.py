"""What every method shares: the budget, the data, and a plain training loop that counts the epochs spent."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from sparsevd.baselines.checkpoint import Checkpoint
from sparsevd.conversion import preview
from sparsevd.errors import ArgumentError, DivergenceError
from sparsevd.layers.linear import SparseOutputProjection
from sparsevd.layers.registry import sparse_type
from sparsevd.training.data import Data, batches, checked, examples_per_epoch, number_of_examples
from sparsevd.training.evaluation import Loss
from sparsevd.training.generator import seed_epoch
from sparsevd.training.inputs import call, in_bfloat16
from sparsevd.training.likelihood import counted_in, is_cross_entropy
from sparsevd.training.progress import Moment, display
from sparsevd.training.recipes import DECAYS
from sparsevd.training.teacher import Teacher


@dataclass(frozen=True)
class Outcome:
    """A plain network with exact zeros, and where a method ends by a threshold, the network before that."""

    network: nn.Module
    before_threshold: nn.Module | None = None
    elbo: float | None = None


class Method(ABC):
    """A way to a sparse network. Subclasses are frozen dataclasses of their hyper-parameters."""

    title: ClassVar[str]

    def settings(self) -> dict[str, Any]:
        """The hyper-parameters, as they are kept in a record."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @abstractmethod
    def train(self, model: nn.Module, training: "Training") -> Outcome:
        """Train this network, which may be changed, within the budget of `training`."""


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "positive": (lambda value: 0 < value < math.inf, "a positive number"),
    "not_negative": (lambda value: 0 <= value < math.inf, "zero or a positive number"),
    "finite": (lambda value: math.isfinite(value), "a finite number"),
    "probability": (lambda value: 0 <= value < 1, "a probability below 1"),
    "inside": (lambda value: 0 < value < 1, "a number between 0 and 1"),
    "part": (lambda value: 0 <= value <= 1, "a part of the budget, from 0 to 1"),
    "count": (lambda value: isinstance(value, int) and value >= 1, "a positive integer"),
}


def check(method: Method, **kinds: tuple[str, ...]) -> None:
    """Refuse hyper-parameters that are not of their kind: `check(self, positive=("learning_rate",))`."""
    for kind, names in kinds.items():
        fits, wanted = _KINDS[kind]
        for name in names:
            value = getattr(method, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
                raise ArgumentError(f"{name}={value!r} must be {wanted}")


class Training:
    """The data and the epochs that a method may spend, as it likes, in one or several stretches.

    `autocast` and `teacher` are those of `fit`, for a comparison on equal terms. In `run_dir` each epoch leaves a
    checkpoint, from which a method that calls `go_on` continues.
    """

    def __init__(
        self,
        data: Data,
        *,
        epochs: int = 40,
        batch_size: int = 100,
        seed: int = 0,
        loss: Loss = F.cross_entropy,
        n_train: int | None = None,
        progress: bool = True,
        autocast: bool = False,
        teacher: Teacher | None = None,
        run_dir: str | Path | None = None,
    ):
        for name, value in (("epochs", epochs), ("batch_size", batch_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{name}={value!r} must be a positive integer")
        self.data = checked(data, "train")
        if isinstance(self.data, tuple) and n_train is None:
            self.n = counted_in(loss, self.data[1])  # what the loss is a mean over
        else:
            self.n = number_of_examples(self.data, n_train, or_more=is_cross_entropy(loss))
        self.examples = examples_per_epoch(self.data, self.n)
        if teacher is not None:
            self.data = teacher.beside(self.data)
        self.epochs, self.batch_size, self.seed, self.loss, self.progress = epochs, batch_size, seed, loss, progress
        self.autocast, self.teacher = autocast, teacher
        self._forward = in_bfloat16(call, "cpu") if autocast else call
        self.spent = 0
        self._run_dir = run_dir
        self._checkpoint: Checkpoint | None = None
        self._spent_before = 0  # by the run that is continued

    def go_on(self, method: Method, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Before the first `run` of a method whose whole state is in its network and its one optimizer.

        From now on each epoch leaves a checkpoint in `run_dir`. Where an earlier run has left one, both are put where
        it was, and the epochs that it has spent will be passed over.
        """
        if self._run_dir is None:
            return False
        about = {"method": type(method).__name__, **method.settings(), "epochs": self.epochs, "n": self.n}
        about |= {"batch_size": self.batch_size, "seed": self.seed, "autocast": self.autocast}
        about["teacher"] = str(self.teacher) if self.teacher is not None else None
        self._checkpoint = Checkpoint(Path(self._run_dir) / "rival.safetensors", about)
        self._spent_before = self._checkpoint.put_back(model, optimizer)
        return self._spent_before > 0

    def run(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        epochs: int,
        *,
        penalty: Callable[[float], Tensor] | None = None,
        weights: Callable[[], Mapping[str, Tensor]] | None = None,
        after_step: Callable[[float], None] | None = None,
        decay: bool = True,
    ) -> None:
        """Some epochs of training. The rates that the optimizer comes with fall to zero along a half cosine.

        Args:
            penalty: what is added to the mean loss; it is told which part of these epochs is over, as are the others.
            weights: tensors to compute with in place of the parameters of these names.
            after_step: called after every step.
            decay: without it the rates stay as they are.
        """
        if self.spent + epochs > self.epochs:
            raise ArgumentError(f"{self.spent} of {self.epochs} epochs are spent; {epochs} more are not in the budget")
        base = [group["lr"] for group in optimizer.param_groups]
        network: Any = model if weights is None else lambda x: functional_call(model, dict(weights()), (x,))
        model.train()
        with display(self.progress) as shown:
            passed = min(epochs, max(0, self._spent_before - self.spent))
            self.spent += passed
            for epoch in range(passed, epochs):
                seed_epoch(self.seed, self.spent)
                seen, total = 0, 0.0
                for batch in batches(self.data, self.batch_size, shuffle=True):
                    x, y = batch
                    done = min(1.0, (epoch + seen / self.examples) / epochs)
                    for group, rate in zip(optimizer.param_groups, base, strict=True):
                        group["lr"] = rate * DECAYS["cosine"](done) if decay else rate
                    if x.ndim == 4:  # as `fit` has it: convolutions are faster
                        x = x.to(memory_format=torch.channels_last)
                    output = self._forward(network, x)
                    nll = self.loss(output, y)
                    data = self.teacher.mixed(nll, output, batch, self._forward) if self.teacher else nll
                    objective = data + penalty(done) if penalty else data
                    optimizer.zero_grad()
                    objective.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    if after_step:
                        after_step(done)
                    seen += len(y)
                    total += nll.item() * len(y)
                    text = f"epoch {self.spent + 1}/{self.epochs}  loss {total / seen:.3f}"
                    over = (self.spent + min(1.0, seen / self.examples)) / self.epochs
                    moment = Moment(over, self.spent + 1, seen // self.batch_size, text)
                    shown.on_step(moment)
                if not seen:
                    raise ArgumentError(f"train gave no batch in epoch {self.spent + 1}")
                if not all(parameter.isfinite().all() for parameter in model.parameters()):
                    raise DivergenceError(f"training diverged in epoch {self.spent + 1}; lower the learning rate")
                self.spent += 1
                if self._checkpoint is not None:
                    self._checkpoint.write(model, optimizer, self.spent)
                shown.on_epoch(moment)
        model.eval()


def named_weights(model: nn.Module, include: tuple[str, ...] = ()) -> dict[str, nn.Parameter]:
    """The weights that a method may remove: those of layers that Sparse VD would convert. Tied ones have one name.

    `include` is that of `sparsify`: only what it would convert then.
    """
    names: dict[nn.Parameter, str] = {}
    chosen = set(preview(model, include=include).replaced) if include else None
    for name, module in model.named_modules():
        if chosen is not None and name not in chosen:
            continue
        for key in kind.names(module)[0] if (kind := sparse_type(module)) else ():
            names.setdefault(module.get_parameter(key), f"{name}.{key}" if name else key)
    found = {name: weight for weight, name in names.items()}
    if not found:
        raise ArgumentError(
            f"no layer with a Sparse VD twin in {type(model).__name__}; there is nothing to make sparse"
        )
    return found


def weight_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers that have one such weight, for methods that put noise on what goes in or comes out."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if (kind := sparse_type(module)) and kind.names(module)[0] == ("weight",)
        if kind is not SparseOutputProjection  # attention reads its weight, and never calls it
    }
    if not layers:
        raise ArgumentError(f"no Linear or Conv layer in {type(model).__name__}; there is nothing to make sparse")
    return layers


def adam(model: nn.Module, learning_rate: float, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    """As for Sparse VD: the same optimiser for all methods that do not need another."""
    return torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=weight_decay, fused=True
    )
