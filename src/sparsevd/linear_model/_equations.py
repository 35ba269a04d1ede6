"""The paper's equations for a linear model, as pure functions of numpy arrays, in the paper's letters.

A weight has the posterior q(w) = N(w | θ, α·θ²) and the log-uniform prior. Columns of X are held at unit length and
divided by the noise, so that diag(XᵀX) = 1 and everything below depends on α and on one number per weight:

    t = xᵀ(y − X₋θ₋) / s,   the least-squares estimate of this weight alone, in units of its own deviation.

Maximising the bound over θ gives θ = s·t / (1 + α), and what is left is ½·t² / (1 + α) − KL(α), a function of one
variable with a single maximum. The maximum is at a finite α exactly when t² > 1.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import get_lapack_funcs
from scipy.special import expit, gammaln, log_expit

from sparsevd.posterior.equations import K1, K2, K3

Array = NDArray[Any]

# α = ∞ as a number: 1 + α is α in double precision. α = 0 likewise, but large enough to keep eq. 16 well-conditioned
# when columns are equal.
LARGEST_LOG_ALPHA = float(-np.log(np.finfo(np.float64).eps))
SMALLEST_LOG_ALPHA = float(np.log(1e-10))


def theta(gram: Array, xty: Array, alpha: Array) -> Array:
    """θ = (XᵀX + diag(XᵀX)·diag(α))⁻¹·Xᵀy, the best θ for fixed α (eq. 16, again as eq. 20).

    Binary Dropout with rates p gives the same weights for α = p / (1 − p).
    """
    return solve(gram + np.diag(np.diag(gram) * alpha), xty)


def solve(matrix: Array, right: Array) -> Array:
    """matrix⁻¹·right for a positive definite matrix; the least-squares solution where rounding made it singular."""
    if not len(matrix):
        return np.zeros_like(right)
    (posv,) = get_lapack_funcs(("posv",), (matrix, right))
    _, solution, failed = posv(matrix, right)
    return np.linalg.pinv(matrix, hermitian=True) @ right if failed else solution


def negative_kl(log_alpha: Array) -> Array:
    """−KL(q ‖ p) by eq. 14 with C = −k₁, elementwise: `functional.negative_kl` for arrays."""
    return -K1 * expit(-(K2 + K3 * log_alpha)) + 0.5 * log_expit(log_alpha)


def _kl_slope(log_alpha: Array) -> Array:
    """d(−KL) / d log α of eq. 14; positive."""
    s = expit(K2 + K3 * log_alpha)
    return K1 * K3 * s * (1 - s) + 0.5 * expit(-log_alpha)


# Both maximisations over α below have a stationarity condition that is explicit the other way round, t²(α) and
# m(α), and monotone. So the inverse is read from a table; its step leaves an error below 1e-6 in log α.
_LOG_ALPHA = np.linspace(LARGEST_LOG_ALPHA, SMALLEST_LOG_ALPHA, 40_001)
_LOG_T2 = np.maximum.accumulate(
    np.log(2 * _kl_slope(_LOG_ALPHA)) + 2 * np.logaddexp(0, _LOG_ALPHA) - _LOG_ALPHA
)  # accumulated: near α = ∞ it is 0 up to rounding
_LOG_M = np.log(2 * _kl_slope(_LOG_ALPHA)) - _LOG_ALPHA


def best_log_alpha(t2: Array) -> Array:
    """argmax over log α of ½·t² / (1 + α) − KL(α), elementwise: the best α when θ follows it."""
    return np.interp(np.log(np.maximum(t2, 1e-300)), _LOG_T2, _LOG_ALPHA)


def best_log_alpha_given_theta(m: Array) -> Array:
    """argmax over log α of −½·α·m − KL(α) with m = θ²/s², elementwise: the best α when θ stays."""
    return np.interp(np.log(np.maximum(m, 1e-300)), _LOG_M, _LOG_ALPHA)


def log_support_prior(kept: int | Array, features: int) -> float | Array:
    """log p(S) when every number of kept features is equally likely, and every support of that size."""
    log_binomial = gammaln(features + 1) - gammaln(kept + 1) - gammaln(features - kept + 1)
    return -log_binomial - np.log(features + 1)
