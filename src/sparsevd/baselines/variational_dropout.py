"""Variational Dropout in its original, multiplicative parametrisation. Kingma, Salimans, Welling, 2015.

Every weight is w = θ·(1 + √α·ε) with an α of its own (eq. 7, 10 of the Sparse VD paper); (θ, log α) are trained on the
bound, with the local reparametrisation. `variational-dropout` keeps α ≤ 1 as the authors did, with their polynomial for
the KL in training; `variational-dropout-unrestricted` lets α grow, with the KL of eq. 14, and drops weights of log α >
3. Sparse VD has the same posteriors and the same bound, with noise σ·ε instead of θ·√α·ε (eq. 11).

Suggested settings: the defaults; they are not tuned on held-out data.
Known negatives: with α ≤ 1 nothing becomes sparse; without the limit the gradient of θ is noisy where α is large, so
that, as the Sparse VD paper reports, training is slower and ends at a worse bound.
Departs from the original: one α per weight, where the authors trained one per layer, unit or input; the KL is warmed
up and the network's Dropout modules are off, as for Sparse VD.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from sparsevd.baselines.noise import noisy_outputs, product
from sparsevd.baselines.training import Method, Outcome, Training, check, weight_layers
from sparsevd.conversion import DROPOUT_TYPES
from sparsevd.posterior import THRESHOLD, equations
from sparsevd.training.evaluation import noisy_loss
from sparsevd.training.objective import warm_up


@dataclass(frozen=True)
class VariationalDropout(Method):
    """Hyper-parameters of Variational Dropout."""

    title: ClassVar[str] = "Variational Dropout, α ≤ 1 (Kingma et al.)"

    restricted: bool = True
    learning_rate: float = 2e-3
    log_alpha_lr_ratio: float = 1.0
    initial_log_alpha: float = -3.0
    warm_up_end: float = 0.2

    def __post_init__(self) -> None:
        check(self, positive=("learning_rate", "log_alpha_lr_ratio"), finite=("initial_log_alpha",))
        warm_up(0.0, self.warm_up_end)  # refuses what is no part of a run

    def train(self, model: nn.Module, training: Training) -> Outcome:
        layers = weight_layers(model)
        dropout_rates = {module: module.p for module in model.modules() if isinstance(module, DROPOUT_TYPES)}
        for module in dropout_rates:
            module.p = 0.0
        log_alphas = {
            name: torch.full_like(cast(Tensor, layer.weight), self.initial_log_alpha, requires_grad=True)
            for name, layer in layers.items()
        }
        negative_kl = equations.negative_kl_kingma_cubic if self.restricted else equations.negative_kl
        beta = warm_up(0.0, self.warm_up_end)

        def divergence(negative_kl: Callable[[Tensor], Tensor]) -> Tensor:
            return torch.stack([-negative_kl(log_alpha).sum() for log_alpha in log_alphas.values()]).sum()

        def penalty(done: float) -> Tensor:
            return beta(done) / training.n * divergence(negative_kl)

        def restrict(done: float) -> None:
            with torch.no_grad():
                for log_alpha in log_alphas.values():
                    log_alpha.clamp_(max=0.0)

        optimizer = torch.optim.Adam(
            [
                {"params": list(model.parameters()), "lr": self.learning_rate},
                {"params": list(log_alphas.values()), "lr": self.learning_rate * self.log_alpha_lr_ratio},
            ],
            betas=(0.9, 0.99),
            fused=True,
        )
        with noisy_outputs({layer: multiplicative_noise(layer, log_alphas[name]) for name, layer in layers.items()}):
            training.run(
                model,
                optimizer,
                training.epochs,
                penalty=penalty,
                after_step=restrict if self.restricted else None,
            )
            with torch.no_grad():
                nll = training.n * noisy_loss(model, layers.values(), training.data, training.loss)
                # By eq. 14 in both cases, as for Sparse VD: the polynomial is off by up to 0.04 for every weight.
                bound = -(nll + divergence(equations.negative_kl).item())
        for module, rate in dropout_rates.items():
            module.p = rate
        before = copy.deepcopy(model)
        with torch.no_grad():
            for name, layer in layers.items():
                cast(Tensor, layer.weight).masked_fill_(log_alphas[name] > THRESHOLD, 0)
        return Outcome(model, before_threshold=before, elbo=bound)


@dataclass(frozen=True)
class UnrestrictedVariationalDropout(VariationalDropout):
    """The same without the limit on α."""

    title: ClassVar[str] = "Variational Dropout, any α"

    restricted: bool = False


def multiplicative_noise(layer: nn.Module, log_alpha: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The output sampled with the local reparametrisation: mean γ = A·θ + bias, variance δ = A²·(αθ²)."""

    def noisy(input: Tensor, output: Tensor) -> Tensor:
        weight = cast(Tensor, layer.weight)
        # (√α·θ)²: α may overflow where θ is tiny, its root does not.
        delta = product(layer, input * input, ((0.5 * log_alpha).exp() * weight) ** 2)
        return equations.noisy_output(output, delta, torch.randn_like(output))

    return noisy
