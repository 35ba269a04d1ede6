"""Sparse VD: our own method, in the interface of its rivals. Molchanov, Ashukha, Vetrov, ICML 2017.

`sparsify`, `fit` by a recipe, `prune`. There is no sparsity to choose: the bound decides.

Suggested settings: the default recipe, 40 epochs.
Known negatives: a step costs two to three dense ones; a deep network from random weights loses too much before it
learns.
Departs from the original: the recipe (a higher rate that falls along a half cosine; a slow log σ² that catches up in
the last 30 % of the run; units dropped once β = 1, weights in the last 30 %); the objective is the paper's. Dropout
modules of the network get a rate of zero.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import nn

from sparsevd.baselines.training import Method, Outcome, Training
from sparsevd.conversion import prune, sparsify
from sparsevd.training.evaluation import elbo
from sparsevd.training.loop import fit
from sparsevd.training.recipes import FitConfig

_OF_THE_COMPARISON = ("epochs", "batch_size", "seed", "autocast")


@dataclass(frozen=True)
class SparseVD(Method):
    """The recipe; epochs, batch size and seed are those of the comparison."""

    title: ClassVar[str] = "Sparse VD"

    recipe: FitConfig = field(default_factory=FitConfig)

    def settings(self) -> dict[str, Any]:
        """Without what the comparison decides."""
        settings = super().settings()
        for name in _OF_THE_COMPARISON:
            del settings["recipe"][name]
        return settings

    def train(self, model: nn.Module, training: Training) -> Outcome:
        given = {name: getattr(training, name) for name in _OF_THE_COMPARISON}
        config = replace(self.recipe, **given)
        by: dict[str, Any] = {}
        if (taught := training.teacher) is not None:
            by = {"teacher": taught.source, "temperature": taught.temperature, "teacher_weight": taught.weight}
        noisy = sparsify(model, inplace=True)
        history = fit(
            noisy, training.data, None, config, loss=training.loss, n_train=training.n, progress=training.progress, **by
        )
        training.spent = len(history)
        bound = elbo(noisy, training.data, training.loss, training.n)
        return Outcome(prune(noisy), before_threshold=prune(noisy, threshold=float("inf")), elbo=bound)
