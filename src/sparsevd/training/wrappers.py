"""What lies under the wrappers of others: the network itself, the optimizer itself; and hooks on a network."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparsevd.errors import ArgumentError


def bare_model(model: nn.Module) -> nn.Module:
    """The network inside torch.compile and DistributedDataParallel, whose names have no prefix."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = cast(nn.Module, model._orig_mod)
        else:
            return model


def bare_optimizers(given: object) -> list[torch.optim.Optimizer]:
    """One optimizer or several, each without what Accelerate or Lightning wraps around it, where hooks never run."""
    found = []
    for each in given if isinstance(given, Sequence) else [given]:
        while wrapped := {"optimizer", "_optimizer"} & set(getattr(each, "__dict__", ())):
            each = getattr(each, wrapped.pop())
        if not isinstance(each, torch.optim.Optimizer):
            raise ArgumentError(
                f"optimizer must be a torch.optim.Optimizer, or a list of them, not a {type(each).__name__}"
            )
        found.append(each)
    if not found:
        raise ArgumentError("optimizer is an empty list; give the one that trains the network")
    return found


class Hook:
    """A hook on the network that a copy of it, or a file, does not take along: the schedule is not theirs."""

    def __init__(self, method: Callable[..., None] | None = None):
        self._method = method

    def __call__(self, *args: object) -> None:
        if self._method is not None:
            self._method(*args)

    def __reduce__(self) -> tuple[type["Hook"], tuple[()]]:
        return Hook, ()
