"""The KL of many tensors of weights at once: by the kernel where it can take them, else by the equations."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsevd import kernels
from sparsevd.errors import ArgumentError
from sparsevd.posterior import equations


def summed_kl(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The KL (eq. 14) summed over pairs (θ, log σ²) of tensors of weights.

    All of a model's layers in one call: on a small network a call costs as much as the work.
    """
    if all(kernels.can_take_pair(*pair) for pair in pairs):
        return kernels.kl(pairs)
    for theta, log_sigma2 in pairs:
        if theta.shape != log_sigma2.shape:  # torch would spread one over the other without a word
            raise ArgumentError(f"θ has shape {tuple(theta.shape)}, its log σ² {tuple(log_sigma2.shape)}")
    terms = [equations.kl(theta, log_sigma2) for theta, log_sigma2 in pairs]
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


def kl_gradients(theta: Tensor, log_sigma2: Tensor) -> tuple[Tensor, Tensor]:
    """The KL's gradient with respect to θ and to log σ², without a graph."""
    theta, log_sigma2 = theta.detach(), log_sigma2.detach()
    if kernels.can_take_pair(theta, log_sigma2):
        return kernels.kl_with_gradients(theta, log_sigma2)[1:]
    with torch.enable_grad():
        pair = theta.requires_grad_(), log_sigma2.requires_grad_()
        first, second = torch.autograd.grad(summed_kl([pair]), pair)
    return first, second
