"""Soft Weight Sharing: a learned mixture as prior, then quantisation. Ullrich, Meeds, Welling, ICLR 2017.

From a trained network on, all weights get a prior of J Gaussians whose means, precisions and proportions are learned
with them; one component is fixed at zero with a large fixed proportion. The loss is NLL + τ·(−log p(weights) − log of
Gamma priors on the precisions)/N. The weights gather around the means; at the end each weight takes the mean of the
component most responsible for it, and those of the zero component are zero.

Suggested settings: `zero_proportion` decides the sparsity, and `tau` how sharp the mixture becomes. On 10,000 held-out
images of MNIST, LeNet-300-100 in 40 epochs: the defaults leave 31 times fewer weights at 2.84 % (2.09 % before the
rounding); a proportion of 0.99, with a longer dense part and components over the whole range, 13 times fewer at 2.31 %
(1.87 %). The priors on the precisions are those of the authors' tutorial; its tau is 0.003, its rates are a half to a
tenth of ours, and it makes some 7,000 steps after 100 dense epochs, where 40 epochs have 4,500 here after 10.
Known negatives: slow, J passes over all weights a step; the last rounding costs accuracy where the mixture has not
become sharp.
Departs from the original: fewer steps, to save time, with higher rates and a higher tau for them, and a dense part of
10 epochs of 40; the zero component has 0.999 of the proportion instead of 0.99; components are not merged afterwards
(one that came to lie at zero would add zeros); they start over the range of nearly all weights, not over ±0.6, and as
wide as the gaps between them, not 0.25; batches are larger than those of the dense part; biases keep their own values;
weight and mixture rates fall to zero along a half cosine.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from sparsevd.baselines.training import Method, Outcome, Training, adam, check, named_weights


@dataclass(frozen=True)
class SoftWeightSharing(Method):
    """Hyper-parameters of Soft Weight Sharing."""

    title: ClassVar[str] = "Soft Weight Sharing (Ullrich et al.)"

    components: int = 16  # beside the one at zero
    zero_proportion: float = 0.999
    tau: float = 0.05  # weight of the prior
    dense_part: float = 0.25  # of the budget
    batch_size_factor: int = 4  # batches are larger in the second part, since a step costs passes over all weights
    learning_rate: float = 1e-3
    weights_rate: float = 1e-3
    means_rate: float = 5e-4
    precisions_rate: float = 3e-2
    proportions_rate: float = 1e-2
    gamma_zero: tuple[float, float] = (5e3, 2.0)  # shape and rate of the prior on the zero component's precision
    gamma_rest: tuple[float, float] = (2.5e2, 0.1)

    def __post_init__(self) -> None:
        rates = ("learning_rate", "weights_rate", "means_rate", "precisions_rate", "proportions_rate")
        check(self, positive=("tau", *rates), inside=("zero_proportion",), part=("dense_part",))
        check(self, count=("components", "batch_size_factor"))

    def train(self, model: nn.Module, training: Training) -> Outcome:
        first = min(max(1, round(self.dense_part * training.epochs)), training.epochs - 1)
        if first:
            training.run(model, adam(model, self.learning_rate), first)
        weights = list(named_weights(model).values())
        mixture = Mixture(torch.cat([w.detach().flatten() for w in weights]), self)
        optimizer = torch.optim.Adam(
            [
                {"params": list(model.parameters()), "lr": self.weights_rate},
                {"params": [mixture.means], "lr": self.means_rate},
                {"params": [mixture.log_precisions], "lr": self.precisions_rate},
                {"params": [mixture.logits], "lr": self.proportions_rate},
            ]
        )

        def penalty(done: float) -> Tensor:
            everything = torch.cat([w.flatten() for w in weights])
            return self.tau / training.n * mixture.complexity(everything)

        before = training.batch_size
        training.batch_size = before * self.batch_size_factor
        training.run(model, optimizer, training.epochs - training.spent, penalty=penalty)
        training.batch_size = before
        unrounded = copy.deepcopy(model)
        with torch.no_grad():
            for weight in weights:
                weight.copy_(mixture.quantised(weight))
        return Outcome(model, before_threshold=unrounded)


class Mixture:
    """The prior: component 0 at zero, the others spread over the range of the weights at first."""

    def __init__(self, weights: Tensor, settings: SoftWeightSharing):
        self.settings = settings
        reach = weights.abs().kthvalue(max(1, round(0.999 * len(weights)))).values.item()  # a few are far larger
        spacing = 2 * reach / max(1, settings.components - 1)
        self.means = torch.linspace(-reach, reach, settings.components).requires_grad_()
        # Each starts as wide as the gap to its neighbour, and none wider than the weights themselves need.
        deviation = torch.full((settings.components + 1,), 0.9 * spacing)
        deviation[0] = weights.std()
        self.log_precisions = (-2 * deviation.log()).requires_grad_()
        self.logits = torch.zeros(settings.components, requires_grad=True)

    def log_components(self, weights: Tensor) -> Tensor:
        """log(π_j·N(w | μ_j, 1/λ_j)) of every weight, with a last dimension for the components."""
        distance = weights.unsqueeze(-1) - self._all_means()
        constant = _log_constant(self.log_precisions, self._log_proportions())
        return constant - 0.5 * self.log_precisions.exp() * distance**2

    def _all_means(self) -> Tensor:
        return torch.cat([torch.zeros(1), self.means])

    def _log_proportions(self) -> Tensor:
        zero = self.settings.zero_proportion
        return torch.cat([torch.tensor([math.log(zero)]), math.log(1 - zero) + torch.log_softmax(self.logits, 0)])

    def complexity(self, weights: Tensor) -> Tensor:
        """−log p of the weights and of the precisions under their Gamma priors, up to a constant."""
        shape, rate = (
            torch.tensor([zero, *[rest] * self.settings.components])
            for zero, rest in zip(self.settings.gamma_zero, self.settings.gamma_rest, strict=True)
        )
        hyper = ((shape - 1) * self.log_precisions - rate * self.log_precisions.exp()).sum()
        likelihood = cast(Callable[..., Tensor], _LogLikelihood.apply)
        return -likelihood(weights, self._all_means(), self.log_precisions, self._log_proportions()) - hyper

    def quantised(self, weights: Tensor) -> Tensor:
        """Every weight at the mean of the component most responsible for it."""
        nearest = self.log_components(weights.flatten()).argmax(-1)
        return self._all_means()[nearest].view_as(weights)


def _log_constant(log_precisions: Tensor, log_proportions: Tensor) -> Tensor:
    """log(π·√(λ / 2π)): the part of a component that does not depend on the weight."""
    return log_proportions + 0.5 * (log_precisions - math.log(2 * math.pi))


class _LogLikelihood(torch.autograd.Function):
    """Σᵢ log Σⱼ πⱼ·N(wᵢ | μⱼ, 1/λⱼ) with all its gradients in one pass, a few thousand weights at a time.

    Autograd would write a table of weights × components to memory for every operation, and sums over a short last
    dimension are slow: with a row for each component this is three times faster than a row for each weight.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, means: Tensor, log_precisions: Tensor, log_proportions: Tensor) -> Tensor:
        value = weights.new_zeros(())
        by_weight = torch.empty_like(weights)
        by_mean, by_precision, by_proportion = (torch.zeros_like(means) for _ in range(3))
        precisions = log_precisions.exp()[:, None]
        constant = _log_constant(log_precisions, log_proportions)[:, None]
        for start in range(0, len(weights), 8192):
            distance = weights[start : start + 8192] - means[:, None]
            pull = distance * precisions
            share = torch.addcmul(constant, pull, distance, value=-0.5)  # log of each component at each weight
            largest = share.amax(0)
            # exp is four times slower where it underflows, and e^-40 beside 1 is nothing in float32.
            total = share.sub_(largest).clamp_(min=-40).exp_().sum(0)
            value += (largest + total.log()).sum()
            share /= total
            pull *= share
            by_weight[start : start + 8192] = -pull.sum(0)
            by_mean += pull.sum(1)
            by_proportion += share.sum(1)
            by_precision += 0.5 * (share - pull * distance).sum(1)
        ctx.save_for_backward(by_weight, by_mean, by_precision, by_proportion)
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad * gradient for gradient in ctx.saved_tensors)
