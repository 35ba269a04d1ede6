"""Sparse VD layers, one file a family; `SPARSE_TYPES` is the registry."""

from sparsevd.layers.layers import *  # noqa: F403
from sparsevd.layers.layers import INITIAL_LOG_SIGMA2, SPARSE_TYPES, THRESHOLD, Part, SparseLayer, checked_threshold  # noqa: F401
