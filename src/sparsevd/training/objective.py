"""The training objective: the negative variational bound per training example (eq. 3, 4), and how β grows in it."""

import math
from collections.abc import Callable

from torch import Tensor, nn

from sparsevd.errors import ArgumentError
from sparsevd.posterior import required_posteriors
from sparsevd.posterior.divergence import summed_kl
from sparsevd.posterior.spread import is_spread

# β as a function of how far the training is, from 0 (the first step) to 1 (the end).
BetaSchedule = Callable[[float], float]


def kl(model: nn.Module) -> Tensor:
    """KL(q ‖ p) of all Sparse VD layers of a model (eq. 12, 14): the one term to add to a loss of your own.

    loss = F.cross_entropy(model(x), y) + beta * sparsevd.kl(model) / n_train
    """
    found = required_posteriors(model)
    if any(is_spread(each.theta) for each in found):
        raise ArgumentError("the weights are spread over processes, the KL is of all of them: use sparsevd.attach")
    return summed_kl([(each.theta, each.log_sigma2) for each in found])


def elbo_loss(nll_mean: Tensor, model: nn.Module, *, n_train: int, beta: float = 1.0) -> Tensor:
    """The negative bound per training example, eq. 3 and 4 divided by −N: mean NLL + β·KL/N.

    Args:
        nll_mean: the negative log-likelihood averaged over the mini-batch, as F.cross_entropy gives it.
        model: a Sparse VD network.
        n_train: N, the number of examples in the whole training set (not in the batch).
        beta: weight of the KL term, 1 for the bound itself.
    """
    if isinstance(n_train, bool) or not isinstance(n_train, int) or n_train < 1:
        raise ArgumentError(
            f"n_train={n_train!r} must be a positive integer: the number of examples in the training set"
        )
    if not (math.isfinite(beta) and beta >= 0):
        raise ArgumentError(f"beta={beta!r} must be a finite number, zero or above")
    if nll_mean.ndim != 0:
        raise ArgumentError(f"nll_mean has shape {tuple(nll_mean.shape)}; give the mean over the batch, a scalar")
    return nll_mean + (beta / n_train) * kl(model)


def constant(beta: float = 1.0) -> BetaSchedule:
    """The same β all along."""
    return lambda progress: beta


def warm_up(start: float, end: float) -> BetaSchedule:
    """The paper's warm-up: β is 0 until `start`, grows linearly to 1 at `end`, and stays. Both are parts of the run."""
    if not 0 <= start <= end <= 1:
        raise ArgumentError(f"warm-up from {start!r} to {end!r}: both must lie between 0 and 1, in this order")

    def beta(progress: float) -> float:
        if progress >= end:
            return 1.0
        return max(0.0, (progress - start) / (end - start))

    return beta
