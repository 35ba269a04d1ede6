"""Training and eval mode, put back as they were."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def modes_restored(model: nn.Module) -> Iterator[None]:
    """Every module goes back to the mode it had, training or eval, also one that its owner froze in eval mode."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """The whole model in eval mode, for a while."""
    with modes_restored(model):
        model.eval()
        yield
