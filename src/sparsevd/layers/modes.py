"""Training and eval mode, and the noise, put back as they were."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from sparsevd.posterior import noisy_modules


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


@contextmanager
def noise_restored(model: nn.Module) -> Iterator[None]:
    """Every layer's noise goes back to on or off, and its threshold to what it was."""
    before = {layer: (layer.noise_is_on, layer.threshold) for layer in noisy_modules(model).values()}
    try:
        yield
    finally:
        for layer, (on, threshold) in before.items():
            layer.noise_is_on, layer.threshold = on, threshold
