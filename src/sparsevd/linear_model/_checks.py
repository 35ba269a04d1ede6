"""What the estimators have in common at the door: checked arguments, checked data, samples that carry weight."""

# ruff: noqa: N803, N806  (X is scikit-learn's name for it)

from typing import Any

import numpy as np
from scipy import sparse
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, validate_data

from sparsevd.errors import ArgumentError
from sparsevd.linear_model._equations import Array


def check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ArgumentError(f"{name} must be greater than 0, but it is {value!r}.")


def check_threshold(threshold: float) -> None:
    if np.isnan(threshold):
        raise ArgumentError("threshold must be a number, but it is nan. 3.0 is the paper's value.")


def training_data(
    estimator: Any, X: Any, y: Any, sample_weight: Any, *, numeric: bool
) -> tuple[Any, Array, Array, Array]:
    """X in double precision, y, weights and indices of the samples with positive weight, all as scikit-learn checks."""
    X, y = validate_data(estimator, X, y, accept_sparse="csr", dtype=[np.float64, np.float32], y_numeric=numeric)
    weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    counts = np.flatnonzero(weight)
    if len(counts) < len(weight):
        X, y, weight = X[counts], y[counts], weight[counts]
    # Columns are what everything below reads.
    X = X.astype(np.float64) if sparse.issparse(X) else np.asfortranarray(X, dtype=np.float64)
    return X, y, weight, counts


def one_column_per_logit(estimator: Any, y: Array) -> tuple[Array, Array]:
    """The classes, and labels of 0 and 1: one column for two classes, a column per class for more."""
    check_classification_targets(y)
    classes, codes = np.unique(y, return_inverse=True)
    if len(classes) < 2:
        raise ArgumentError(
            f"{type(estimator).__name__} needs samples of at least 2 classes, but y holds only one class with positive "
            f"weight: {classes[0]!r}."
        )
    labels = np.eye(len(classes))[codes]
    return classes, labels[:, 1:] if len(classes) == 2 else labels


def new_data(estimator: Any, X: Any) -> Any:
    return validate_data(estimator, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False)


def dense_columns(X: Any, index: Array) -> Array:
    chosen = X[:, index]
    return chosen.toarray() if sparse.issparse(chosen) else np.asarray(chosen)
