"""The units that a network's output is in, and Adam's steps in them.

The bound does not change when y, the last layer's θ and its σ are all multiplied by a number. But Adam's steps have the
size of the learning rate, and first weights that of their initialisation: both are meant for outputs of about 1. So the
last layer takes its steps in units of y: it is divided by their size for the step, and multiplied by it after. Then
training does what it would on standardised targets, while the network predicts y itself at any moment.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from sparsevd.errors import ArgumentError
from sparsevd.layers.modes import in_eval_mode
from sparsevd.posterior import posteriors
from sparsevd.training.inputs import Forward

# Layers whose weight is [unit, input, ...], with the dimension of the output that counts units, from the end.
_UNITS_AT: dict[type[nn.Module], int] = {nn.Linear: -1, nn.Conv1d: -2, nn.Conv2d: -3, nn.Conv3d: -4}


@final
class OutputUnits:
    """The layer that gives a network's output, and the size of one unit of y for each of its outputs."""

    def __init__(self, layer: nn.Module, size: Tensor):
        self._layer, self._size = layer, size

    def multiply(self, offset: Tensor | None = None, *, weights: bool = True) -> None:
        """Change the output from standard units to those of y: θ and σ, or σ alone, and the bias, which gets an
        offset too."""
        with torch.no_grad():
            if weights:
                self._change(1)
            else:
                self._change_noise(1)
            bias = self._layer.bias
            if weights and offset is not None and isinstance(bias, Tensor):
                bias.add_(offset.to(bias))

    @contextmanager
    @torch.no_grad()
    def standard(self) -> Iterator[None]:
        """While it lasts, parameters and gradients are those of an output in standard units."""
        for parameter, size in self._scaled():
            if parameter.grad is not None:
                parameter.grad.mul_(size)
        self._change(-1)
        try:
            yield
        finally:
            self._change(1)

    def _change(self, direction: int) -> None:
        for parameter, size in self._scaled():
            parameter.data.mul_(size if direction > 0 else 1 / size)
        self._change_noise(direction)

    def _change_noise(self, direction: int) -> None:
        for each in posteriors(self._layer):
            each.log_sigma2.data.add_(_spread(self._rows(), each.log_sigma2).log(), alpha=2 * direction)

    def _scaled(self) -> list[tuple[nn.Parameter, Tensor]]:
        weight, bias = self._layer.get_parameter("weight"), self._layer.bias
        found = [(weight, _spread(self._rows(), weight))]
        return [*found, (bias, self._size.to(bias))] if isinstance(bias, nn.Parameter) else found

    def _rows(self) -> Tensor:
        """Of the rows that the weight has now: while an epoch lasts it may have fewer."""
        part = getattr(self._layer, "part", None)
        return self._size if part is None else self._size[part.units]


def _spread(rows: Tensor, parameter: Tensor) -> Tensor:
    return rows.to(parameter).view(-1, *[1] * (parameter.ndim - 1))


@torch.no_grad()
def output_layer(model: nn.Module, forward: Forward, inputs: Any, axis: int) -> tuple[nn.Module | None, Tensor]:
    """The layer whose output is the network's, if it has one output for each place along this axis; and that output.

    It must be trained, be called once, and share its weight with no other.
    """
    found: list[tuple[nn.Module, Tensor, int]] = []

    def keep(module: nn.Module, arguments: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            found.append((module, output, output._version))

    candidates = [module for module in model.modules() if _plain_type(module) in _UNITS_AT]
    hooks = [module.register_forward_hook(keep) for module in candidates]
    try:
        with in_eval_mode(model), torch.random.fork_rng([]):
            output = forward(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(output, Tensor):
        raise ArgumentError(f"the network's output is a {type(output).__name__}; give its tensor by forward=")
    calls = Counter(module for module, _, _ in found)
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    for module, given, version in found:
        unchanged = given.data_ptr() == output.data_ptr() and given.numel() == output.numel()
        unchanged = unchanged and given._version == version  # not by an activation in place
        weight = module.get_parameter("weight")
        free = calls[module] == 1 and owners[id(weight)] == 1 and weight.requires_grad
        counted = given.ndim + _UNITS_AT[_plain_type(module)]
        same_axis = output.ndim == 1 or (given.shape == output.shape and counted == axis % output.ndim)
        if unchanged and free and same_axis:
            return module, output
    return None, output


def has_fresh_noise(layer: nn.Module) -> bool:
    """Whether log σ² is as `sparsify` has made it."""
    found = posteriors(layer)
    first: float = getattr(layer, "initial_log_sigma2", float("nan"))
    return bool(found) and all(bool((each.log_sigma2 == first).all()) for each in found)


def _plain_type(module: nn.Module) -> type[nn.Module]:
    plain: type[nn.Module] = getattr(module, "plain_type", type(module))  # of a Sparse VD layer, its twin's
    return plain
