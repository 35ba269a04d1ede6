"""How many weights an example reads: every one of a layer, but of an embedding only the rows of its tokens.

The KL is heavy where there are many weights for each example. Most rows of a large vocabulary are read by hardly any:
they are nothing that an example would have to pay for.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sparsevd.layers.embedding import SparseTable
from sparsevd.posterior import Posterior, noisy_modules


def weights_read(model: nn.Module, posteriors: Iterable[Posterior], look: Callable[[], object]) -> float:
    """The mean over the examples that the network gets while `look` is called."""
    posteriors = list(posteriors)
    layers = noisy_modules(model).values()
    elsewhere = {each.theta for layer in layers if not isinstance(layer, SparseTable) for each in layer.posteriors()}
    tables: dict[nn.Module, _Lookups] = {
        each.layer: _Lookups()
        for each in posteriors
        if isinstance(each.layer, SparseTable) and each.theta not in elsewhere
    }
    if not tables:
        return float(sum(each.theta.numel() for each in posteriors))
    size: list[int] = []  # of the batch

    def begin(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        size[:] = [len(each) for each in tree_leaves((arguments, named)) if isinstance(each, Tensor) and each.ndim][:1]

    def looked_up(table: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        tokens = next(each for each in tree_leaves((arguments, named)) if isinstance(each, Tensor))
        tables[table].add(tokens, size[0] if size else None)

    hooks = [model.register_forward_pre_hook(begin, with_kwargs=True)]
    hooks += [table.register_forward_pre_hook(looked_up, with_kwargs=True) for table in tables]
    try:
        look()
    finally:
        for hook in hooks:
            hook.remove()
    return sum(each.theta.numel() * _share(each, tables.get(each.layer)) for each in posteriors)


class _Lookups:
    """Different rows that the examples have read."""

    def __init__(self) -> None:
        self.rows, self.examples = 0, 0

    def add(self, tokens: Tensor, batch: int | None) -> None:
        per_example = tokens.ndim > 0 and batch in (None, len(tokens))  # else all of them read all, as of places
        each = tokens.reshape(len(tokens), -1) if per_example else tokens.reshape(1, -1)
        in_order = each.sort(1).values
        self.rows += int((in_order.diff(dim=1) != 0).sum()) + len(each)
        self.examples += len(each)


def _share(posterior: Posterior, lookups: _Lookups | None) -> float:
    if lookups is None or not lookups.examples:
        return 1.0
    return min(1.0, lookups.rows / lookups.examples / max(1, len(posterior.theta)))
