"""Fast marginal-likelihood maximisation for sparse Bayesian models (Tipping and Faul, 2003), in their letters.

A weight has the prior N(0, 1/αᵢ). Its precision αᵢ is a hyper-parameter fitted to the data: empirical Bayes, which is
what eq. 19 of the paper sets beside eq. 20. Their αᵢ is the prior's; the α of Sparse VD is the posterior's.
"""

from dataclasses import dataclass

import numpy as np

from sparsevd.linear_model._equations import Array, solve
from sparsevd.linear_model._problem import SMALLEST_NOISE, Problem

# So many steps in a row without a gain end the fit.
STALLED = 50


@dataclass(frozen=True)
class Posterior:
    """The basis functions in the model and the Gaussian posterior of their weights, in a problem's standard units."""

    support: Array
    alpha: Array
    mu: Array
    covariance: Array
    noise_variance: float


def posterior(problem: Problem, support: Array, alpha: Array, noise_variance: float) -> Posterior:
    """Σ = (β·ΦᵀΦ + A)⁻¹ and μ = β·Σ·Φᵀt: eq. 19 with the noise written out."""
    beta = 1 / noise_variance
    covariance = solve(beta * problem.gram(support) + np.diag(alpha), np.eye(len(support)))
    return Posterior(support, alpha, beta * covariance @ problem.xty[support], covariance, noise_variance)


def relearned_noise(problem: Problem, now: Posterior) -> float:
    """σ² = ‖t − Φμ‖² / (N − Σᵢ(1 − αᵢΣᵢᵢ))."""
    xty, gram = problem.xty[now.support], problem.gram(now.support)
    residual = problem.yty - 2 * now.mu @ xty + now.mu @ gram @ now.mu
    free = problem.n - float((1 - now.alpha * np.diag(now.covariance)).sum())
    floor = SMALLEST_NOISE * problem.yty / problem.n
    return max(residual / max(free, 1e-3 * problem.n), floor) or 1.0


def best_change(problem: Problem, now: Posterior) -> tuple[float, int, float]:
    """The single addition, re-estimation or deletion that raises log p(t) most: its gain, its index and its new α.

    Sⱼ = φⱼᵀC⁻¹φⱼ and Qⱼ = φⱼᵀC⁻¹t; sⱼ and qⱼ are the same with φⱼ left out of C (eq. 22–24 of Tipping and Faul).
    log p(t) as a function of αⱼ alone has one maximum, at sⱼ²/(qⱼ² − sⱼ) if qⱼ² > sⱼ and at ∞ otherwise.
    """
    beta, columns = 1 / now.noise_variance, problem.gram_columns(now.support)
    big_q = beta * (problem.xty - columns @ now.mu)
    big_s = beta * problem.design.varies - beta**2 * np.einsum("ij,ij->i", columns @ now.covariance, columns)
    big_s = np.maximum(big_s, 1e-12 * beta)
    inside = np.zeros(len(big_q), dtype=bool)
    inside[now.support] = True
    old = np.full(len(big_q), np.inf)
    old[now.support] = now.alpha

    s, q = big_s.copy(), big_q.copy()
    # For a weight in the model S = α − α²Σ and Q = αμ. Put in, s = αS/(α − S) and q = αQ/(α − S) lose no digits:
    diagonal = np.maximum(np.diag(now.covariance), 1e-300)
    s[now.support] = np.maximum(1 / diagonal - now.alpha, 1e-12 * beta)
    q[now.support] = now.mu / diagonal
    excess = q**2 - s
    wanted = (excess > 1e-10 * s) & problem.design.varies
    new = np.where(wanted, s**2 / np.where(wanted, excess, 1), np.inf)

    gain = np.full(len(big_q), -np.inf)
    add = wanted & ~inside
    gain[add] = 0.5 * (big_q[add] ** 2 / big_s[add] - 1 + np.log(big_s[add] / big_q[add] ** 2))
    # In the model, log p(t) as a function of α is ½·(log α − log(α + s) + q²/(α + s)) up to a constant.
    gain[inside] = _alone(new[inside], s[inside], q[inside]) - _alone(old[inside], s[inside], q[inside])
    j = int(np.argmax(gain))
    return float(gain[j]), j, float(new[j])


def _alone(alpha: Array, s: Array, q: Array) -> Array:
    """ℓ(α) of Tipping and Faul, eq. 21; 0 at α = ∞."""
    return 0.5 * (q**2 / (alpha + s) - np.log1p(s / alpha))


def changed(support: Array, alpha: Array, j: int, new: float) -> tuple[Array, Array]:
    """Support and precisions after α_j has become `new`; ∞ takes the basis function out."""
    others = support != j
    if np.isinf(new):
        return support[others], alpha[others]
    if others.all():
        return np.r_[support, j], np.r_[alpha, new]
    return support, np.where(others, alpha, new)


def log_marginal_likelihood(problem: Problem, now: Posterior) -> float:
    """log p(t) of the Gaussian model. For the classifiers constants of the target are missing."""
    beta, alpha = 1 / now.noise_variance, now.alpha
    _, log_det = np.linalg.slogdet(now.covariance)
    fit = beta * (problem.yty - now.mu @ problem.xty[now.support])
    return float(
        -0.5 * (problem.n * np.log(2 * np.pi * now.noise_variance) + fit) + 0.5 * (np.log(alpha).sum() + log_det)
    )


def fit_regression(problem: Problem, tol: float, max_iter: int) -> tuple[Posterior, int, bool]:
    """Change one αᵢ and then σ² at a time until neither raises log p(t) by `tol` nats: posterior, steps, success."""
    nothing = np.empty(0)
    # A tenth of the target's variance is their suggestion for the first σ².
    now = posterior(problem, np.empty(0, dtype=np.intp), nothing, 0.1 * problem.yty / problem.n or 1.0)
    best, best_step = -np.inf, 0
    for step in range(1, max_iter + 1):
        gain, j, new = best_change(problem, now)
        before = now.noise_variance
        if gain > tol:
            now = posterior(problem, *changed(now.support, now.alpha, j, new), before)
        now = posterior(problem, now.support, now.alpha, relearned_noise(problem, now))
        if gain <= tol and problem.n * abs(np.log(now.noise_variance / before)) <= tol:
            return now, step, True
        if (value := log_marginal_likelihood(problem, now)) > best + tol:
            best, best_step = value, step
        # Without noise to speak of, predicted gains are rounding errors, and changes go round in circles.
        if step > best_step + STALLED:
            return now, step, True
    return now, max_iter, False
