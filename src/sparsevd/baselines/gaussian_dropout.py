"""Gaussian Dropout: inputs of layers are multiplied by N(1, α) in training, α = p/(1 − p). Srivastava et al., 2014.

By Wang and Manning (2013) this is sampling the weights from N(θ, αθ²) with one fixed α for all (eq. 7 of the paper).

Suggested settings: the rates p of Binary Dropout.
Known negatives: it regularises and makes nothing sparse.
Departs from the original: Adam. Dropout modules of the network stay, besides.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from sparsevd.baselines.binary_dropout import dropout_rates
from sparsevd.baselines.noise import noisy_inputs
from sparsevd.baselines.training import Method, Outcome, Training, adam, check


@dataclass(frozen=True)
class GaussianDropout(Method):
    """Hyper-parameters of Gaussian Dropout."""

    title: ClassVar[str] = "Gaussian Dropout"

    rate: float = 0.5
    input_rate: float = 0.2
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        check(self, positive=("learning_rate",), probability=("rate", "input_rate"))

    def train(self, model: nn.Module, training: Training) -> Outcome:
        rates = dropout_rates(model, self.rate, self.input_rate)
        with noisy_inputs({layer: partial(noisy, alpha=rate / (1 - rate)) for layer, rate in rates.items()}):
            training.run(model, adam(model, self.learning_rate), training.epochs)
        return Outcome(model)


def noisy(input: Tensor, alpha: float) -> Tensor:
    """A⊙Ξ with ξ ~ N(1, α), eq. 6 of the paper."""
    return input * torch.randn_like(input).mul(alpha**0.5).add(1)
