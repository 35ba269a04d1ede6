"""Sparse Variational Dropout for any PyTorch network: learn which weights it does not need, and drop them."""

from sparsevd.compact import compact
from sparsevd.convert import prune, sparsify
from sparsevd.errors import SparseVDError, SparseVDWarning
from sparsevd.evaluate import elbo, evaluate
from sparsevd.fit import FitConfig, fit, fit_dense
from sparsevd.graph import capture
from sparsevd.objective import elbo_loss, kl
from sparsevd.pack import load, save
from sparsevd.runtime.accelerate import accelerate
from sparsevd.runtime.c_export import export_c
from sparsevd.runtime.onnx import export_onnx
from sparsevd.runtime.plan import plan
from sparsevd.summary import summary

__version__ = "0.1.0"

__all__ = [
    "FitConfig",
    "SparseVDError",
    "SparseVDWarning",
    "accelerate",
    "capture",
    "compact",
    "elbo",
    "elbo_loss",
    "evaluate",
    "export_c",
    "export_onnx",
    "fit",
    "fit_dense",
    "kl",
    "load",
    "plan",
    "prune",
    "save",
    "sparsify",
    "summary",
]
