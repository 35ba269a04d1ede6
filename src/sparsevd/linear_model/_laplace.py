"""The Relevance Vector Machine for two classes: Laplace's approximation around the posterior mode (Tipping, 2001)."""

# ruff: noqa: N803  (X is scikit-learn's name for it)

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import expit, log_expit

from sparsevd.linear_model._checks import dense_columns
from sparsevd.linear_model._design import Design
from sparsevd.linear_model._equations import Array, solve
from sparsevd.linear_model._marginal_likelihood import Posterior, best_change, changed, posterior
from sparsevd.linear_model._problem import Problem

# Where a class probability is 0 or 1 up to rounding, the curvature p(1 − p) is held here, and Newton stays finite.
LEAST_CURVATURE = 1e-10


@dataclass
class BinaryModel:
    """z = intercept + Φ·w on the scale of the data, with the posterior covariance of w."""

    support: Array
    alpha: Array
    coef: Array
    covariance: Array
    mean: Array
    intercept: float
    log_likelihood: float
    n_iter: int
    converged: bool

    def moments(self, X: Any) -> tuple[Array, Array]:
        """E z and Var z for every row."""
        columns = dense_columns(X, self.support)
        centred = columns - self.mean
        variance = np.einsum("ij,ij->i", centred @ self.covariance, centred)
        return columns @ self.coef + self.intercept, np.maximum(variance, 0)


def fit_classification(
    X: Any, labels: Array, weight: Array, fit_intercept: bool, tol: float, max_iter: int
) -> BinaryModel:
    """Find the mode, treat the curvature there as a Gaussian likelihood, change one αᵢ, and repeat."""
    support, alpha = np.empty(0, dtype=np.intp), np.empty(0)
    z = np.zeros(len(labels))
    converged = False
    for step in range(1, max_iter + 1):
        z = mode(dense_columns(X, support), labels, weight, alpha, fit_intercept, z)
        problem, offset = gaussian_at(X, labels, weight, fit_intercept, z)
        norm = problem.design.norm
        now = posterior(problem, support, alpha / norm[support] ** 2, 1.0)
        gain, j, new = best_change(problem, now)
        if gain <= tol:
            converged = True
            break
        if step < max_iter:
            support, alpha = changed(support, alpha, j, new * norm[j] ** 2)
    return _on_data_scale(problem.design, now, offset, float(weight @ log_expit((2 * labels - 1) * z)), step, converged)


def gaussian_at(X: Any, labels: Array, weight: Array, fit_intercept: bool, z: Array) -> tuple[Problem, float]:
    """The log-likelihood to second order around z: weights p(1 − p) and target z + (y − p)/p(1 − p)."""
    p = expit(z)
    curvature = np.maximum(p * expit(-z), LEAST_CURVATURE)
    design = Design(X, weight * curvature, fit_intercept)
    target, offset = design.centred_target(z + (labels - p) / curvature)
    return Problem(design, target, learn_noise=False, multiplicity=False, threshold=np.inf), offset


def mode(columns: Array, labels: Array, weight: Array, alpha: Array, fit_intercept: bool, z: Array) -> Array:
    """z at the maximum of log p(y | z) − ½·Σ αᵢwᵢ², by Newton's method with halved steps; from the column space's z."""
    features = np.column_stack([columns, np.ones(len(labels))]) if fit_intercept else columns
    precision = np.append(alpha, 0.0) if fit_intercept else alpha
    sign = 2 * labels - 1

    def objective(w: Array) -> float:
        return float(weight @ log_expit(sign * (features @ w)) - 0.5 * precision @ w**2)

    w = np.zeros(features.shape[1])
    value = objective(w)
    for _ in range(100):
        p = expit(features @ w)
        curvature = weight * np.maximum(p * (1 - p), LEAST_CURVATURE)
        gradient = features.T @ (weight * (labels - p)) - precision * w
        hessian = (features * curvature[:, None]).T @ features + np.diag(precision)
        step = solve(hessian, gradient)
        scale = 1.0
        while (new_value := objective(w + scale * step)) < value and scale > 1e-6:
            scale /= 2
        if new_value - value < 1e-9 * (1 + abs(value)):
            break
        w, value = w + scale * step, new_value
    return features @ w


def _on_data_scale(
    design: Design, now: Posterior, offset: float, log_likelihood: float, steps: int, converged: bool
) -> BinaryModel:
    norm, mean = design.norm[now.support], design.mean[now.support]
    coef = now.mu / norm
    covariance = now.covariance / np.multiply.outer(norm, norm)
    # log p(y | mode) + log p(mode) + ½·log|2πΣ|: Laplace's approximation of log p(y).
    evidence = log_likelihood - 0.5 * now.alpha @ now.mu**2
    evidence += 0.5 * (np.log(now.alpha).sum() + np.linalg.slogdet(now.covariance)[1])
    intercept = offset - float(mean @ coef)
    return BinaryModel(
        now.support, now.alpha * norm**2, coef, covariance, mean, intercept, float(evidence), steps, converged
    )
