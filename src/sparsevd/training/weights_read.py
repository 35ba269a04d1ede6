"""How many weights an example reads: every one of a layer, but of an embedding only the rows of its tokens.

The KL is heavy where there are many weights for each example. Most rows of a large vocabulary are read by hardly any:
they are nothing that an example would have to pay for. Where it is not clear which rows an example reads, it counts as
reading all: a KL that begins too light is better than one that begins too heavy.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sparsevd.layers.embedding import SparseEmbeddingBag, SparseTable
from sparsevd.layers.modes import in_eval_mode
from sparsevd.posterior import noisy_modules, posteriors
from sparsevd.training.data import Batch
from sparsevd.training.inputs import Forward


def has_tables(model: nn.Module) -> bool:
    """Whether it is worth asking: without embeddings, an example reads all."""
    return any(isinstance(module, SparseTable) for module in model.modules())


@torch.no_grad()
def read_by_an_example(model: nn.Module, data: Iterable[Batch], forward: Forward) -> float:
    """The mean over these batches, which are where the model is."""
    layers = noisy_modules(model).values()
    tables = [layer for layer in layers if isinstance(layer, SparseTable) and not layer.read_elsewhere]
    whole = {each.theta for layer in layers if layer not in tables for each in layer.posteriors()}
    rows = {table.weight: 0.0 for table in tables if table.weight not in whole}  # that all examples have read
    size = 0  # of a batch

    def look_up(table: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        tokens = next(each for each in tree_leaves((arguments, named)) if isinstance(each, Tensor))
        weight = table.get_parameter("weight")
        if weight in rows:
            found = _different(tokens, size, in_bags=isinstance(table, SparseEmbeddingBag))
            rows[weight] += found or size * len(weight)

    hooks = [table.register_forward_pre_hook(look_up, with_kwargs=True) for table in tables]
    examples = 0
    try:
        with in_eval_mode(model):
            for x, y in data:
                size = len(y)
                examples += size
                forward(model, x)
    finally:
        for hook in hooks:
            hook.remove()
    total = 0.0
    for each in posteriors(model):
        found = rows.get(each.theta, 0.0) / max(1, examples)
        total += each.theta.numel() * (min(1.0, found / len(each.theta)) if found else 1.0)
    return total


def _different(tokens: Tensor, size: int, *, in_bags: bool) -> int:
    """How many rows the examples of a batch read, those of one and the same once; 0 if that cannot be seen."""
    if tokens.ndim and len(tokens) == size:
        in_order = tokens.reshape(size, -1).sort(1).values
        return int((in_order.diff(dim=1) != 0).sum()) + size
    if in_bags or (tokens.ndim > 1 and tokens.shape[1] == size):  # bags one after the other, or time first
        return tokens.numel()
    return 0
