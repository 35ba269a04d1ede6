"""The network under what torch wraps around it: names, and the keys of a state_dict, are those inside."""

from typing import cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def bare_model(model: nn.Module) -> nn.Module:
    """The network inside torch.compile and DistributedDataParallel, whose names have no prefix."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif is_compiled(model):
            model = cast(nn.Module, model._orig_mod)
        else:
            return model


def is_compiled(model: nn.Module) -> bool:
    """Whether it is what torch.compile puts around a network, under a name that a state_dict shows."""
    return "_orig_mod" in model._modules


def compile_anew(wrapper: nn.Module) -> None:
    """After another module was put into it: torch.compile's wrapper goes on calling the one that it was made of."""
    wrapper.__setstate__(wrapper.__getstate__())  # type: ignore[no-untyped-call]
