"""Adam on the negative bound: the gradient of the KL joins that of the data in the pass that changes the weights.

Through autograd, θ and log σ² would each get two gradients that are written, added and read again. Here the backward
pass is that of the data term alone; `step` makes the KL's gradient for a few hundred weights at a time and uses it at
once. Without the kernels it goes through autograd after all.
"""

import math
from collections import Counter
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from sparsevd import kernels
from sparsevd.errors import ArgumentError
from sparsevd.posterior import posteriors
from sparsevd.posterior.divergence import summed_kl
from sparsevd.training.output_units import OutputUnits


class BoundAdam(torch.optim.AdamW):
    """Adam with one group for the weights and one, at its own rate, for log σ².

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
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            raise ArgumentError("every parameter of the model is frozen; there is nothing to train")
        self.kl_weight = kl_weight
        self.units: OutputUnits | None = None  # of the output, where they are not about 1
        self._posteriors = posteriors(model)
        uses = Counter(p for each in self._posteriors for p in (each.theta, each.log_sigma2))
        self._shared = {p for p, count in uses.items() if count > 1}
        log_sigma2 = {each.log_sigma2 for each in self._posteriors}
        noise = [p for p in trained if p in log_sigma2]
        rest = [p for p in trained if p not in log_sigma2]
        groups = [{"params": params, "noise": params is noise} for params in (rest, noise) if params]
        super().__init__(groups, lr=learning_rate, betas=(0.9, beta2), weight_decay=weight_decay, fused=True)
        self.set_learning_rate(learning_rate, log_sigma2_lr_ratio)

    def set_learning_rate(self, rate: float, log_sigma2_lr_ratio: float) -> None:
        """The rate of the weights, and that of log σ² relative to it."""
        for group in self.param_groups:
            group["lr"] = rate * (log_sigma2_lr_ratio if group["noise"] else 1.0)

    def step(self) -> None:  # type: ignore[override]
        """One step along the gradients that the data term left, and the KL's."""
        with self.units.standard() if self.units else nullcontext():
            self._step()

    def _step(self) -> None:
        others = []
        for each in self._posteriors:
            pair = each.theta, each.log_sigma2
            if self._fits(*pair):
                self._step_in_c(*pair)
            elif pair[0].requires_grad or pair[1].requires_grad:
                others.append(pair)
        if others and self.kl_weight:
            # Not `backward`: DistributedDataParallel would take it for one more of the data term's.
            trained = list({p: None for pair in others for p in pair if p.requires_grad})
            gradients = torch.autograd.grad(self.kl_weight * summed_kl(others), trained)
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        super().step()  # of all that has a gradient yet

    def _fits(self, weight: Tensor, log_sigma2: Tensor) -> bool:
        gradients = weight.grad, log_sigma2.grad
        return (
            gradients[0] is not None
            and gradients[1] is not None
            and kernels.can_take_pair(weight, log_sigma2)
            and not {weight, log_sigma2} & self._shared  # whose KL has several terms
            and self.defaults["weight_decay"] == 0
        )

    def _step_in_c(self, weight: Tensor, log_sigma2: Tensor) -> None:
        tensors, steps = [], []
        for group, parameter in zip(self.param_groups, (weight, log_sigma2), strict=True):
            state = self.state[parameter]
            if not state:  # as AdamW has it, so that either may go on from the other's
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["step"] += 1
            beta1, beta2 = group["betas"]
            count = state["step"].item()
            steps.append(group["lr"] / (1 - beta1**count))
            slots = [_laid_out_like(parameter, state[name]) for name in ("exp_avg", "exp_avg_sq")]
            state["exp_avg"], state["exp_avg_sq"] = slots
            assert parameter.grad is not None
            tensors += [parameter, _laid_out_like(parameter, parameter.grad), *slots]
            parameter.grad = None  # used up
        settings = (self.kl_weight, beta1, beta2, math.sqrt(1 - beta2**count), group["eps"], *steps)
        kernels.adam_step_(*tensors, settings=settings)


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
