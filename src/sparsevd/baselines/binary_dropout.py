"""Binary Dropout: inputs of layers are zero with probability p in training. Hinton et al., 2012 (eq. 6 of the paper).

Suggested settings: 0.2 for the network's input and 0.5 for the inputs of later fully-connected layers, as the
authors.
Known negatives: it regularises and makes nothing sparse.
Departs from the original: Adam, and no limit on the norm of a unit's weights. Dropout modules of the network stay,
besides.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch.nn.functional as F
from torch import nn

from sparsevd.baselines.noise import noisy_inputs
from sparsevd.baselines.training import Method, Outcome, Training, adam, check, weight_layers


@dataclass(frozen=True)
class BinaryDropout(Method):
    """Hyper-parameters of Binary Dropout."""

    title: ClassVar[str] = "Binary Dropout"

    rate: float = 0.5  # p for the inputs of fully-connected layers
    input_rate: float = 0.2  # p for the first layer
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        check(self, positive=("learning_rate",), probability=("rate", "input_rate"))

    def train(self, model: nn.Module, training: Training) -> Outcome:
        rates = dropout_rates(model, self.rate, self.input_rate)
        with noisy_inputs({layer: partial(F.dropout, p=rate) for layer, rate in rates.items()}):
            training.run(model, adam(model, self.learning_rate), training.epochs)
        return Outcome(model)


def dropout_rates(model: nn.Module, rate: float, input_rate: float) -> dict[nn.Module, float]:
    """The rate for the input of each layer: the first has its own, later convolutions have none."""
    first, *later = weight_layers(model).values()
    return {first: input_rate, **{layer: rate for layer in later if isinstance(layer, nn.Linear)}}
