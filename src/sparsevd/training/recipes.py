"""The recipe's numbers: `FitConfig` with its defaults, and named settings of it.

All named ones maximise the same bound: the weight of the KL is 1/N once the warm-up is over.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch

from sparsevd.errors import ArgumentError
from sparsevd.training.objective import warm_up

LEARNING_RATE = 4e-3

VARIANCE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# What is left of the learning rate when a part of the run, from 0 to 1, is over.
DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}


@dataclass(frozen=True)
class FitConfig:
    """The recipe. Only `epochs` needs a thought: the schedules are parts of the run.

    What stands beside a type is the help of the option that `sparsevd train` makes of it.

    Adam's |step| sets how small a useless weight can become, so most of the sparsity appears as the rate goes to zero;
    log σ² follows slowly, at its own rate, so that no weight is given up before it was tried; at the end it catches up.
    """

    epochs: Annotated[int, "Passes over the training set."] = 40
    batch_size: Annotated[int, "Examples per step."] = 100
    # None: LEARNING_RATE for a fresh network, else the largest that does one that predicts already no harm, or, without
    # noise, little harm (start.py)
    learning_rate: Annotated[
        float | None, "Adam's rate, falling to zero; by default 4e-3, or less for a network that predicts already."
    ] = None
    decay: Annotated[str, "How the rate falls: cosine or linear."] = "cosine"  # half a cosine; the paper's is linear
    # None: 0, or what start.py says of runs without noise
    held: Annotated[float | None, "Part of the run before the rate falls."] = None
    log_sigma2_lr_ratio: Annotated[float, "Rate of log σ², relative to the learning rate."] = 0.1
    # When most is decided, log σ² catches up with the weights ...
    late_log_sigma2_lr_ratio: Annotated[float, "The same at the end of the run, where log σ² catches up."] = 3.0
    late_from: Annotated[float, "Part of the run from which it does; 1: never."] = 0.7
    # β is 0 up to the first of these parts of the run and 1 from the second on; 0 and 0 mean β = 1 from the start.
    warm_up_start: Annotated[float, "Part of the run up to which the KL has no weight."] = 0.0
    warm_up_end: Annotated[float, "Part of the run from which the KL has its full weight."] = 0.2
    # What is above the threshold is dropped for good: once β = 1, inputs and units without any weight below it ...
    drop_patience: Annotated[int, "Epochs in a row after which inputs and units without weights are dropped."] = 3
    # ... and single weights from a part of the run on, at once. 1: nothing is dropped, not even units
    drop_from: Annotated[float, "Part of the run from which pruned weights are zero for good; 1: never."] = 0.7
    contract: Annotated[bool, "Leave inputs and units without any weight out of the computation."] = True
    channels_last: Annotated[bool, "Keep images in this order in memory: faster convolutions on a CPU."] = True
    # None: as the layers have it, and where they do not say float32, or bfloat16 for large products on such a CPU.
    variance_dtype: Annotated[
        str | None, "Type of the variance product: float32 or bfloat16; else as the CPU is fast."
    ] = None
    autocast: Annotated[
        bool, "Train with the products in bfloat16, where the CPU or GPU is fast at it; what is measured is float32."
    ] = False
    # None: unless the network collapses without its smallest weights, which leaves the noise little to take (start.py)
    noise: Annotated[
        bool | None, "With a budget: learn with noise before weights are cut; by default where many can go at once."
    ] = None
    weight_decay: float = 0.0  # of `fit_dense`, decoupled from the gradient; for `fit`, the KL is the regulariser
    # Adam's usual 0.999 remembers the early, large gradients for too long.
    adam_beta2: Annotated[float, "Decay of Adam's mean square."] = 0.99
    seed: Annotated[int, "Seed of weights, noise and order."] = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "drop_patience"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{name}={value!r} must be a positive integer")
        for name in ("learning_rate", "log_sigma2_lr_ratio", "late_log_sigma2_lr_ratio"):
            value = getattr(self, name)
            if name == "learning_rate" and value is None:
                continue
            if isinstance(value, bool) or not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ArgumentError(f"{name}={value!r} must be a positive number")
        if not (isinstance(self.weight_decay, int | float) and 0 <= self.weight_decay < math.inf):
            raise ArgumentError(f"weight_decay={self.weight_decay!r} must be zero or a positive number")
        for name in ("drop_from", "late_from"):
            if not (isinstance(getattr(self, name), int | float) and 0 <= getattr(self, name) <= 1):
                raise ArgumentError(f"{name}={getattr(self, name)!r} must be a part of the run, from 0 to 1")
        if self.variance_dtype not in (None, *VARIANCE_DTYPES):
            raise ArgumentError(f"variance_dtype={self.variance_dtype!r} must be None, {' or '.join(VARIANCE_DTYPES)}")
        for name in ("contract", "channels_last", "autocast"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.noise is not None and not isinstance(self.noise, bool):
            raise ArgumentError(f"noise={self.noise!r} must be True, False or None")
        if self.held is not None and (not isinstance(self.held, int | float) or not 0 <= self.held < 1):
            raise ArgumentError(f"held={self.held!r} must be a part of the run, from 0 to less than 1")
        if self.decay not in DECAYS:
            raise ArgumentError(f"decay={self.decay!r} must be one of {', '.join(DECAYS)}")
        if not 0 < self.adam_beta2 < 1:
            raise ArgumentError(f"adam_beta2={self.adam_beta2!r} must lie between 0 and 1")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**31:
            raise ArgumentError(f"seed={self.seed!r} must be an integer from 0 to 2³¹ − 1")
        warm_up(self.warm_up_start, self.warm_up_end)

    def rate(self, progress: float) -> float:
        """The learning rate of the weights when this part of the run is over."""
        return (LEARNING_RATE if self.learning_rate is None else self.learning_rate) * self.decayed(progress)

    def decayed(self, progress: float) -> float:
        """What is left of the first rate."""
        held = self.held or 0.0
        return DECAYS[self.decay](max(0.0, progress - held) / (1 - held))


@dataclass(frozen=True)
class Recipe:
    """What to do, and what for."""

    about: str
    fit: FitConfig = field(default_factory=FitConfig)
    pretrain_epochs: int = 0


# As the paper says: nothing is dropped before the end. Where it does not say: Adam's own β₂, our warm-up of β over the
# first fifth and first log σ², and that the rate falls to zero from a pre-trained network too.
_PAPER = FitConfig(
    epochs=200,
    learning_rate=1e-4,
    decay="linear",
    log_sigma2_lr_ratio=1.0,
    late_from=1.0,
    drop_from=1.0,
    contract=False,
    adam_beta2=0.999,
)

RECIPES: dict[str, Recipe] = {
    "default": Recipe("good sparsity and error in few epochs"),
    "fast": Recipe(
        "half of the epochs, about as much error, a quarter less sparse: a longer warm-up",
        FitConfig(epochs=20, warm_up_end=0.4),
    ),
    "thorough": Recipe(
        "half more epochs and a longer warm-up: a tenth of a point less error on held-out images, as sparse",
        FitConfig(epochs=60, warm_up_end=0.25),
    ),
    "sparsest": Recipe(
        "fewer weights and more error: twice the rate, log σ² as slow as before until it catches up, an earlier drop",
        FitConfig(learning_rate=8e-3, log_sigma2_lr_ratio=0.05, drop_from=0.4),
    ),
    "paper": Recipe("the paper's: 200 epochs from random weights, the rate linearly from 1e-4 to zero", _PAPER),
    "paper-pretrained": Recipe(
        "the paper's for networks that do not start well: dense training first, then 30 epochs at 1e-5",
        replace(_PAPER, epochs=30, learning_rate=1e-5, warm_up_end=0.0),
        pretrain_epochs=40,
    ),
}


def recipe(name: str) -> Recipe:
    """The recipe of this name."""
    if name not in RECIPES:
        raise ArgumentError(f"no recipe {name!r}; there are {', '.join(RECIPES)}")
    return RECIPES[name]
