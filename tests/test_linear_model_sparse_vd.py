"""Sparse VD for linear models: every formula against an oracle that shares no code with it, and what it claims."""

import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from scipy.optimize import minimize_scalar
from scipy.special import expit, log_expit

from sparsevd.linear_model import SparseVDClassifier, SparseVDRegressor
from sparsevd.linear_model import _equations as equations
from sparsevd.linear_model._classifier import Fit, curvature
from sparsevd.posterior.equations import negative_kl


def sparse_problem(seed, n, d, relevant=5, noise=0.5):
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((n, d))
    weights = np.zeros(d)
    weights[generator.choice(d, relevant, replace=False)] = generator.choice([-1, 1], relevant)
    return x, x @ weights + noise * generator.standard_normal(n), weights


def bound(x, y, theta, alpha, s2):
    """The bound of linear regression written out: expected log-likelihood and eq. 14."""
    residual = y - x @ theta
    energy = residual @ residual + (x**2).sum(axis=0) @ (alpha * theta**2)
    kl = -negative_kl(torch.log(torch.as_tensor(alpha))).sum().item()
    return -0.5 * len(y) * np.log(2 * np.pi * s2) - 0.5 * energy / s2 - kl


# ---- equations


def test_numpy_kl_is_the_torch_kl():
    log_alpha = np.linspace(-20, 20, 101)
    expected = negative_kl(torch.from_numpy(log_alpha)).numpy()
    np.testing.assert_allclose(equations.negative_kl(log_alpha), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("t", [1.02, 1.3, 2.0, 5.0, 40.0])
def test_best_alpha_maximises_the_bound_of_one_weight(t):
    def loss(u):
        return -(0.5 * t**2 / (1 + np.exp(u)) + equations.negative_kl(u))

    best = minimize_scalar(loss, bounds=(-12, 12), method="bounded", options={"xatol": 1e-9})
    assert float(equations.best_log_alpha(np.array(t**2))) == pytest.approx(best.x, abs=2e-4)
    assert loss(equations.best_log_alpha(np.array(t**2))) <= best.fun + 1e-10


@pytest.mark.parametrize("m", [0.01, 1.0, 30.0])
def test_best_alpha_for_fixed_theta(m):
    best = minimize_scalar(lambda u: 0.5 * m * np.exp(u) - equations.negative_kl(u), bounds=(-12, 12), method="bounded")
    assert float(equations.best_log_alpha_given_theta(np.array(m))) == pytest.approx(best.x, abs=1e-4)


def test_a_lone_weight_has_finite_alpha_exactly_when_t2_exceeds_one():
    assert equations.best_log_alpha(np.array([0.5, 0.999])).min() == equations.LARGEST_LOG_ALPHA
    assert equations.best_log_alpha(np.array([1.01])).item() < 8


def test_theta_of_eq_16_minimises_the_noisy_loss():
    """Oracle: least squares with √(αᵢ(XᵀX)ᵢᵢ) as extra rows, and Monte Carlo over multiplicative noise (eq. 7)."""
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((40, 5)), generator.standard_normal(40)
    alpha = generator.uniform(0.1, 3, 5)
    theta = equations.theta(x.T @ x, x.T @ y, alpha)
    rows = np.vstack([x, np.diag(np.sqrt(alpha * (x**2).sum(axis=0)))])
    np.testing.assert_allclose(theta, np.linalg.lstsq(rows, np.r_[y, np.zeros(5)])[0], rtol=1e-10)

    noise = 1 + np.sqrt(alpha) * generator.standard_normal((20_000, 5))
    gram = np.einsum("si,sj->ij", noise, noise) / len(noise) * (x.T @ x)
    np.testing.assert_allclose(theta, np.linalg.solve(gram, noise.mean(axis=0) * (x.T @ y)), atol=0.02)


def test_theta_falls_as_one_over_alpha():
    generator = np.random.default_rng(1)
    x, y = generator.standard_normal((30, 4)), generator.standard_normal(30)
    alphas = 10.0 ** np.arange(2, 13)
    theta = [equations.theta(x.T @ x, x.T @ y, np.array([0.3, alpha, 0.1, 2.0]))[1] for alpha in alphas]
    products = alphas * theta
    np.testing.assert_allclose(products[3:] / products[-1], 1, rtol=1e-4)
    assert products[-1] != 0
    assert alphas[-1] * theta[-1] ** 2 < 1e-10  # αθ² → 0 as well: q becomes a delta function at zero


def test_binary_dropout_is_eq_20_with_alpha_p_over_1_minus_p():
    """Oracle: the expectation over all 2⁴ masks, by enumeration."""
    generator = np.random.default_rng(2)
    x, y, p = generator.standard_normal((25, 4)), generator.standard_normal(25), np.array([0.1, 0.5, 0.8, 0.95])
    gram, xty = np.zeros((4, 4)), np.zeros(4)
    for mask in itertools.product((0, 1), repeat=4):
        probability = np.prod(np.where(mask, 1 - p, p))
        dropped = x * (np.array(mask) / (1 - p))
        gram += probability * dropped.T @ dropped
        xty += probability * dropped.T @ y
    np.testing.assert_allclose(equations.theta(x.T @ x, x.T @ y, p / (1 - p)), np.linalg.solve(gram, xty), rtol=1e-10)


def test_support_prior_is_a_distribution():
    sizes = np.arange(8)
    counts = [len(list(itertools.combinations(range(7), k))) for k in sizes]
    assert np.sum(counts * np.exp(equations.log_support_prior(sizes, 7))) == pytest.approx(1)


# ---- the fitted regression


@pytest.mark.parametrize(("n", "d"), [(100, 20), (40, 80)])
@pytest.mark.parametrize("multiplicity", [True, False])
def test_fit_is_a_maximum_of_the_bound(n, d, multiplicity):
    x, y, _ = sparse_problem(0, n, d)
    model = SparseVDRegressor(fit_intercept=False, multiplicity=multiplicity).fit(x, y)
    kept = model.relevant_
    xs, theta, alpha, s2 = x[:, kept], model.coef_[kept], model.alpha_[kept], model.noise_variance_
    best = bound(xs, y, theta, alpha, s2)
    price = equations.log_support_prior(int(kept.sum()), d) if multiplicity else 0
    assert model.elbo_ == pytest.approx(best + price, abs=1e-6)
    # eq. 16 at the returned α, over all features: those dropped have α = ∞
    gram = x.T @ x
    np.testing.assert_allclose(
        model.coef_, np.linalg.solve(gram + np.diag(np.diag(gram) * model.alpha_), x.T @ y), rtol=1e-6, atol=1e-10
    )
    generator = np.random.default_rng(1)
    for _ in range(50):
        step = 1e-2 * generator.standard_normal((2, kept.sum()))
        moved = theta * np.exp(step[0]), alpha * np.exp(step[1]), s2 * np.exp(1e-2 * generator.standard_normal())
        assert bound(xs, y, *moved) < best


def test_elbo_is_the_expected_log_likelihood_minus_kl():
    """Monte Carlo over weights from the posterior."""
    x, y, _ = sparse_problem(3, 60, 8)
    model = SparseVDRegressor(multiplicity=False, fit_intercept=False).fit(x, y)
    kept, s2 = model.relevant_, model.noise_variance_
    theta, sigma = model.coef_[kept], np.sqrt(model.alpha_[kept]) * np.abs(model.coef_[kept])
    weights = theta + sigma * np.random.default_rng(0).standard_normal((40_000, kept.sum()))
    residual2 = ((y - weights @ x[:, kept].T) ** 2).sum(axis=1)
    log_likelihood = np.mean(-0.5 * 60 * np.log(2 * np.pi * s2) - 0.5 * residual2 / s2)
    kl = -negative_kl(torch.from_numpy(model.log_alpha_[kept])).sum().item()
    assert model.elbo_ == pytest.approx(log_likelihood - kl, abs=0.05)


@pytest.mark.parametrize(("n", "d"), [(100, 20), (100, 500), (500, 50)])
def test_support_is_recovered(n, d):
    surplus = []
    for seed in range(10):
        x, y, weights = sparse_problem(seed, n, d)
        model = SparseVDRegressor().fit(x, y)
        assert model.relevant_[weights != 0].all()
        assert not model.coef_[~model.relevant_].any()
        surplus.append(model.relevant_.sum() - 5)
    assert np.mean(surplus) <= 1  # of 15 to 495 features of noise


def test_noise_keeps_nothing():
    kept = []
    for seed in range(10):
        generator = np.random.default_rng(seed)
        kept.append(SparseVDRegressor().fit(generator.standard_normal((80, 100)), generator.standard_normal(80)))
    assert sum(model.relevant_.sum() for model in kept) <= 1


def test_why_the_papers_bound_keeps_noise():
    """With orthogonal columns every feature is on its own, and |t| > 1.06 is enough: 29 % of all noise features."""
    generator = np.random.default_rng(0)
    x, _ = np.linalg.qr(generator.standard_normal((2000, 400)))
    y = generator.standard_normal(2000)
    model = SparseVDRegressor(multiplicity=False, fit_intercept=False).fit(x, y)
    t = x.T @ y / np.sqrt(model.noise_variance_)
    assert np.array_equal(model.relevant_, np.abs(t) > 1.0601)
    assert model.relevant_.mean() == pytest.approx(0.29, abs=0.06)
    assert model.log_alpha_[model.relevant_].max() <= 3


def test_threshold_moves_the_border():
    x, y, _ = sparse_problem(0, 200, 60)
    kept = [SparseVDRegressor(multiplicity=False, threshold=t).fit(x, y).relevant_.sum() for t in (-2, 0, 3)]
    assert kept[0] < kept[1] < kept[2]
    with pytest.raises(ValueError, match="threshold must be a number, but it is nan"):
        SparseVDRegressor(threshold=np.nan).fit(x, y)


def test_intercept_is_not_penalised():
    x, y, _ = sparse_problem(0, 100, 10)
    near, far = SparseVDRegressor().fit(x, y), SparseVDRegressor().fit(x + 50, y + 1e4)
    np.testing.assert_allclose(far.coef_, near.coef_, rtol=1e-6)
    assert far.elbo_ == pytest.approx(near.elbo_, abs=1e-4)


def test_predictive_deviation_covers():
    inside = []
    for seed in range(10):
        x, y, _ = sparse_problem(seed, 1060, 20)
        mean, std = SparseVDRegressor().fit(x[:60], y[:60]).predict(x[60:], return_std=True)
        inside.append(np.mean(np.abs(y[60:] - mean) < 1.645 * std))
    assert np.mean(inside) == pytest.approx(0.9, abs=0.05)


def test_features_worth_little_alone_are_found_together():
    """Two columns that nearly cancel: neither helps alone, both together explain everything."""
    generator = np.random.default_rng(0)
    common, difference = generator.standard_normal((2, 200))
    x = np.column_stack([common, common + 0.2 * difference, generator.standard_normal((200, 20))])
    y = 5 * (x[:, 1] - x[:, 0]) + 0.1 * generator.standard_normal(200)
    assert SparseVDRegressor().fit(x, y).relevant_.nonzero()[0].tolist() == [0, 1]


# ---- the classifier


def test_parabola_lies_below_log_sigmoid_and_touches_it():
    z = np.linspace(-8, 8, 81)[:, None]
    xi = np.array([[1e-9, 0.5, 2.0, 6.0]])
    parabola = log_expit(xi) + (z - xi) / 2 - curvature(xi) / 2 * (z**2 - xi**2)
    assert (parabola <= log_expit(z) + 1e-12).all()
    slope = 0.5 - curvature(xi) * xi
    np.testing.assert_allclose(slope, expit(-xi), atol=1e-9)


@pytest.mark.parametrize("classes", [2, 3])
def test_elbo_of_the_classifier_climbs_and_stays_below_monte_carlo(classes):
    generator = np.random.default_rng(0)
    x = generator.standard_normal((200, 6))
    logits = x @ generator.standard_normal((6, classes)) * np.array([[2.0] * 1 + [1.0] * (classes - 1)])
    y = (logits + generator.gumbel(size=logits.shape)).argmax(axis=1)
    labels = np.eye(classes)[y][:, (1 if classes == 2 else 0) :]
    path = []
    for rounds in range(1, 9):
        fit = Fit(x, labels, np.ones(200), SparseVDClassifier(max_iter=rounds))
        fit.climb(np.arange(6))
        path.append(fit.elbo())
    assert np.all(np.diff(path) >= -1e-9)

    model = SparseVDClassifier(multiplicity=False).fit(x, y)
    draws = []
    for _ in range(300):
        z = np.column_stack(
            [
                logit.intercept
                + x[:, logit.support] @ logit.coef
                + (x[:, logit.support] - logit.mean)
                @ (np.sqrt(logit.variance) * generator.standard_normal(len(logit.coef)))
                for logit in model._logits
            ]
        )
        z = np.column_stack([np.zeros(200), z]) if classes == 2 else z
        draws.append((z[np.arange(200), y] - np.log(np.exp(z).sum(axis=1))).sum())
    kept = model.log_alpha_ < equations.LARGEST_LOG_ALPHA
    kl = -negative_kl(torch.from_numpy(model.log_alpha_[kept])).sum().item()
    assert model.elbo_ < np.mean(draws) - kl
    if classes == 2:
        assert model.elbo_ > np.mean(draws) - kl - 10  # the parabola is not far below


def test_classifier_drops_noise_features():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((400, 40))
    y = generator.random(400) < expit(2 * x[:, 3] - 2 * x[:, 9])
    model = SparseVDClassifier().fit(x, y)
    assert model.relevant_.nonzero()[0].tolist() == [3, 9]
    nothing = SparseVDClassifier().fit(x, generator.random(400) < 0.5)
    assert nothing.relevant_.sum() <= 1


def test_classifier_finds_rare_features_among_many():
    """Each says much about few samples, and the parabola at z = 0 says no feature is worth its price."""
    generator = np.random.default_rng(0)
    x = generator.random((2000, 3000)) * (generator.random((2000, 3000)) < 0.01)
    y = x[:, [5, 50, 500]] @ [6.0, -6.0, 6.0] + 0.5 * generator.standard_normal(2000) > 0
    model = SparseVDClassifier().fit(x, y)
    assert model.relevant_[[5, 50, 500]].all()
    assert model.relevant_.sum() <= 6
