"""The KL's gradient joins that of the data at the optimizer's step, after everything that loops do to gradients.

For Adam without decay, on tensors that the kernels can take, it is made for a few hundred weights at a time in the pass
that changes them: through autograd, θ and log σ² would each get two gradients that are written, added and read again.
For every other optimizer it is added to the gradients that are there.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from sparsevd import kernels
from sparsevd.errors import ArgumentError
from sparsevd.posterior import Posterior, biases, posteriors
from sparsevd.posterior.divergence import kl_gradients
from sparsevd.posterior.spread import local
from sparsevd.training.output_units import OutputUnits
from sparsevd.training.recipes import FitConfig

Group = dict[str, Any]
Pair = tuple[Tensor, Tensor]
_ADAM = (torch.optim.Adam, torch.optim.AdamW)


def parameter_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.0, *, log_sigma2_lr_ratio: float | None = None
) -> list[Group]:
    """The groups for any torch optimizer: log σ² at its own rate, and decay only where there is no posterior.

        optimizer = torch.optim.AdamW(sparsevd.parameter_groups(model, lr=1e-3, weight_decay=0.01))

    θ and log σ² are never decayed, since the KL takes its place; nor are biases and the parameters of norms, or
    whatever else has one axis only.

    Args:
        model: the result of `sparsevd.sparsify`.
        lr: the rate of the weights.
        weight_decay: of the matrices that have no noise.
        log_sigma2_lr_ratio: the rate of log σ² relative to it; the recipe's, unless given. `attach` sets it anew at
            every step, from the rate that the weights have then.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ArgumentError("every parameter of the model is frozen; there is nothing to train")
    found = posteriors(model)
    noise, theta = {each.log_sigma2 for each in found}, {each.theta for each in found}
    spared = noise | theta | biases(model)
    decayed = {p for p in trained if p.ndim > 1 and p not in spared} if weight_decay else set()
    ratio = FitConfig().log_sigma2_lr_ratio if log_sigma2_lr_ratio is None else log_sigma2_lr_ratio
    groups: list[Group] = [
        {"params": [p for p in trained if p not in noise | decayed], "lr": lr, "weight_decay": 0.0, "noise": False},
        {"params": [p for p in trained if p in decayed], "lr": lr, "weight_decay": weight_decay, "noise": False},
        {"params": [p for p in trained if p in noise], "lr": lr * ratio, "weight_decay": 0.0, "noise": True},
    ]
    return [group for group in groups if group["params"]]


class BoundStep:
    """What the steps of one optimizer have to do with the KL of a network's posteriors."""

    def __init__(self, optimizer: torch.optim.Optimizer, posteriors: Sequence[Posterior]):
        self._optimizer, self._posteriors = optimizer, posteriors
        uses = Counter(p for each in posteriors for p in (each.theta, each.log_sigma2))
        self._shared = {p for p, count in uses.items() if count > 1}  # their KL has several terms
        self._places: dict[Tensor, int | None] = {}
        self._groups = 0  # how many there were when the places were found

    def group_of(self, parameter: Tensor) -> Group | None:
        """Where the optimizer has this parameter. Contraction exchanges parameters, the optimizer's own load_state_dict
        its groups, and add_param_group brings new ones, so it is asked for each time."""
        if parameter not in self._places or self._groups != len(self._optimizer.param_groups):
            self._groups = len(self._optimizer.param_groups)
            groups = enumerate(self._optimizer.param_groups)
            found = {p: place for place, group in groups for p in group["params"]}
            self._places = {p: found.get(p) for p in {*self._places, *found, parameter}}
        place = self._places[parameter]
        return None if place is None else self._optimizer.param_groups[place]

    @property
    def overflows(self) -> bool:
        """Whether the optimizer will not step, since a GradScaler has found an overflow."""
        found = getattr(self._optimizer, "found_inf", None)
        return found is not None and bool(found.item())

    @torch.no_grad()
    def join(self, kl_weight: float) -> None:
        """Right before the optimizer's own step: add kl_weight times the gradient of the KL.

        A fused optimizer under a GradScaler divides the gradients itself: what is added must be scaled as they are.
        """
        scale = getattr(self._optimizer, "grad_scale", None)
        adam = type(self._optimizer) in (BoundAdam, *_ADAM) and scale is None
        scaled = kl_weight if scale is None else kl_weight * scale.item()
        for each in self._posteriors:
            pair = each.theta, each.log_sigma2
            groups = [self.group_of(p) for p in pair]
            if adam and self._fits(pair, groups):
                self._step_in_c(pair, groups, kl_weight)
                continue
            here = [p.requires_grad and group is not None for p, group in zip(pair, groups, strict=True)]
            if scaled and any(here):
                gradients = kl_gradients(*(local(p) for p in pair))
                for parameter, gradient in zip(compress(pair, here), compress(gradients, here), strict=True):
                    _add(parameter, gradient, scaled)

    def _fits(self, pair: Pair, groups: Sequence[Group | None]) -> bool:
        first, second = groups
        return (
            all(p.grad is not None for p in pair)
            and kernels.can_take_pair(*pair)
            and not self._shared.intersection(pair)
            and first is not None
            and second is not None
            and (first["betas"], first["eps"]) == (second["betas"], second["eps"])
            and _is_plain(first)
            and _is_plain(second)
            and len({self._steps_of(p) for p in pair}) == 1  # the kernel corrects both for the same number
        )

    def _steps_of(self, parameter: Tensor) -> float:
        """How many steps Adam has taken with it: fewer than with others, if it was frozen for a time."""
        state = self._optimizer.state.get(parameter)
        return float(state["step"]) if state else 0.0

    def _step_in_c(self, pair: Pair, groups: Sequence[Group | None], kl_weight: float) -> None:
        tensors, steps = [], []
        for group, parameter in zip(groups, pair, strict=True):
            assert group is not None
            assert parameter.grad is not None
            state = self._optimizer.state[parameter]
            if not state:  # as AdamW has it, so that either may go on from the other's
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["step"] += 1
            (beta1, beta2), epsilon = group["betas"], group["eps"]
            count = state["step"].item()
            steps.append(group["lr"] / (1 - beta1**count))
            slots = [_laid_out_like(parameter, state[name]) for name in ("exp_avg", "exp_avg_sq")]
            state["exp_avg"], state["exp_avg_sq"] = slots
            tensors += [parameter, _laid_out_like(parameter, parameter.grad), *slots]
            parameter.grad = None  # used up
        settings = (kl_weight, beta1, beta2, math.sqrt(1 - beta2**count), epsilon, *steps)
        kernels.adam_step_(*tensors, settings=settings)


class BoundAdam(torch.optim.AdamW):
    """Adam with one group for the weights and one, at its own rate, for log σ², whose step is on the negative bound.

    `kl_weight` is the weight of the KL in the objective, β/N; like the learning rate it may change with every step.
    """

    def __init__(
        self,
        model: nn.Module,
        learning_rate: float,
        log_sigma2_lr_ratio: float = 1.0,
        beta2: float = 0.999,
        weight_decay: float = 0.0,
        kl_weight: float = 0.0,
    ):
        self.kl_weight = kl_weight
        self.units: OutputUnits | None = None  # of the output, where they are not about 1
        groups = parameter_groups(model, learning_rate, log_sigma2_lr_ratio=log_sigma2_lr_ratio)
        for group in groups:
            group["weight_decay"] = weight_decay
        super().__init__(groups, betas=(0.9, beta2), fused=True)
        self._bound = BoundStep(self, posteriors(model))

    def set_learning_rate(self, rate: float, log_sigma2_lr_ratio: float) -> None:
        """The rate of the weights, and that of log σ² relative to it."""
        for group in self.param_groups:
            group["lr"] = rate * (log_sigma2_lr_ratio if group["noise"] else 1.0)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step along the gradients that the data term left, and the KL's."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self.units.standard() if self.units else nullcontext():
            if not self._bound.overflows:
                self._bound.join(self.kl_weight)
            _adam_step(self)  # of all that has a gradient yet
        return loss


def _adam_step(optimizer: torch.optim.AdamW) -> None:
    """The step of the class above, without its hooks, which that of BoundAdam has called: once torch's class has an
    instance of its own, its method calls them too."""
    step = torch.optim.AdamW.step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)  # type: ignore[attr-defined]


def _is_plain(group: Group) -> bool:
    """Whether this is Adam as the kernel has it."""
    options = ("weight_decay", "amsgrad", "maximize", "differentiable", "capturable")
    return not any(group[name] for name in options) and not isinstance(group["lr"], Tensor)


def _add(parameter: Tensor, gradient: Tensor, weight: float) -> None:
    """weight · gradient joins what the data term left there."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    local(parameter.grad).add_(gradient.to(parameter.grad.dtype), alpha=weight)


def _laid_out_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """The same numbers in the same order in memory: a gradient or a checkpoint may have them in another."""
    if tensor.shape != parameter.shape:  # copying would spread it
        raise ArgumentError(
            f"a parameter of shape {tuple(parameter.shape)} has a gradient or Adam state of {tuple(tensor.shape)}; "
            "give each parameter its own, or start without the optimizer's state"
        )
    if tensor.stride() == parameter.stride() and tensor.dtype is parameter.dtype:
        return tensor
    return torch.empty_like(parameter).copy_(tensor)
