"""Sparse VD and what the paper compares it with: a file each, whose docstring is the method's card, and one interface.

    outcome = train(METHODS["pruning"](), model, (x, y), epochs=40)
    outcome.network  # plain torch, the same keys, exact zeros

`METHODS` has them all by name.
"""

import copy
import sys
from inspect import getdoc
from typing import Any

import torch
from torch import nn

from sparsevd.baselines.binary_dropout import BinaryDropout
from sparsevd.baselines.dense import Dense
from sparsevd.baselines.gaussian_dropout import GaussianDropout
from sparsevd.baselines.gradual import GradualPruning
from sparsevd.baselines.pruning import Pruning
from sparsevd.baselines.soft_weight_sharing import SoftWeightSharing
from sparsevd.baselines.sparse_vd import SparseVD
from sparsevd.baselines.surgery import Surgery
from sparsevd.baselines.training import Method, Outcome, Training, named_weights
from sparsevd.baselines.variational_dropout import UnrestrictedVariationalDropout, VariationalDropout
from sparsevd.training import generator
from sparsevd.training.data import Data

METHODS: dict[str, type[Method]] = {
    "dense": Dense,
    "pruning": Pruning,
    "surgery": Surgery,
    "gradual": GradualPruning,
    "soft-weight-sharing": SoftWeightSharing,
    "binary-dropout": BinaryDropout,
    "gaussian-dropout": GaussianDropout,
    "variational-dropout": VariationalDropout,
    "variational-dropout-unrestricted": UnrestrictedVariationalDropout,
    "sparse-vd": SparseVD,
}

__all__ = ["METHODS", "Method", "Outcome", "Training", "card", "train"]


def train(method: Method, model: nn.Module, data: Data, **settings: Any) -> Outcome:
    """Train a copy of the network by this method; `settings` are those of `Training`, such as epochs and seed."""
    training = Training(data, **settings)
    named_weights(model)  # says so if there are none
    with generator.reserved():
        torch.manual_seed(training.seed)
        outcome = method.train(copy.deepcopy(model), training)
    outcome.network.eval()
    return outcome


def card(method: type[Method]) -> str:
    """What the method is, its settings, its known negatives, and where ours departs from the original."""
    return getdoc(sys.modules[method.__module__]) or ""
