"""The paper's equations as pure tensor functions, in the paper's letters.

Every weight has a posterior q(w) = N(w | θ, σ²) with σ² = α·θ² (eq. 11), held as (θ, log σ²). The dropout rate α
is derived. The prior is log-uniform, so the KL divergence depends on α alone and is known up to a constant C; all
functions here take C = −k₁, for which the approximation goes to zero as α → ∞.

Equation numbers are those of Molchanov, Ashukha, Vetrov: Variational Dropout Sparsifies Deep Neural Networks, 2017.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

K1, K2, K3 = 0.63576, 1.87320, 1.48695  # eq. 14


def log_alpha(theta: Tensor, log_sigma2: Tensor) -> Tensor:
    """log α = log σ² − log θ², elementwise.

    θ = 0 counts as the smallest normal number of its type, which puts log α about 175 above log σ² in float32: a
    weight that is zero is pruned by any sensible threshold, and nothing is infinite.
    """
    theta = theta.to(log_sigma2.dtype)
    return log_sigma2 - 2 * torch.log(theta.abs().clamp_min(torch.finfo(theta.dtype).tiny))


def pruned(theta: Tensor, log_sigma2: Tensor, threshold: float) -> Tensor:
    """θ with exact zeros where log α exceeds the threshold (3 in the paper: a Binary Dropout rate above 0.95)."""
    return torch.where(log_alpha(theta, log_sigma2) <= threshold, theta, 0)


def negative_kl(log_alpha: Tensor) -> Tensor:
    """−KL(q ‖ p) of one weight by the paper's approximation (eq. 14), elementwise:

    k₁·sigmoid(k₂ + k₃·log α) − ½·log(1 + α⁻¹) + C,  C = −k₁
    """
    # k₁·sigmoid(z) − k₁ = −k₁·sigmoid(−z) and log(1 + α⁻¹) = −logsigmoid(log α): no cancellation, no overflow.
    return -K1 * torch.sigmoid(-(K2 + K3 * log_alpha)) + 0.5 * F.logsigmoid(log_alpha)


def negative_kl_exact(log_alpha: Tensor) -> Tensor:
    """−KL(q ‖ p) of one weight, exact up to the quadrature (eq. 13), with the same C = −k₁, in float64.

    With z ~ N(0, 1) and m = α^(−½), eq. 13 reads −E log|z + m| + C. The logarithm's singularity goes away with
    log x = ∫₀^∞ (e^(−s) − e^(−sx)) ds/s for x = (z + m)², whose expectation is the generating function of a
    noncentral χ². After s = e^t the integrand is smooth and decays at both ends, where the trapezoidal rule
    converges exponentially fast.
    """
    m2 = torch.exp(-log_alpha.to(torch.float64)).unsqueeze(-1)
    step = 1 / 16
    t = torch.arange(-100.0, 100.0, step, dtype=torch.float64, device=log_alpha.device)
    s = torch.exp(t)
    generating_function = torch.exp(-m2 * (s / (1 + 2 * s))) / torch.sqrt(1 + 2 * s)
    expected_log_abs = 0.5 * step * torch.sum(torch.exp(-s) - generating_function, dim=-1)
    return -expected_log_abs - K1


def negative_kl_kingma_cubic(log_alpha: Tensor) -> Tensor:
    """−KL by the polynomial of Kingma, Salimans, Welling (2015), made for α ≤ 1 only, with C = −k₁."""
    alpha = torch.exp(log_alpha)
    c1, c2, c3 = 1.16145124, -1.50204118, 0.58629921
    return 0.5 * log_alpha + c1 * alpha + c2 * alpha**2 + c3 * alpha**3 - K1


def negative_kl_kingma_bound(log_alpha: Tensor) -> Tensor:
    """−KL bounded from below by ½·log α + C for α ≤ 1, the simpler form of Kingma et al. (2015), with C = −k₁."""
    return 0.5 * log_alpha - K1


class _SummedKL(torch.autograd.Function):
    """Σ KL (eq. 14) and its gradient, worked out by hand in half the passes over the weights autograd would take.

    d KL / d log α = −k₁·k₃·s·(1 − s) − ½·sigmoid(−log α)  with  s = sigmoid(k₂ + k₃·log α),
    d log α / d log σ² = 1,  d log α / d θ = −2/θ. As θ → 0 the first falls faster than 2/θ grows: the limit is 0.
    """

    @staticmethod
    def forward(ctx: Any, theta: Tensor, log_sigma2: Tensor) -> Tensor:
        log_a = log_alpha(theta, log_sigma2)
        s = torch.sigmoid(log_a * K3 + K2)
        slope = torch.addcmul(s, s, s, value=-1).mul_(-K1 * K3).sub_(torch.sigmoid(-log_a), alpha=0.5)
        ctx.save_for_backward(theta, slope)
        return -negative_kl(log_a).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        theta, slope = ctx.saved_tensors
        grad_log_sigma2 = slope * grad
        # Below the smallest normal number 2/θ overflows, and log α ignores θ there: the gradient is its limit, 0.
        normal = theta.abs() >= torch.finfo(slope.dtype).tiny
        grad_theta = torch.where(normal, -2 * grad_log_sigma2 / torch.where(normal, theta, 1), 0)
        return grad_theta.to(theta.dtype), grad_log_sigma2


def price(log_alpha: Tensor) -> Tensor:
    """What the bound (β = 1) loses when one weight becomes zero, elementwise, in nats and in float64:

    s·(1 + α⁻¹) − KL  with  s = −d KL / d log α

    if θ and σ are at their optimum, and the log-likelihood is quadratic in the weight, −½·h·(w − w*)². At the optimum
    h·σ² = 2·s and w* = θ·(1 + α). Before, the bound has −½·h·((θ − w*)² + σ²) − KL; after, −½·h·w*², and no KL, which
    goes to zero as α → ∞. At log α = 3, 1 and −1 that is 0.0012, 0.048 and 1.29 nats. With another β, it is β times
    as much of a bound in which the KL weighs β.
    """
    log_alpha = log_alpha.to(torch.float64)
    s = torch.sigmoid(log_alpha * K3 + K2)
    slope = K1 * K3 * s * (1 - s) + 0.5 * torch.sigmoid(-log_alpha)
    return (slope * (1 + torch.exp(-log_alpha)) + negative_kl(log_alpha)).clamp_min(0)  # of rounding, where α is huge


def kl(theta: Tensor, log_sigma2: Tensor) -> Tensor:
    """KL(q ‖ p) summed over all weights by the paper's approximation (eq. 12 and 14), a scalar."""
    return _SummedKL.apply(theta, log_sigma2)  # type: ignore[no-any-return,no-untyped-call]


def noisy_output(gamma: Tensor, delta: Tensor, epsilon: Tensor) -> Tensor:
    """b = γ + √δ·ε, the local reparametrisation shared by eq. 17 (fully-connected) and eq. 18 (convolution).

    γ is the mean and δ the variance of the layer's output. Where δ = 0, as for an all-zero input, √δ has an infinite
    slope; holding δ at the smallest normal number gives it the slope 0 there and changes nothing above.
    """
    deviation = torch.sqrt(delta.clamp_min(torch.finfo(delta.dtype).tiny))
    return gamma + (deviation * epsilon).to(gamma.dtype)
