"""The data of a weighted linear model with a free intercept, in standard units: centred columns of unit length.

Standard units are where the diag(XᵀX) of eq. 16 becomes 1, and why the scale of a feature does not matter.
"""

from typing import Any

import numpy as np
from scipy import sparse

from sparsevd.linear_model._equations import Array


class Design:
    """X̃ = √w·(X − mean) / norm, dense or sparse, with the products the estimators need.

    A sparse X is never centred in memory: the mean is subtracted from the products. Constant columns become zero.
    """

    def __init__(self, x: Any, weight: Array, fit_intercept: bool) -> None:
        self.n_samples, self.n_features = x.shape
        self.root_weight = np.sqrt(weight)
        self.total_weight = float(weight.sum())
        self._sparse = sparse.issparse(x)
        self._centred = fit_intercept
        features = self.n_features
        self.mean = np.asarray(x.T @ weight).ravel() / self.total_weight if fit_intercept else np.zeros(features)
        if self._sparse:
            scaled = sparse.csc_array(x.multiply(self.root_weight[:, None]))
            raw_norm2 = np.asarray(scaled.multiply(scaled).sum(axis=0)).ravel()
            norm2 = np.maximum(raw_norm2 - self.total_weight * self.mean**2, 0)
            # The subtraction leaves rounding noise of this size in a constant column.
            tolerance = 1e-12 * raw_norm2
        else:
            scaled = np.asfortranarray((x - self.mean) * self.root_weight[:, None])
            norm2 = np.einsum("ij,ij->j", scaled, scaled)
            tolerance = (1e-13 * self.mean) ** 2 * self.total_weight
        self.varies = norm2 > tolerance
        self.norm = np.where(self.varies, np.sqrt(norm2), 1.0)
        inverse = np.where(self.varies, 1 / self.norm, 0.0)
        if self._sparse:
            self._x = sparse.csc_array(scaled.multiply(inverse[None, :]))
            self._shift = self.mean * inverse
        else:
            scaled *= inverse
            self._x = scaled

    def times_transposed(self, right: Array) -> Array:
        """X̃ᵀ·right."""
        product = self._x.T @ right
        return product - np.multiply.outer(self._shift, self.root_weight @ right) if self._sparse else product

    def columns(self, index: Array) -> Array:
        """The columns of X̃ with these indices, dense."""
        chosen = self._x[:, index]
        if not self._sparse:
            return chosen
        return chosen.toarray() - np.multiply.outer(self.root_weight, self._shift[index])

    def centred_target(self, y: Array) -> tuple[Array, float]:
        """√w·(y − offset) and the offset, the weighted mean of y (0 without intercept)."""
        offset = float(y @ self.root_weight**2) / self.total_weight if self._centred else 0.0
        centred = y - offset
        # A constant target leaves rounding noise, which is nothing to explain.
        centred[np.abs(centred) <= 1e-14 * abs(offset)] = 0
        return centred * self.root_weight, offset
