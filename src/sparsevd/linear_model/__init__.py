"""Sparse Bayesian linear models for scikit-learn: Sparse Variational Dropout and the Relevance Vector Machine.

Needs the extra `sklearn`. The modules, from the equations to the estimators:

    _equations             the paper's formulas for a linear model
    _design, _problem      data in standard units; the bound of one regression, and the climb up to it
    _search                which features to keep
    _regressor, _classifier     Sparse Variational Dropout
    _marginal_likelihood, _laplace, _rvm    the Relevance Vector Machine: empirical Bayes, for comparison
    _checks                arguments and data at the door
"""

from sparsevd.linear_model._classifier import SparseVDClassifier
from sparsevd.linear_model._regressor import SparseVDRegressor
from sparsevd.linear_model._rvm import RVMClassifier, RVMRegressor

__all__ = ["RVMClassifier", "RVMRegressor", "SparseVDClassifier", "SparseVDRegressor"]
