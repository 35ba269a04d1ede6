"""Sparse Variational Dropout for any PyTorch network: learn which weights it does not need, and drop them."""

import sys

from sparsevd import integrations as integrations
from sparsevd.conversion import CUTS, prune, sparsify
from sparsevd.errors import SparseVDError, SparseVDWarning
from sparsevd.graph import capture
from sparsevd.graph.compaction import compact
from sparsevd.layers.recurrent import one_sample
from sparsevd.layers.registry import register
from sparsevd.modelfile import load, save
from sparsevd.moved import keep_old_names
from sparsevd.reporting.summary import summary
from sparsevd.runs.reports import report
from sparsevd.runtime.acceleration import accelerate
from sparsevd.runtime.c_export import export_c
from sparsevd.runtime.onnx import export_onnx
from sparsevd.runtime.plan import plan
from sparsevd.training.attachment import attach
from sparsevd.training.budget import Budget
from sparsevd.training.evaluation import elbo, evaluate
from sparsevd.training.fine_tuning import polish
from sparsevd.training.gaussian import Gaussian
from sparsevd.training.likelihood import Bernoulli
from sparsevd.training.loop import fit, fit_dense
from sparsevd.training.objective import elbo_loss, kl
from sparsevd.training.optimizer import parameter_groups
from sparsevd.training.price import Auto
from sparsevd.training.recipes import FitConfig
from sparsevd.training.zeros import keep_zeros

__version__ = "0.1.0"

CUTS["auto"] = Auto()
keep_old_names(sys.modules[__name__])

__all__ = [
    "Bernoulli",
    "Budget",
    "FitConfig",
    "Gaussian",
    "SparseVDError",
    "SparseVDWarning",
    "accelerate",
    "attach",
    "capture",
    "compact",
    "elbo",
    "elbo_loss",
    "evaluate",
    "export_c",
    "export_onnx",
    "fit",
    "fit_dense",
    "keep_zeros",
    "kl",
    "load",
    "one_sample",
    "parameter_groups",
    "plan",
    "polish",
    "prune",
    "register",
    "report",
    "save",
    "sparsify",
    "summary",
]
