"""What a network returns: one tensor, a tuple, or a dict; and the tensors in it, in their order."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sparsevd.errors import GraphError

Output = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
_Part = TypeVar("_Part")
INFINITY = float("inf")


def parts(output: Any) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    """The keys of an output, none if it has no names for its tensors, and the tensors.

    Any mapping counts as a dict, and so does a dataclass; what is None in them is not there.
    """
    kind = type(output).__name__
    if dataclasses.is_dataclass(output) and not isinstance(output, Mapping):
        output = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    keys: tuple[Any, ...] = ()
    if isinstance(output, Mapping):
        keys = tuple(key for key, value in output.items() if value is not None)
        values = tuple(output[key] for key in keys)
    else:
        values = tuple(output) if isinstance(output, tuple | list) else (output,)
    bare = not isinstance(output, Mapping | tuple | list)
    odd = {type(value).__name__ for value in values if not isinstance(value, Tensor)}
    odd |= {f"{type(key).__name__} as key" for key in keys if not isinstance(key, str)}
    if odd or not values:
        holds = "" if bare or not odd else f" that holds {', '.join(sorted(odd))}"
        raise GraphError(
            f"the network returns a {kind}{holds}; it must return a tensor or a tuple, list, dict or dataclass of "
            "tensors. Wrap it in a module whose forward picks them out"
        )
    return keys, values


def returned(keys: tuple[str, ...], values: tuple[_Part, ...]) -> _Part | tuple[_Part, ...] | dict[str, _Part]:
    """The way back: a dict if there are keys, else the one value or all of them."""
    if keys:
        return dict(zip(keys, values, strict=True))
    return values[0] if len(values) == 1 else values


def tensors_in(output: Any) -> list[Tensor]:
    """The tensors in whatever a network returns, also where it is nothing that `parts` knows."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    elif dataclasses.is_dataclass(output):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    return [tensor for each in output for tensor in tensors_in(each)] if isinstance(output, tuple | list) else []


def difference(ours: Any, theirs: Any) -> float:
    """The largest difference between two outputs, each tensor's relative to the largest number of theirs.

    Where all of theirs is zero it is absolute. What is NaN or infinite in both is no difference, in one an infinite
    one; so is another structure. What has no numbers is not compared.
    """
    (our_keys, our_tensors), (their_keys, their_tensors) = parts(ours), parts(theirs)
    if our_keys != their_keys or len(our_tensors) != len(their_tensors):
        return INFINITY
    return max(map(_tensors_differ, our_tensors, their_tensors))


def _tensors_differ(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape:
        return INFINITY
    if theirs.is_meta or ours.is_meta or not theirs.numel():
        return 0.0
    wide = torch.complex128 if theirs.is_complex() else torch.float64
    a, b = ours.detach().cpu().to(wide), theirs.detach().cpu().to(wide)  # not every device has doubles
    gaps = (a - b).abs().nan_to_num(nan=INFINITY, posinf=INFINITY).masked_fill((a == b) | (a.isnan() & b.isnan()), 0)
    largest = b.abs().nan_to_num(nan=0, posinf=0).max().item()
    return gaps.max().item() / (largest or 1.0)


@dataclasses.dataclass
class Seen:
    """The keys of what a model last returned."""

    keys: tuple[str, ...] = ()


@contextmanager
def returning_tensors(model: nn.Module) -> Iterator[Seen]:
    """Meanwhile the model returns a tuple of tensors, which every exporter understands, and its keys are seen."""
    seen = Seen()

    def flatten(module: nn.Module, inputs: object, output: Any) -> tuple[Tensor, ...]:
        seen.keys, tensors = parts(output)
        return tensors

    hook = model.register_forward_hook(flatten)
    try:
        yield seen
    finally:
        hook.remove()
