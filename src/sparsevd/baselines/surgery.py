"""Dynamic Network Surgery: pruning with splicing. Guo, Yao, Chen: Dynamic Network Surgery for Efficient DNNs, 2016.

From a trained network on, every weight W has a mask T. The network computes with W⊙T, but the gradient of that
product updates all of W, so that a masked weight can grow back. From time to time, with probability (1
+ γ·t)^−p at step t, the masks are renewed: 0 where |W| < 0.9·h, 1 where |W| > 1.1·h, and unchanged between, where h =
mean + c·deviation of |W| in the layer of the trained network. At last the masks are held and the rest
is trained.

Suggested settings: `c` decides the sparsity. On 10,000 held-out images of MNIST, LeNet-300-100 in 40 epochs: 2.0 gives
48 times fewer weights at 1.70 %, the default 59 times fewer at 1.81 %, 3.6 106 times fewer at 2.84 %.
Known negatives: the authors choose a c for every layer; one for all, as here, may suit none of them.
Departs from the original: one c for all layers; convolutions and fully-connected layers are cut together, not one
kind after the other; biases are not masked; the trained network comes from Adam; rates fall along a half cosine; the
schedule is given in parts of the budget.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from sparsevd.baselines.training import Method, Outcome, Training, adam, check, named_weights


@dataclass(frozen=True)
class Surgery(Method):
    """Hyper-parameters of Dynamic Network Surgery."""

    title: ClassVar[str] = "Dynamic Network Surgery (Guo et al.)"

    c: float = 2.4
    gamma: float = 1e-3  # how fast renewals of the masks become rare
    power: float = 1.0
    dense_part: float = 0.3  # of the budget, before the first mask
    renewing_part: float = 0.6  # of the rest, after which masks are held
    dense_rate: float = 1e-3  # Adam
    learning_rate: float = 5e-2  # SGD with momentum 0.9
    weight_decay: float = 5e-4

    def __post_init__(self) -> None:
        check(self, finite=("c",), positive=("dense_rate", "learning_rate"), part=("dense_part", "renewing_part"))
        check(self, not_negative=("gamma", "power", "weight_decay"))

    def train(self, model: nn.Module, training: Training) -> Outcome:
        first = min(max(1, round(self.dense_part * training.epochs)), training.epochs - 1)
        if first:
            training.run(model, adam(model, self.dense_rate), first)
        weights = named_weights(model)
        with torch.no_grad():
            limits = {name: (w.abs().mean() + self.c * w.abs().std()).item() for name, w in weights.items()}
            masks = {name: torch.ones_like(w) for name, w in weights.items()}
        chance = torch.Generator().manual_seed(training.seed)
        step = 0

        def renew_all() -> None:
            for name, weight in weights.items():
                renew(masks[name], weight, limits[name])

        def after_step(done: float) -> None:
            nonlocal step
            step += 1
            if done < self.renewing_part:
                probability = (1 + self.gamma * step) ** -self.power
                if torch.rand((), generator=chance).item() < probability:
                    renew_all()

        def masked() -> dict[str, Tensor]:
            # The value is W⊙T, the gradient that of the identity: masked weights learn too.
            return {name: w + (w * masks[name] - w).detach() for name, w in weights.items()}

        renew_all()
        optimizer = torch.optim.SGD(
            model.parameters(), lr=self.learning_rate, momentum=0.9, weight_decay=self.weight_decay, fused=True
        )
        training.run(model, optimizer, training.epochs - training.spent, weights=masked, after_step=after_step)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.mul_(masks[name])
        return Outcome(model)


@torch.no_grad()
def renew(mask: Tensor, weight: Tensor, h: float) -> None:
    """Prune what is clearly below the limit, splice what is clearly above it, leave the rest as it is."""
    size = weight.abs()
    mask.masked_fill_(size < 0.9 * h, 0).masked_fill_(size > 1.1 * h, 1)
