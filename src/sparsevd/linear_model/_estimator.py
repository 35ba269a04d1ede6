"""What the estimators share towards scikit-learn: sparse inputs, the parameters of a kernel, log-odds and labels."""

# ruff: noqa: N803  (X is scikit-learn's name for it)

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted

from sparsevd.linear_model._checks import new_data
from sparsevd.linear_model._equations import Array

Kernel = str | Callable[[Array, Array], float]


class LinearEstimator(BaseEstimator):
    """Takes sparse matrices as it takes dense ones."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


class KernelMachine(LinearEstimator):
    """The parameters of both Relevance Vector Machines."""

    def __init__(
        self,
        *,
        kernel: Kernel = "linear",
        gamma: float | None = None,
        degree: float = 3,
        coef0: float = 1,
        fit_intercept: bool = True,
        tol: float = 1e-4,
        max_iter: int = 10_000,
    ) -> None:
        self.kernel = kernel
        self.gamma = gamma
        self.degree = degree
        self.coef0 = coef0
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_iter = max_iter


class LogitClassifier(ClassifierMixin, LinearEstimator):
    """One Gaussian logit for two classes, one for each class of more."""

    classes_: Array

    @abstractmethod
    def _moments(self, X: Any) -> Sequence[tuple[Array, Array]]:
        """E z and Var z of each logit."""

    def decision_function(self, X: Any) -> Array:
        """Log-odds of each logit: E z moderated by its uncertainty, E z / √(1 + π·Var z / 8) (MacKay, 1992)."""
        check_is_fitted(self)
        moments = self._moments(new_data(self, X))
        scores = np.column_stack([z / np.sqrt(1 + np.pi / 8 * variance) for z, variance in moments])
        return scores.ravel() if len(moments) == 1 else scores

    def predict(self, X: Any) -> Array:
        scores = self.decision_function(X)
        return self.classes_[(scores > 0).astype(np.intp) if scores.ndim == 1 else scores.argmax(axis=1)]
