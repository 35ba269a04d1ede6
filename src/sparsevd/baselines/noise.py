"""Noise on the inputs or outputs of layers while a network trains, put there by hooks and taken away at the end."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sparsevd.errors import ArgumentError


def noisy_inputs(layers: dict[nn.Module, Callable[[Tensor], Tensor]]) -> AbstractContextManager[None]:
    """Each of these layers sees its input through its function, in training mode only."""

    def hook(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (layers[layer](inputs[0]), *inputs[1:]) if layer.training else inputs

    return _removed_at_the_end([layer.register_forward_pre_hook(hook) for layer in layers])


def noisy_outputs(layers: dict[nn.Module, Callable[[Tensor, Tensor], Tensor]]) -> AbstractContextManager[None]:
    """Each of these layers gives out function(input, output) in training mode."""

    def hook(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return layers[layer](inputs[0], output) if layer.training else output

    return _removed_at_the_end([layer.register_forward_hook(hook) for layer in layers])


@contextmanager
def _removed_at_the_end(handles: list[RemovableHandle]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def product(layer: nn.Module, input: Tensor, weight: Tensor) -> Tensor:
    """The layer's linear map with another weight and no bias."""
    if isinstance(layer, nn.Linear):
        return F.linear(input, weight)
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return cast(Tensor, layer._conv_forward(input, weight, None))
    raise ArgumentError(f"Variational Dropout knows Linear and Conv layers, not {type(layer).__name__}")
