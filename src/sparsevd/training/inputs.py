"""What a network takes at once: a tensor, several as a tuple, or named ones as a dict."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsevd.errors import ArgumentError

Inputs = Tensor | tuple[Any, ...] | dict[str, Any]
# How to call the model: (model, inputs) → what the loss takes.
Forward = Callable[[nn.Module, Any], Any]

# What the target is called in a batch that is one dict.
TARGETS = ("labels", "label", "targets", "target", "y")


def call(model: nn.Module, inputs: Inputs) -> Any:
    """The model's output: of one tensor, of several arguments, or of named ones.

    Of an output with names, as models of Transformers have it, the logits are taken.
    """
    if isinstance(inputs, dict):
        output = model(**inputs)
    elif isinstance(inputs, tuple):
        output = model(*inputs)
    else:
        output = model(inputs)
    return output["logits"] if isinstance(output, Mapping) and "logits" in output else output


def changed(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The same inputs with each tensor changed; what is no tensor stays as it is."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, dict):
        return {name: change(value) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    return tuple(change(value) if isinstance(value, Tensor) else value for value in inputs)


def in_bfloat16(forward: Forward, device: str) -> Forward:
    """The same call with its products in bfloat16; the output is float32, for a loss with all its digits."""

    def called(model: nn.Module, inputs: Inputs) -> Any:
        with torch.autocast(device, torch.bfloat16):
            output = forward(model, inputs)
        if type(output) in (Tensor, tuple, dict):
            return changed(output, lambda tensor: tensor.float() if tensor.dtype is torch.bfloat16 else tensor)
        return output

    return called


def tensors(inputs: Inputs) -> list[Tensor]:
    """The tensors among them."""
    values = inputs.values() if isinstance(inputs, dict) else inputs if isinstance(inputs, tuple) else [inputs]
    return [value for value in values if isinstance(value, Tensor)]


def as_inputs(value: object, name: str) -> Inputs:
    """Tensors, or arrays of numpy as tensors: alone, in a tuple or list, or in a dict."""
    if isinstance(value, Mapping):
        return {str(key): as_tensor(part, f"{name}[{key!r}]") for key, part in value.items()}
    if isinstance(value, tuple | list):
        return tuple(as_tensor(part, f"{name}[{i}]") for i, part in enumerate(value))
    return as_tensor(value, name)


def as_target(value: object, name: str) -> Tensor:
    """The same for targets; classes are int64, which is what torch's losses take."""
    target = as_tensor(value, name)
    integers = (torch.int8, torch.int16, torch.int32, torch.uint8)
    return target.long() if target.dtype in integers else target


def as_tensor(value: object, name: str) -> Tensor:
    """A tensor, or an array as one. Arrays of float64, numpy's habit, get torch's own floating-point type."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, np.ndarray):
        raise ArgumentError(f"{name} is a {type(value).__name__}; give a tensor or an array of numpy")
    try:
        tensor = torch.from_numpy(value)
    except TypeError as error:
        raise ArgumentError(f"{name} is an array of {value.dtype}, which torch cannot hold; give numbers") from error
    return tensor.to(torch.get_default_dtype()) if tensor.dtype is torch.float64 else tensor
