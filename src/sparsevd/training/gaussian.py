"""Regression: a Gaussian likelihood that learns the variance of the noise in y, and R².

The bound has its largest value over the noise variance v of an output where v is the mean of (y − ŷ)², so it needs no
gradient: v is a running mean over about an epoch. With it nothing depends on the units of y (see `output_units` for
what else does).
"""

import math
import warnings
from typing import final

import torch
from torch import Tensor, nn

from sparsevd.errors import ArgumentError, SparseVDWarning
from sparsevd.training.data import Batch
from sparsevd.training.inputs import Forward
from sparsevd.training.likelihood import Likelihood, like
from sparsevd.training.output_units import OutputUnits, has_fresh_noise, output_layer

# Steps that the running means go back: at least, where nothing is known of the length of an epoch, and at most.
LEAST_STEPS, STEPS, MOST_STEPS = 10, 100, 1000
# Relative to the variance of y: a network that knows y to all digits would make a division by zero.
LEAST_VARIANCE, TINY = 1e-8, 1e-30
# A network of this R² predicts already; its weights have the units of y.
PREDICTS = 0.05
_STATE = ("means", "centre", "size", "steps")


@final
class Gaussian(Likelihood):
    """Numbers with noise whose variance is learned, one for each output, so that the units of y do not matter.

        loss = sparsevd.Gaussian()
        sparsevd.fit(model, (x, y), held_out, loss=loss)
        sparsevd.evaluate(model, test, loss).r2

    Targets have the shape of the output. The NLL of an example is the sum over its outputs. The variance is learned
    whenever the loss of an output that has a gradient is asked for, in a loop of your own too; elsewhere it stays, and
    before anything was learned it is the one that suits a batch best. `fit` learns it anew.

    Args:
        axis: the dimension that counts outputs: columns, or the channels of images. For sequences (example, position,
            output) give −1.
    """

    def __init__(self, axis: int = 1):
        if axis == 0:
            raise ArgumentError("axis=0 counts examples; give the dimension that counts outputs, such as 1 or -1")
        self.axis = axis
        self._steps_back = STEPS
        self._forget()

    def _forget(self) -> None:
        # Running means, for each output, of (y − ŷ)², y − centre and (y − centre)².
        self._means: Tensor | None = None
        self._centre: Tensor | None = None
        self._size: Tensor | None = None
        self._steps = 0

    def __repr__(self) -> str:
        return "Gaussian()" if self.axis == 1 else f"Gaussian(axis={self.axis})"

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        output = output.to(torch.promote_types(output.dtype, torch.float32))
        target = like(output, target)
        residual = self.by_output(target - output)
        if residual.requires_grad and torch.is_grad_enabled():
            self._learn(residual.detach().square().mean(1), self.by_output(target))
        learned = residual.detach().square().mean(1) if self._means is None else self.variance.to(residual)
        variance = learned.clamp_min(TINY).unsqueeze(1)
        nll = 0.5 * (residual.square() / variance + variance.log() + math.log(2 * math.pi))
        return nll.sum() / len(output)

    @property
    def variance(self) -> Tensor:
        """Of the noise in y, for each output."""
        if self._means is None:
            raise ArgumentError(
                f"this {self!r} has not learned the variance of the noise yet; give the one that fit was given"
            )
        return torch.maximum(self._means[0], LEAST_VARIANCE * self._variance_of_y())

    @property
    def r2(self) -> float | None:
        """The share of the variance of the training targets that the network explained of late, with its noise."""
        if self._means is None:
            return None
        return (1 - self._means[0] / self._variance_of_y().clamp_min(TINY)).mean().item()

    def _variance_of_y(self) -> Tensor:
        assert self._means is not None
        return self._means[2] - self._means[1].square()

    def by_output(self, values: Tensor) -> Tensor:
        """As a matrix (output, examples and positions)."""
        if values.ndim == 1:
            return values.unsqueeze(0)
        return values.movedim(self.axis, 0).flatten(1)

    @torch.no_grad()
    def _learn(self, squares: Tensor, target: Tensor) -> None:
        if self._centre is None:
            self._centre = target.mean(1)
        centred = target - self._centre.unsqueeze(1)
        found = torch.stack([squares, centred.mean(1), centred.square().mean(1)])
        self._steps += 1
        if self._means is None:
            self._means = found
        elif self._means.shape != found.shape:
            raise ArgumentError(
                f"this batch has {found.shape[1]} outputs along dimension {self.axis}, those before had "
                f"{self._means.shape[1]}; axis= names the dimension that counts outputs"
            )
        else:
            self._means = self._means.lerp(found, 1 / min(self._steps, self._steps_back))

    @torch.no_grad()
    def begin(
        self, model: nn.Module, forward: Forward, batch: Batch, all_targets: Tensor | None, per_epoch: int
    ) -> OutputUnits | None:
        """Forget what was learned, and bring the network's output to the units of y unless it predicts already."""
        inputs, target = batch
        self._forget()
        self._steps_back = min(max(LEAST_STEPS, per_epoch // len(target)), MOST_STEPS)
        layer, output = output_layer(model, forward, inputs, self.axis)
        output = output.to(torch.promote_types(output.dtype, torch.float32))
        y = self.by_output(like(output, target) if all_targets is None else all_targets.to(output))
        self._centre = y.mean(1)
        without_bias = layer is not None and layer.bias is None
        deviation = (y.square().mean(1) if without_bias else y.var(1, correction=0)).sqrt()
        size = torch.where(deviation > 0, deviation, self._centre.abs())  # of one example nothing else is known
        self._size = torch.where(size > 0, size, 1.0)
        if layer is None:
            self._warn_if_far_from_standard()
            return None
        measured = RSquared(self)
        measured.add(output, target)
        predicts = (measured.value() or 0.0) > PREDICTS
        units = OutputUnits(layer, self._size)
        if not predicts:
            units.multiply(offset=self._centre)
        elif has_fresh_noise(layer):  # it was made for weights of about 1
            units.multiply(weights=False)
        return units

    def go_on(self, model: nn.Module, forward: Forward, batch: Batch) -> OutputUnits | None:
        layer, output = output_layer(model, forward, batch[0], self.axis)
        self.load_state_dict({name: tensor.to(output.device) for name, tensor in self.state_dict().items()})
        return OutputUnits(layer, self._size) if layer is not None and self._size is not None else None

    def _warn_if_far_from_standard(self) -> None:
        assert self._centre is not None
        assert self._size is not None
        if bool((self._size.log().abs() < math.log(2)).all()) and bool((self._centre.abs() < 2 * self._size).all()):
            return
        means, deviations = (", ".join(f"{v:.3g}" for v in each.tolist()[:3]) for each in (self._centre, self._size))
        warnings.warn(
            "no linear layer or convolution gives the network's output as it is, so its first weights and their steps "
            f"are meant for targets of mean 0 and deviation 1, and these have {means} and {deviations}; standardise y",
            SparseVDWarning,
            stacklevel=9,
        )

    def running_means(self) -> list[Tensor]:
        return [] if self._means is None else [self._means]

    def state_dict(self) -> dict[str, Tensor]:
        if self._means is None or self._centre is None:
            return {}
        size = self._size if self._size is not None else torch.ones_like(self._centre)
        steps = torch.tensor([self._steps, self._steps_back])
        return {"means": self._means, "centre": self._centre, "size": size, "steps": steps}

    def problem_of(self, state: dict[str, Tensor]) -> str:
        if tuple(state) and set(state) != set(_STATE):
            return f"it has {', '.join(state)} and not {', '.join(_STATE)}"
        if not state:
            return ""
        outputs = state["centre"].shape
        shapes = {"means": (3, *outputs), "centre": outputs, "size": outputs, "steps": (2,)}
        for name, tensor in state.items():
            floating = tensor.is_floating_point() and bool(tensor.isfinite().all())
            if floating == (name == "steps") or tuple(tensor.shape) != shapes[name]:
                return f"{name!r} has another type or shape, or is not finite"
        if len(outputs) != 1 or (state["size"] <= 0).any() or (state["means"][0] < 0).any():
            return "a size or a variance is negative"
        return "" if (state["steps"] >= 1).all() else "it counts less than one step"

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._forget()
        if state:
            self._means, self._centre, self._size = (state[name].clone() for name in _STATE[:3])
            self._steps, self._steps_back = state["steps"].tolist()


@final
class RSquared:
    """R² over batches: 1 − Σ(y − ŷ)² / Σ(y − ȳ)², the mean over the outputs whose targets are not all the same."""

    def __init__(self, likelihood: Gaussian):
        self._likelihood = likelihood
        self._first: Tensor | None = None  # near ȳ: sums of squares of large numbers would lose their digits
        self._sums: Tensor | None = None
        self._count = 0

    @torch.no_grad()
    def add(self, output: Tensor, target: Tensor) -> None:
        by_output = self._likelihood.by_output
        output = output.cpu().double()
        predicted, y = by_output(output), by_output(like(output, target.cpu()))
        if self._first is None:
            self._first = y.mean(1, keepdim=True)
        centred = y - self._first
        sums = torch.stack([(y - predicted).square().sum(1), centred.sum(1), centred.square().sum(1)])
        self._sums = sums if self._sums is None else self._sums + sums
        self._count += y.shape[1]

    def value(self) -> float | None:
        if self._sums is None:
            return None
        total = self._sums[2] - self._sums[1].square() / self._count
        varied = total > 0
        return (1 - self._sums[0] / total)[varied].mean().item() if varied.any() else None
