"""Zeros that stay: a plain network's zero weights, put back after every step that moves them.

A masked gradient would not do: momentum, weight decay and Adam's own memory move a weight without any.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sparsevd.errors import ArgumentError, SparseVDWarning
from sparsevd.posterior.spread import local
from sparsevd.training.wrappers import Hook, bare_optimizers


class Zeros:
    """The zeros that a network has now.

    Weights are its parameters with two axes or more: a bias of zero, or the shift of a norm, may learn. So may a tensor
    of nothing but zeros, if it is asked for: some layers begin so.
    """

    def __init__(self, model: nn.Module, whole: bool = True):
        named = {name: p for name, p in model.named_parameters() if p.ndim > 1}
        masks = {name: local(p.detach()) != 0 for name, p in named.items()}
        self.whole = [name for name, alive in masks.items() if alive.numel() and not alive.any()]
        kept = {name: alive for name, alive in masks.items() if not alive.all() and (whole or name not in self.whole)}
        self._weights = [(named[name], alive.to(named[name].dtype)) for name, alive in kept.items()]
        self._size = sum(alive.numel() for alive in masks.values())

    @property
    def share(self) -> float:
        """Of all weights."""
        return sum((alive == 0).sum().item() for _, alive in self._weights) / self._size if self._size else 0.0

    @torch.no_grad()
    def put_back(self) -> None:
        for weight, alive in self._weights:
            local(weight).mul_(alive)


class KeptZeros:
    """What `keep_zeros` returns."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], model: nn.Module):
        self._model, self.zeros = model, Zeros(model)
        self._handles: list[Any] = [each.register_step_post_hook(self._after) for each in optimizers]
        # A network that is loaded brings its own zeros.
        self._handles.append(model.register_load_state_dict_post_hook(Hook(self._look)))  # type: ignore[no-untyped-call]

    def _look(self, *_: object) -> None:
        self.zeros = Zeros(self._model)

    def _after(self, *_: object) -> None:
        self.zeros.put_back()

    def detach(self) -> None:
        """From now on the zeros may learn."""
        for handle in self._handles:
            handle.remove()


def keep_zeros(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], model: nn.Module) -> KeptZeros:
    """Fine-tune a network with zeros, ours or another's: every weight that is zero now stays exactly zero.

        optimizer = torch.optim.AdamW(pruned.parameters(), lr=1e-4)
        sparsevd.keep_zeros(optimizer, pruned)

    Weights are parameters with two axes or more, so biases may learn. Returns a handle; `detach()` lets the zeros go.

    Args:
        optimizer: the optimizer, or all of them, that will train the network.
        model: a plain network, such as `sparsevd.prune` gives, or with zeros from elsewhere.
    """
    optimizers = bare_optimizers(optimizer)
    trained = {p for each in optimizers for group in each.param_groups for p in group["params"]}
    if trained.isdisjoint(model.parameters()):
        raise ArgumentError("the optimizer has no parameter of this network; give the one that trains it")
    kept = KeptZeros(optimizers, model)
    if whole := kept.zeros.whole:
        warnings.warn(
            f"{', '.join(whole)}: nothing but zeros, which stay; if a layer was meant to begin so, let it learn first",
            SparseVDWarning,
            stacklevel=2,
        )
    return kept
