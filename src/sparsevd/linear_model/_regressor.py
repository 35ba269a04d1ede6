"""Sparse Variational Dropout regression."""

# ruff: noqa: N803, N806  (X is scikit-learn's name for it)

import warnings
from typing import Any, Self

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import check_is_fitted

from sparsevd.linear_model._checks import check_positive, check_threshold, dense_columns, new_data, training_data
from sparsevd.linear_model._design import Design
from sparsevd.linear_model._equations import LARGEST_LOG_ALPHA, Array
from sparsevd.linear_model._estimator import LinearEstimator
from sparsevd.linear_model._problem import Problem
from sparsevd.linear_model._search import best_state
from sparsevd.posterior import THRESHOLD


class SparseVDRegressor(RegressorMixin, LinearEstimator):
    """Linear regression that finds the relevant features by variational inference, without empirical Bayes.

    Every weight has the fixed log-uniform prior and the posterior N(θ, α·θ²). The bound is maximised over θ (eq. 16),
    α, the noise variance and the set of features kept. There is no randomness and no learning rate, and the scale of
    a feature does not matter.

    Parameters
    ----------
    threshold : float, default=3.0
        A feature with log α above it is dropped: the paper's value, a Binary Dropout rate of 0.95.
    multiplicity : bool, default=True
        Pay for choosing k of D features with log p(S) = −log(D + 1) − log binomial(D, k): every number of features is
        equally likely beforehand. False is the paper's bound as it stands, for which any single feature with |t| > 1.06
        is worth keeping; it fits better than it selects.
    fit_intercept : bool, default=True
        The intercept has no prior.
    tol : float, default=1e-8
        Stop when the bound gains less than this, in nats.
    max_iter : int, default=1000
        Limit on solutions of eq. 16 after the features are chosen.

    Attributes
    ----------
    coef_, intercept_ : θ, exactly zero for dropped features.
    alpha_, log_alpha_ : dropout rates; 1/ε, which stands for ∞, for dropped features.
    relevant_ : mask of the features kept.
    noise_variance_ : s².
    elbo_ : the bound, with log p(S) when `multiplicity` is set.
    n_iter_ : how often eq. 16 was solved in all.

    Examples
    --------
    >>> import numpy as np
    >>> from sparsevd.linear_model import SparseVDRegressor
    >>> X = np.random.default_rng(0).normal(size=(100, 30))
    >>> y = 3 * X[:, 4] - 2 * X[:, 7] + np.random.default_rng(1).normal(size=100)
    >>> SparseVDRegressor().fit(X, y).relevant_.nonzero()[0]
    array([4, 7])
    """

    def __init__(
        self,
        *,
        threshold: float = THRESHOLD,
        multiplicity: bool = True,
        fit_intercept: bool = True,
        tol: float = 1e-8,
        max_iter: int = 1000,
    ) -> None:
        self.threshold = threshold
        self.multiplicity = multiplicity
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_iter = max_iter

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        check_threshold(self.threshold)
        check_positive(tol=self.tol, max_iter=self.max_iter)
        X, y, weight, _ = training_data(self, X, y, sample_weight, numeric=True)
        design = Design(X, weight, self.fit_intercept)
        target, offset = design.centred_target(y.astype(np.float64))
        problem = Problem(design, target, learn_noise=True, multiplicity=self.multiplicity, threshold=self.threshold)
        state = best_state(problem, self.tol, self.max_iter)
        if not problem.converged:
            warnings.warn(
                f"The bound still gained more than tol={self.tol} nats after max_iter={self.max_iter} steps. "
                "Raise one of them.",
                ConvergenceWarning,
                stacklevel=2,
            )

        self.log_alpha_ = np.full(design.n_features, LARGEST_LOG_ALPHA)
        self.log_alpha_[state.support] = state.log_alpha
        self.alpha_ = np.exp(self.log_alpha_)
        self.relevant_ = np.zeros(design.n_features, dtype=bool)
        self.relevant_[state.support] = True
        self.coef_ = np.zeros(design.n_features)
        self.coef_[state.support] = state.theta / design.norm[state.support]
        self.intercept_ = offset - float(design.mean @ self.coef_)
        self.noise_variance_ = float(problem.noise_variance(state.energy)) if problem.yty else 0.0
        self.elbo_ = problem.score(state)
        self.n_iter_ = problem.n_solved
        self._mean = design.mean
        self._total_weight = design.total_weight
        return self

    def predict(self, X: Any, return_std: bool = False) -> Array | tuple[Array, Array]:
        """The predictive mean and, if asked for, the standard deviation: noise and uncertainty of the kept weights."""
        check_is_fitted(self)
        X = new_data(self, X)
        mean = X @ self.coef_ + self.intercept_
        if not return_std:
            return mean
        kept = self.relevant_
        variance = self.alpha_[kept] * self.coef_[kept] ** 2
        variance = self.noise_variance_ + (dense_columns(X, kept) - self._mean[kept]) ** 2 @ variance
        if self.fit_intercept:
            variance = variance + self.noise_variance_ / self._total_weight
        return mean, np.sqrt(variance)
