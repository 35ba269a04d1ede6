"""What lies under the wrappers of others: the network itself, the optimizer itself."""

from collections.abc import Sequence
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
            raise ArgumentError(f"optimizer={each!r} must be a torch.optim.Optimizer, or a list of them")
        found.append(each)
    if not found:
        raise ArgumentError("optimizer is an empty list; give the one that trains the network")
    return found
