"""Dense: the network itself, trained with Adam and nothing else. The "original" row of the paper's tables.

Suggested settings: the defaults; weight decay is decoupled from the gradient (AdamW).
Departs from the paper: it does not say how its dense networks were trained.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from sparsevd.baselines.training import Method, Outcome, Training, adam, check


@dataclass(frozen=True)
class Dense(Method):
    """Hyper-parameters of plain training."""

    title: ClassVar[str] = "dense"

    learning_rate: float = 1e-3
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check(self, positive=("learning_rate",), not_negative=("weight_decay",))

    def train(self, model: nn.Module, training: Training) -> Outcome:
        training.run(model, adam(model, self.learning_rate, self.weight_decay), training.epochs)
        return Outcome(model)
