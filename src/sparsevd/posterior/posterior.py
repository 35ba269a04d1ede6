"""A tensor of weights with noise. Whoever trains, counts, cuts or writes weights iterates `posteriors(model)`.

A layer declares its posteriors; nobody else needs to know how many it has, or what its parameters are called. In their
names "weight" becomes "log_sigma2": `weight` → `log_sigma2`, `weight_hh_l0` → `log_sigma2_hh_l0`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from sparsevd.errors import ArgumentError, ConversionError
from sparsevd.posterior import equations
from sparsevd.posterior.divergence import summed_kl
from sparsevd.posterior.spread import local, part_for, whole

# log α = 3 is a Binary Dropout rate of 0.95: the paper's threshold.
THRESHOLD = 3.0
# log σ² of a weight that was dropped for good: no noise, and with θ = 0 a log α above any threshold.
DROPPED_LOG_SIGMA2 = -60.0
# log σ² below the logarithm of a layer's mean square weight; e⁻³ of the weight's size as noise.
BELOW_WEIGHTS = 6.0


def checked_threshold(threshold: float) -> float:
    """The threshold as a float; NaN compares false with everything and would prune nothing without a word."""
    if math.isnan(threshold):
        raise ArgumentError("threshold is NaN; give a number, such as the paper's 3.0")
    return float(threshold)


def noise_name(weight: str) -> str:
    """What the parameter of log σ² is called, beside the weight of this name."""
    return weight.replace("weight", "log_sigma2")


def label_of(name: str) -> str:
    """What people call the weight of this name: by its layer, where that has only one."""
    return name.removesuffix("weight").removesuffix(".") if name.rpartition(".")[2] == "weight" else name


class NoisyModule(nn.Module, ABC):
    """A module that holds tensors of weights with noise, and draws that noise in training mode."""

    threshold: float
    variance_dtype: torch.dtype | None  # in which δ is computed; None: as the module likes, or bfloat16 if that ...
    bfloat16_where_faster: bool  # ... is allowed and faster
    others: tuple[str, ...]  # names of the parameters without noise
    noise_is_on = True  # `switch_noise`: off while a budget trains without it; all else of training mode stays
    read_elsewhere = False  # its weights are, by a forward that is not this layer's ...
    measured_elsewhere = False  # ... or their shape is: either needs them as they are

    @property
    def draws_noise(self) -> bool:
        """Whether the next forward pass samples; else it computes with the weights as eval mode has them."""
        return self.training and self.noise_is_on

    def __getstate__(self) -> dict[str, Any]:
        """Without what a run has switched for a while: whoever holds a copy could not switch it back."""
        return {name: value for name, value in self.__dict__.items() if name not in ("noise_is_on", "_held")}

    @abstractmethod
    def posteriors(self) -> Sequence["Posterior"]:
        """Each tensor of weights with noise, once."""

    @abstractmethod
    def plain(self, threshold: float | None = None) -> nn.Module:
        """The module without noise, with exact zeros beyond the threshold, its own by default."""


@final
class Posterior:
    """q(w) = N(θ, σ²) of one tensor of weights (eq. 11), as its layer holds it.

    A view of the layer's parameters: they are looked up each time, so it stays right when they are moved, cast or
    exchanged for smaller ones.

    Args:
        layer: the module that holds the parameters.
        weight: the name of θ there.
        contractible: θ is [unit, input, ...], and the layer can compute without some of its units and inputs.
        unit_axis: which of the first two axes counts units; the other one counts inputs.

    `name` is that of θ in the whole model, once `posteriors` has found it there.
    """

    def __init__(self, layer: NoisyModule, weight: str = "weight", *, contractible: bool = False, unit_axis: int = 0):
        self.layer, self.weight, self.noise = layer, weight, noise_name(weight)
        self._contractible, self.unit_axis = contractible, unit_axis
        self.name = weight

    @property
    def theta(self) -> Tensor:
        return cast(Tensor, getattr(self.layer, self.weight))

    @property
    def log_sigma2(self) -> Tensor:
        return cast(Tensor, getattr(self.layer, self.noise))

    @property
    def threshold(self) -> float:
        return self.layer.threshold

    @property
    def contractible(self) -> bool:
        return self._contractible and not (self.layer.read_elsewhere or self.layer.measured_elsewhere)

    @property
    def label(self) -> str:
        """What people call it."""
        return label_of(self.name)

    def noise_beside(self, name: str) -> str:
        """The name of log σ² in the model, where θ has this name."""
        return name.removesuffix(self.weight) + self.noise

    def whole(self) -> tuple[Tensor, Tensor]:
        """θ and log σ², gathered from all processes where they are spread over several."""
        return whole(self.theta), whole(self.log_sigma2)

    def kl(self) -> Tensor:
        """KL(q ‖ p), a scalar (eq. 14)."""
        return summed_kl([self.whole()])

    def log_alpha(self) -> Tensor:
        """log α of every weight."""
        return equations.log_alpha(*self.whole())

    def pruned(self, threshold: float | None = None) -> Tensor:
        """θ with exact zeros where log α exceeds the threshold, the layer's own by default."""
        limit = self.threshold if threshold is None else checked_threshold(threshold)
        return equations.pruned(*self.whole(), limit)

    @torch.no_grad()
    def kept(self, threshold: float | None = None) -> Tensor:
        """True for every weight that pruning would leave."""
        return self.pruned(threshold) != 0

    @torch.no_grad()
    def drop(self, which: Tensor) -> None:
        """Make these weights zero for good: θ = 0, and σ = 0 up to rounding.

        Training must then keep θ there, by multiplying it with `alive()` after each step.
        """
        which = part_for(self.theta, which)
        local(self.theta).masked_fill_(which, 0)
        local(self.log_sigma2).masked_fill_(which, DROPPED_LOG_SIGMA2)

    @torch.no_grad()
    def quieten(self) -> None:
        """Make the noise small against the weights, whatever their scale: for a network that is good already."""
        size = self.theta.double().square().mean().item()
        if size > 0:
            self.log_sigma2.fill_(math.log(size) - BELOW_WEIGHTS)

    @torch.no_grad()
    def alive(self) -> Tensor:
        """False for every weight that was dropped for good."""
        theta, log_sigma2 = self.whole()
        return (theta != 0) | (log_sigma2 > DROPPED_LOG_SIGMA2 + 1)

    @torch.no_grad()
    def inputs_and_units(self) -> list[int]:
        """How many inputs and how many units have a weight that is kept; of one group for a grouped layer."""
        kept = self.kept()
        kept = kept.flatten(2).any(2) if kept.ndim > 2 else kept
        return [int(kept.any(axis).sum()) for axis in (self.unit_axis, 1 - self.unit_axis)]


def named_posteriors(model: nn.Module) -> dict[str, Posterior]:
    """The posteriors of all layers under every name that their θ has in the model; `name` of each is its first."""
    first: dict[tuple[int, int], Posterior] = {}
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for each in module.posteriors() if isinstance(module, NoisyModule) else ():
            each.name = f"{prefix}.{each.weight}" if prefix else each.weight
            found[each.name] = first.setdefault((id(each.theta), id(each.log_sigma2)), each)
    return found


def posteriors(model: nn.Module) -> list[Posterior]:
    """The posteriors of all layers of a model, each once, also where modules or parameters are shared."""
    return [each for name, each in named_posteriors(model).items() if name == each.name]


def required_posteriors(model: nn.Module) -> list[Posterior]:
    """The same, for those who cannot do without: a plain network is a mistake of the caller's."""
    found = posteriors(model)
    if not found:
        raise ConversionError(f"no Sparse VD layer in {type(model).__name__}; call sparsevd.sparsify first")
    return found


def checked_sparsity(sparsity: float) -> float:
    """A share of zeros; per cent are a likely mistake."""
    if not 0 <= sparsity <= 1:  # also NaN
        meant = f"; did you mean {sparsity / 100:g}?" if 1 < sparsity <= 100 else ""
        raise ArgumentError(f"sparsity={sparsity!r} must be a share of the weights, from 0 to 1{meant}")
    return float(sparsity)


@torch.no_grad()
def threshold_for(pairs: Sequence[tuple[Tensor, Tensor]], sparsity: float) -> float:
    """The threshold that makes this share of all weights zero: a quantile of log α over pairs (θ, log σ²).

    A weight that is zero already has the largest log α and goes first.
    """
    log_alpha = torch.cat([equations.log_alpha(*pair).flatten().cpu() for pair in pairs])
    kept = len(log_alpha) - round(checked_sparsity(sparsity) * len(log_alpha))
    return log_alpha.kthvalue(kept).values.item() if kept else -math.inf


def noisy_modules(model: nn.Module) -> dict[str, NoisyModule]:
    """The modules that draw noise in training mode, by name; a shared one once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, NoisyModule)}


def biases(model: nn.Module) -> set[Tensor]:
    """The parameters of Sparse VD layers that have no noise. Those of attention may have more than one axis."""
    layers = noisy_modules(model).values()
    return {p for layer in layers for name in layer.others if (p := layer._parameters.get(name)) is not None}


def switch_noise(model: nn.Module, on: bool) -> None:
    """Noise in training mode, or none."""
    for module in noisy_modules(model).values():
        module.noise_is_on = on


def is_noisy(model: nn.Module) -> bool:
    """Whether a network has a layer of Sparse VD."""
    return any(isinstance(module, NoisyModule) for module in model.modules())
