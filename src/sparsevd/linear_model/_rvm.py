"""The Relevance Vector Machine (Tipping, 2001), which the paper compares Sparse VD with."""

# ruff: noqa: N803, N806  (X is scikit-learn's name for it)

import warnings
from typing import Any, Self

import numpy as np
from scipy.special import expit
from sklearn.base import RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics.pairwise import pairwise_kernels
from sklearn.utils.validation import check_is_fitted

from sparsevd.linear_model._checks import check_positive, dense_columns, new_data, one_column_per_logit, training_data
from sparsevd.linear_model._design import Design
from sparsevd.linear_model._equations import Array
from sparsevd.linear_model._estimator import KernelMachine, LogitClassifier
from sparsevd.linear_model._laplace import fit_classification
from sparsevd.linear_model._marginal_likelihood import fit_regression, log_marginal_likelihood
from sparsevd.linear_model._problem import Problem


def basis(rvm: "RVMRegressor | RVMClassifier", X: Any, vectors: Any) -> Any:
    """Values of the basis functions: the features themselves, or the kernel with each training sample."""
    if rvm.kernel == "linear" or rvm.kernel == "precomputed":
        return X
    parameters = {} if callable(rvm.kernel) else {"gamma": rvm.gamma, "degree": rvm.degree, "coef0": rvm.coef0}
    return pairwise_kernels(X, vectors, metric=rvm.kernel, filter_params=True, **parameters)


def warn_if_stopped(rvm: "RVMRegressor | RVMClassifier", converged: bool) -> None:
    if not converged:
        warnings.warn(
            f"log p(y) still gained more than tol={rvm.tol} nats in step max_iter={rvm.max_iter}. Raise one of them.",
            ConvergenceWarning,
            stacklevel=3,
        )


class RVMRegressor(RegressorMixin, KernelMachine):
    """Relevance Vector Machine for regression: every weight's prior precision fitted by empirical Bayes.

    Parameters
    ----------
    kernel : "linear", any name of `sklearn.metrics.pairwise.pairwise_kernels`, "precomputed" or a callable
        With "linear" the features themselves are the basis functions, so the machine selects features. Otherwise each
        training sample gives one, and the machine selects samples. "precomputed" takes any matrix of basis functions.
    gamma, degree, coef0 : parameters of the kernel; None for gamma is scikit-learn's default, 1 / n_features.
    fit_intercept : bool, default=True
        The intercept has no prior.
    tol : float, default=1e-4
        Stop when no change raises log p(y) by this many nats.
    max_iter : int, default=10000
        Limit on changes of a single precision.

    Attributes
    ----------
    relevance_ : indices of the basis functions kept; with a kernel, of the training samples.
    dual_coef_ : their weights. `coef_`, one per feature, exists for "linear" only.
    alpha_ : prior precision of every basis function, ∞ for those dropped.
    relevant_ : mask of the basis functions kept.
    covariance_ : posterior covariance of `dual_coef_`.
    noise_variance_, intercept_, log_marginal_likelihood_, n_iter_
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        check_positive(tol=self.tol, max_iter=self.max_iter)
        X, y, weight, counts = training_data(self, X, y, sample_weight, numeric=True)
        design = Design(basis(self, X, X), weight, self.fit_intercept)
        target, offset = design.centred_target(y.astype(np.float64))
        problem = Problem(design, target, learn_noise=True, multiplicity=False, threshold=np.inf)
        found, self.n_iter_, converged = fit_regression(problem, self.tol, self.max_iter)
        warn_if_stopped(self, converged)

        kept, norm = found.support, design.norm[found.support]
        self.dual_coef_ = found.mu / norm
        self.covariance_ = found.covariance / np.multiply.outer(norm, norm)
        self.alpha_ = np.full(design.n_features, np.inf)
        self.alpha_[kept] = found.alpha * norm**2
        self.relevant_ = np.isfinite(self.alpha_)
        self.noise_variance_ = found.noise_variance if problem.yty else 0.0
        self.log_marginal_likelihood_ = log_marginal_likelihood(problem, found)
        self.intercept_ = offset - float(design.mean[kept] @ self.dual_coef_)
        self._mean = design.mean[kept]
        self._total_weight = design.total_weight
        self._columns = kept
        if self.kernel in ("linear", "precomputed"):
            self.relevance_ = kept
            self._vectors = None
        else:
            self.relevance_ = counts[kept]
            self._vectors = X[kept]
        if self.kernel == "linear":
            self.coef_ = np.zeros(design.n_features)
            self.coef_[kept] = self.dual_coef_
        return self

    def predict(self, X: Any, return_std: bool = False) -> Array | tuple[Array, Array]:
        """The predictive mean and, if asked for, the standard deviation: noise and uncertainty of the weights."""
        check_is_fitted(self)
        X = new_data(self, X)
        columns = dense_columns(X, self._columns) if self._vectors is None else basis(self, X, self._vectors)
        mean = columns @ self.dual_coef_ + self.intercept_
        if not return_std:
            return mean
        centred = columns - self._mean
        variance = self.noise_variance_ + np.einsum("ij,ij->i", centred @ self.covariance_, centred)
        if self.fit_intercept:
            variance = variance + self.noise_variance_ / self._total_weight
        return mean, np.sqrt(np.maximum(variance, 0))


class RVMClassifier(LogitClassifier, KernelMachine):
    """Relevance Vector Machine for classification: Laplace's approximation; one machine per class if more than two.

    Parameters are those of `RVMRegressor`.

    Attributes
    ----------
    classes_ : the labels.
    models_ : one binary machine, or one per class (against the rest).
    alpha_ : prior precisions, of shape (1, M) or (K, M); ∞ for basis functions dropped.
    relevant_ : mask of the basis functions kept by some machine.
    relevance_ : their indices; with a kernel, of the training samples.
    coef_, intercept_ : of shape (1, D) or (K, D); `coef_` for "linear" only.
    log_marginal_likelihood_, n_iter_ : summed over the machines.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        check_positive(tol=self.tol, max_iter=self.max_iter)
        X, y, weight, counts = training_data(self, X, y, sample_weight, numeric=False)
        self.classes_, labels = one_column_per_logit(self, y)
        phi = basis(self, X, X)
        self.models_ = [
            fit_classification(phi, column, weight, self.fit_intercept, self.tol, self.max_iter) for column in labels.T
        ]
        warn_if_stopped(self, all(model.converged for model in self.models_))
        self.alpha_ = np.full((len(self.models_), phi.shape[1]), np.inf)
        for k, model in enumerate(self.models_):
            self.alpha_[k, model.support] = model.alpha
        self.relevant_ = np.isfinite(self.alpha_).any(axis=0)
        self.intercept_ = np.array([model.intercept for model in self.models_])
        self.log_marginal_likelihood_ = sum(model.log_likelihood for model in self.models_)
        self.n_iter_ = sum(model.n_iter for model in self.models_)
        if self.kernel in ("linear", "precomputed"):
            self.relevance_ = np.flatnonzero(self.relevant_)
            self._vectors = None
        else:
            self.relevance_ = counts[self.relevant_]
            self._vectors = X
        if self.kernel == "linear":
            self.coef_ = np.zeros(self.alpha_.shape)
            for k, model in enumerate(self.models_):
                self.coef_[k, model.support] = model.coef
        return self

    def _moments(self, X: Any) -> list[tuple[Array, Array]]:
        phi = basis(self, X, self._vectors)
        return [model.moments(phi) for model in self.models_]

    def predict_proba(self, X: Any) -> Array:
        """Two classes: the machine's probability. More: the machines' probabilities, made to sum to one."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.column_stack([expit(-scores), expit(scores)])
        odds = expit(scores)
        return odds / np.maximum(odds.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
