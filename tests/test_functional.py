"""Every formula against an oracle that does not share its code."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, special

from sparsevd.posterior import equations

GRID = torch.linspace(-40, 40, 1601, dtype=torch.float64)


def eq14(log_alpha: float) -> float:
    """The paper's formula written out in plain numbers, C = −k₁."""
    sigmoid = 1 / (1 + math.exp(-(1.87320 + 1.48695 * log_alpha)))
    return 0.63576 * sigmoid - 0.5 * math.log(1 + math.exp(-log_alpha)) - 0.63576


def dawson_kl(log_alpha: float) -> float:
    """−KL by another way: d/dm E log|z + m| = √2·F(m/√2) with Dawson's function F, from E log|z| = −(γ + log 2)/2."""
    m = math.exp(-log_alpha / 2)
    rise, _ = integrate.quad(lambda t: math.sqrt(2) * special.dawsn(t / math.sqrt(2)), 0, m, limit=500)
    return (np.euler_gamma + math.log(2)) / 2 - rise - equations.K1


def test_approximation_is_equation_14():
    for log_alpha in (-30.0, -4.0, -1.0, 0.0, 0.7, 3.0, 9.0):
        value = equations.negative_kl(torch.tensor(log_alpha, dtype=torch.float64)).item()
        assert value == pytest.approx(eq14(log_alpha), abs=1e-12)


def test_approximation_goes_to_zero_for_large_alpha():
    assert abs(equations.negative_kl(torch.tensor(60.0)).item()) < 1e-20
    assert equations.negative_kl(torch.tensor(30.0)).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("log_alpha", [-8.0, -3.0, -1.0, 0.0, 1.0, 3.0, 8.0])
def test_exact_value_agrees_with_dawson_function(log_alpha):
    exact = equations.negative_kl_exact(torch.tensor(log_alpha)).item()
    assert exact == pytest.approx(dawson_kl(log_alpha), abs=1e-9)


@pytest.mark.parametrize("log_alpha", [-2.0, 0.0, 2.0])
def test_exact_value_agrees_with_monte_carlo(log_alpha):
    alpha = math.exp(log_alpha)
    epsilon = 1 + math.sqrt(alpha) * torch.randn(2_000_000, dtype=torch.float64)
    samples = 0.5 * log_alpha - epsilon.abs().log() - equations.K1  # eq. 13
    deviation = samples.std().item() / math.sqrt(len(samples))
    exact = equations.negative_kl_exact(torch.tensor(log_alpha)).item()
    assert abs(samples.mean().item() - exact) < 4 * deviation


def test_exact_value_has_its_limits():
    """−KL → ½·log α + C as α → 0 and (γ + log 2)/2 + C as α → ∞."""
    low, high = equations.negative_kl_exact(torch.tensor([-40.0, 40.0])).tolist()
    assert low == pytest.approx(-20 - equations.K1, abs=1e-9)
    assert high == pytest.approx((np.euler_gamma + math.log(2)) / 2 - equations.K1, abs=1e-9)


def test_deviation_claimed_by_the_paper():
    """Less than 0.009 on the full range, the same constant on both sides; 0.04 for the older one where α ≤ 1."""
    exact = equations.negative_kl_exact(GRID)
    ours = (equations.negative_kl(GRID) - exact).abs().max()
    assert 0.008 < ours < 0.009
    small = GRID <= 0
    older = (equations.negative_kl_kingma_cubic(GRID) - exact)[small].abs().max()
    assert older.item() == pytest.approx(0.0403, abs=1e-4)  # the paper rounds it to 0.04


def test_kingma_bound_lies_below_where_alpha_is_at_most_one():
    small = GRID <= 0
    gap = equations.negative_kl_exact(GRID)[small] - equations.negative_kl_kingma_bound(GRID)[small]
    assert gap.min() > -1e-9


def test_log_alpha_is_its_definition():
    theta, log_sigma2 = torch.randn(100, dtype=torch.float64), torch.randn(100, dtype=torch.float64)
    expected = torch.log(torch.exp(log_sigma2) / theta**2)
    torch.testing.assert_close(equations.log_alpha(theta, log_sigma2), expected)


def test_pruned_keeps_small_alpha_and_zeroes_large():
    theta = torch.tensor([1.0, 1.0, 1.0, 0.0])
    log_sigma2 = torch.tensor([2.9, 3.0, 3.1, -10.0])
    assert equations.pruned(theta, log_sigma2, 3.0).tolist() == [1, 1, 0, 0]


def test_summed_kl_is_the_sum_with_the_gradient_of_autograd():
    theta = torch.randn(50, dtype=torch.float64, requires_grad=True)
    log_sigma2 = torch.randn(50, dtype=torch.float64, requires_grad=True)
    summed = equations.kl(theta, log_sigma2)
    by_autograd = -equations.negative_kl(equations.log_alpha(theta, log_sigma2)).sum()
    torch.testing.assert_close(summed, by_autograd)
    for ours, theirs in zip(
        torch.autograd.grad(3 * summed, [theta, log_sigma2]),
        torch.autograd.grad(3 * by_autograd, [theta, log_sigma2]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_summed_kl_passes_gradcheck():
    theta = torch.randn(6, dtype=torch.float64, requires_grad=True)
    log_sigma2 = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(equations.kl, (theta, log_sigma2))


@pytest.mark.parametrize("theta", [0.0, 1e-45, 1e-39, 1e-30, 1e-10, 1e-3, -1.0, 1e3])
@pytest.mark.parametrize("log_alpha", [-40.0, -20.0, 0.0, 3.0, 20.0, 40.0])
def test_kl_is_finite_everywhere(theta, log_alpha):
    weight = torch.full((3,), theta, requires_grad=True)
    about = 2 * math.log(abs(theta)) if abs(theta) > 1e-38 else 0.0
    log_sigma2 = torch.full((3,), log_alpha + about, requires_grad=True)
    value = equations.kl(weight, log_sigma2)
    value.backward()
    assert value.isfinite()
    assert weight.grad.isfinite().all()
    assert log_sigma2.grad.isfinite().all()
    if theta == 0:
        assert (weight.grad == 0).all()


def test_kl_gradient_vanishes_as_theta_does():
    theta = torch.tensor([1e-2, 1e-4, 1e-6, 1e-8], requires_grad=True)
    equations.kl(theta, torch.full((4,), -4.0)).backward()
    assert (theta.grad[1:] < theta.grad[:-1]).all()
    assert theta.grad[-1] < 1e-5


def test_noisy_output_is_exact_and_has_a_gradient_at_zero_variance():
    gamma = torch.randn(4, 5, requires_grad=True)
    delta = torch.zeros(4, 5, requires_grad=True)
    out = equations.noisy_output(gamma, delta, torch.randn(4, 5))
    torch.testing.assert_close(out, gamma, rtol=0, atol=1e-18)
    out.sum().backward()
    assert (delta.grad == 0).all()
    assert (gamma.grad == 1).all()


def test_noisy_output_has_the_right_deviation():
    epsilon = torch.tensor([2.0])
    out = equations.noisy_output(torch.tensor([1.0]), torch.tensor([9.0]), epsilon)
    assert out.item() == 1 + 3 * 2
