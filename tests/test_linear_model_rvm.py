"""The Relevance Vector Machine against the marginal likelihood itself, another implementation, and kernels."""

import numpy as np
import pytest

pytest.importorskip("sklearn")

from scipy.special import expit
from scipy.stats import multivariate_normal
from sklearn.linear_model import LogisticRegression

from sparsevd.linear_model import RVMClassifier, RVMRegressor
from sparsevd.linear_model._design import Design
from sparsevd.linear_model._laplace import mode
from sparsevd.linear_model._marginal_likelihood import best_change, changed, posterior
from sparsevd.linear_model._problem import Problem


def data(n=60, d=15, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((n, d))
    return x, 2 * x[:, 2] - x[:, 5] + 0.5 * generator.standard_normal(n)


def log_evidence(x, y, alpha, noise_variance):
    """log N(y | 0, σ²I + X·A⁻¹·Xᵀ), the definition."""
    kept = np.isfinite(alpha)
    covariance = noise_variance * np.eye(len(y)) + (x[:, kept] / alpha[kept]) @ x[:, kept].T
    return multivariate_normal(np.zeros(len(y)), covariance).logpdf(y)


def test_log_marginal_likelihood_is_the_gaussian_density():
    x, y = data()
    model = RVMRegressor(fit_intercept=False).fit(x, y)
    assert model.log_marginal_likelihood_ == pytest.approx(log_evidence(x, y, model.alpha_, model.noise_variance_))


def test_posterior_mean_is_eq_19():
    x, y = data()
    model = RVMRegressor(fit_intercept=False).fit(x, y)
    kept, s2 = model.relevant_, model.noise_variance_
    gram = x[:, kept].T @ x[:, kept]
    expected = np.linalg.solve(gram + s2 * np.diag(model.alpha_[kept]), x[:, kept].T @ y)
    np.testing.assert_allclose(model.coef_[kept], expected, rtol=1e-8)


def test_predicted_gain_is_the_change_of_the_marginal_likelihood():
    x, y = data()
    design = Design(x, np.ones(len(y)), False)
    target, _ = design.centred_target(y)
    problem = Problem(design, target, learn_noise=True, multiplicity=False, threshold=np.inf)
    unit = x / design.norm

    def evidence(support, alpha):
        full = np.full(x.shape[1], np.inf)
        full[support] = alpha
        return log_evidence(unit, y, full, 0.3)

    support, alpha = np.array([0, 2, 7]), np.array([0.5, 3.0, 0.02])
    for _ in range(12):  # additions, re-estimations and deletions as they come
        gain, j, new = best_change(problem, posterior(problem, support, alpha, 0.3))
        after = changed(support, alpha, j, new)
        assert evidence(*after) - evidence(support, alpha) == pytest.approx(gain, rel=1e-6, abs=1e-8)
        support, alpha = after


def test_result_is_a_maximum():
    x, y = data()
    model = RVMRegressor(fit_intercept=False, tol=1e-9).fit(x, y)
    best = model.log_marginal_likelihood_
    for j in np.flatnonzero(model.relevant_):
        for factor in (0.9, 1.1, np.inf):
            alpha = model.alpha_.copy()
            alpha[j] *= factor
            assert log_evidence(x, y, alpha, model.noise_variance_) <= best
    for factor in (0.97, 1.03):
        assert log_evidence(x, y, model.alpha_, factor * model.noise_variance_) <= best


def test_same_features_as_fastrvm():
    core = pytest.importorskip("fastrvm._sparsebayes_bindings")
    x, y = data(n=200, d=30)
    ours = RVMRegressor(fit_intercept=False).fit(x, y)
    machine = core.SparseBayes(core.Likelihood.Gaussian, 10_000, False, False, False, True, False, None)
    theirs = machine.inference(np.asfortranarray(x), y)
    assert sorted(np.ravel(theirs["relevant_idx"])) == np.flatnonzero(ours.relevant_).tolist()
    assert 1 / theirs["beta"] == pytest.approx(ours.noise_variance_, rel=1e-3)


@pytest.mark.parametrize("kernel", ["rbf", "laplacian", lambda a, b: np.exp(-np.abs(a - b).sum())])
def test_kernels_select_samples(kernel):
    x = np.linspace(-10, 10, 100)[:, None]
    y = np.sinc(x.ravel() / np.pi) + 0.05 * np.random.default_rng(0).standard_normal(100)
    model = RVMRegressor(kernel=kernel, gamma=0.1).fit(x, y)
    assert len(model.relevance_) < 40
    mean, std = model.predict(x, return_std=True)
    assert np.sqrt(np.mean((mean - np.sinc(x.ravel() / np.pi)) ** 2)) < 0.04
    assert std.min() > 0.03
    assert "coef_" not in vars(model)


def test_precomputed_basis_equals_the_kernel():
    from sklearn.metrics.pairwise import rbf_kernel

    generator = np.random.default_rng(0)
    x = generator.standard_normal((80, 2))
    labels = (np.hypot(*x.T) < 1.1).astype(int)
    gram = rbf_kernel(x, gamma=0.5)
    named = RVMClassifier(kernel="rbf", gamma=0.5).fit(x, labels)
    given = RVMClassifier(kernel="precomputed").fit(gram, labels)
    assert named.score(x, labels) > 0.95
    assert len(named.relevance_) < 20
    np.testing.assert_allclose(given.predict_proba(gram), named.predict_proba(x), rtol=1e-6, atol=1e-9)


def test_indices_of_relevance_vectors_skip_samples_of_weight_zero():
    x = np.linspace(-5, 5, 60)[:, None]
    y = np.sin(x.ravel())
    weight = (np.arange(60) >= 20).astype(float)
    model = RVMRegressor(kernel="rbf", gamma=0.5).fit(x, y, sample_weight=weight)
    assert model.relevance_.min() >= 20
    np.testing.assert_allclose(model.predict(x[20:]), y[20:], atol=0.05)


def test_mode_of_the_classifier_is_ridge_logistic_regression():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((100, 4))
    labels = (generator.random(100) < expit(x[:, 0] - 1)).astype(float)
    z = mode(x, labels, np.ones(100), np.full(4, 2.0), True, np.zeros(100))
    ridge = LogisticRegression(C=0.5, tol=1e-10, max_iter=1000).fit(x, labels)
    np.testing.assert_allclose(z, ridge.decision_function(x), atol=1e-4)
