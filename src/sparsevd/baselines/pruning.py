"""Pruning: magnitude pruning with retraining. Han, Pool, Tran, Dally: Learning both Weights and Connections, 2015.

Train with L2 regularisation; then, in rounds, remove every weight below a threshold and train those that are left.
The threshold of a layer is a quality parameter times the standard deviation of its weights.

Suggested settings: `quality` decides the sparsity. On 10,000 held-out images of MNIST, LeNet-300-100 in 40 epochs: 1.6
leaves a sixth of the weights at 1.74 %, 2.6 leaves an eighteenth at 2.57 %; the default lies between them.
Known negatives: removed weights never return, so too high a threshold cannot be made good; of weights that are still as
uniform as torch starts them, a quality above 1.73 leaves none.
Departs from the original: one quality for all layers, where the authors choose each layer's by how sensitive it is
(small convolutions lose more here, and large layers less); it grows over `rounds` equal steps to its final value, where
they search by hand; units that are left without inputs or outputs keep their other weights, which count as kept; AdamW
and its decoupled decay instead of SGD and L2; the retraining rate starts at a half of the first rate, not at a tenth,
and falls to zero within each round, without L2; Dropout rates of the network stay as they are; all thresholds come from
the deviation of the dense layer's weights.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from sparsevd.baselines.training import Method, Outcome, Training, adam, check, named_weights


@dataclass(frozen=True)
class Pruning(Method):
    """Hyper-parameters of magnitude pruning."""

    title: ClassVar[str] = "Pruning (Han et al.)"

    quality: float = 2.1  # threshold / standard deviation, after the last round
    rounds: int = 4
    dense_part: float = 0.4  # of the budget, before the first round
    learning_rate: float = 1e-3
    retraining_rate: float = 5e-4
    weight_decay: float = 0.05

    def __post_init__(self) -> None:
        positive = ("quality", "learning_rate", "retraining_rate")
        check(self, positive=positive, not_negative=("weight_decay",), part=("dense_part",), count=("rounds",))

    def train(self, model: nn.Module, training: Training) -> Outcome:
        first = max(1, round(self.dense_part * training.epochs))
        rounds = max(1, min(self.rounds, training.epochs - first))
        first = min(first, training.epochs - rounds)
        training.run(model, adam(model, self.learning_rate, self.weight_decay), first)
        weights = named_weights(model)
        dense_deviation = {name: weight.std().item() for name, weight in weights.items()}
        for step in range(1, rounds + 1):
            masks: list[tuple[Tensor, Tensor]] = []
            for name, weight in weights.items():
                mask = weight.data.abs() > self.quality * step / rounds * dense_deviation[name]
                masks.append((weight.data, mask))

            def keep_pruned(done: float, masks: list[tuple[Tensor, Tensor]] = masks) -> None:
                with torch.no_grad():
                    for weight, mask in masks:
                        weight.mul_(mask)

            keep_pruned(0.0)
            left = training.epochs - training.spent
            epochs = left // (rounds - step + 1)
            training.run(model, adam(model, self.retraining_rate), epochs, after_step=keep_pruned)
        return Outcome(model)
