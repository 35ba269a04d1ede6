"""Gradual magnitude pruning. Zhu, Gupta: To prune, or not to prune, 2017.

The smallest weights are zero; how many grows while the network trains, fast at first and then ever more slowly: at part
t of the ramp, s·(1 − (1 − t)³) of them for a final sparsity s. Then what is left is trained, with a rate that falls to
zero. With `l1`, an L1 penalty makes small weights smaller until the last cut.

Suggested settings: `sparsity` decides. The others were tuned by hand at 87 times fewer weights, on the last 10,000
training images of MNIST, LeNet-300-100 in 40 epochs (six trials): 2.02 % with L1 3e-5 and a rate that is held until the
ramp ends; without L1, and with a rate that falls over the whole run, the error was 0.9 points higher. On the test set,
trained on all images: 103 times fewer weights at 1.98 and 1.90 % (two seeds). Leads of another implementation, not of
this one.
Known negatives: the sparsity must be known beforehand; a global cut may empty a small layer of a deep network.
Departs from the original: the cut is global, over all layers together, not a share of each; Adam; the L1 penalty; masks
are made anew at every cut from the weights as they are, so that a weight that was zero stays zero.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from sparsevd.baselines.training import Method, Outcome, Training, adam, check, named_weights


@dataclass(frozen=True)
class GradualPruning(Method):
    """Hyper-parameters of gradual magnitude pruning."""

    title: ClassVar[str] = "Gradual magnitude pruning (Zhu, Gupta)"

    sparsity: float = 0.99
    begin: float = 0.05  # of the budget, before the first cut
    end: float = 0.6  # of the budget, by when the sparsity is reached
    every: int = 100  # steps between two cuts
    learning_rate: float = 2e-3
    l1: float = 3e-5  # until the last cut
    include: tuple[str, ...] = ()  # names of layers, as for `sparsify`: the weights of these only; else of all

    def __post_init__(self) -> None:
        check(self, inside=("sparsity",), part=("begin", "end"), count=("every",))
        check(self, positive=("learning_rate",), not_negative=("l1",))

    def train(self, model: nn.Module, training: Training) -> Outcome:
        weights = list(named_weights(model, self.include).values())
        ramp = min(max(1, round(self.end * training.epochs)), training.epochs)
        optimizer = adam(model, self.learning_rate)
        continued = training.go_on(self, model, optimizer)  # else a weight that begins at zero may learn
        steps = int(optimizer.state[weights[0]]["step"]) if continued else 0
        masks = [(weight != 0) if continued else torch.ones_like(weight, dtype=torch.bool) for weight in weights]

        def cut(done: float) -> None:
            nonlocal steps
            steps += 1
            part = (done * ramp / training.epochs - self.begin) / max(self.end - self.begin, 1e-9)
            if steps % self.every == 0 and part > 0:
                masks[:] = kept(weights, ramped(self.sparsity, part))
            _apply(weights, masks)

        def penalty(done: float) -> Tensor:
            return self.l1 * torch.stack([weight.abs().sum() for weight in weights]).sum()

        training.run(model, optimizer, ramp, penalty=penalty if self.l1 else None, after_step=cut, decay=False)
        masks[:] = kept(weights, self.sparsity)
        _apply(weights, masks)
        if training.epochs > training.spent:
            left = training.epochs - training.spent
            training.run(model, optimizer, left, after_step=lambda done: _apply(weights, masks))
        return Outcome(model)


def ramped(sparsity: float, part: float) -> float:
    """The sparsity when a part of the ramp, from 0 to 1, is over: the cubic of the paper."""
    return sparsity * (1 - (1 - min(part, 1.0)) ** 3)


@torch.no_grad()
def kept(weights: list[nn.Parameter], sparsity: float) -> list[Tensor]:
    """Masks of all but the smallest weights, over all tensors together."""
    sizes = torch.cat([weight.abs().flatten() for weight in weights])
    count = round(sparsity * len(sizes))
    limit = sizes.kthvalue(count).values if count else -1.0
    return [weight.abs() > limit for weight in weights]


@torch.no_grad()
def _apply(weights: list[nn.Parameter], masks: list[Tensor]) -> None:
    for weight, mask in zip(weights, masks, strict=True):
        weight.mul_(mask)
