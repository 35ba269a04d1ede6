"""Contraction: while an epoch lasts, layers hold and compute only the inputs and units that have a weight left.

Parameters and the optimizer's numbers for them become smaller tensors, and get their shapes back at the end, so that
nothing outside the loop over batches ever sees them. It needs no picture of the network: a layer skips inputs that it
does not read, and a unit that reads nothing gives its bias, whatever comes before and after. For one process: others
would average gradients of other shapes.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from sparsevd.layers.product_layer import Part, ProductLayer
from sparsevd.posterior import Posterior

# Smaller matrices must at least pay for picking the inputs and putting the outputs back.
_PAYS_BELOW = 0.8


@contextmanager
def contracted(
    model: nn.Module, posteriors: Sequence[Posterior], optimizer: torch.optim.Optimizer
) -> Iterator[dict[str, Tensor]]:
    """While it lasts, layers are smaller. Gives by name which weights of a layer take part, for those that are."""
    done: dict[str, _Contraction] = {}
    try:
        for posterior, part in parts_left(model, posteriors):
            done[posterior.name] = _Contraction(posterior, part, optimizer)
        yield {name: contraction.inside for name, contraction in done.items()}
    finally:
        for contraction in done.values():
            contraction.undo()


def parts_left(model: nn.Module, posteriors: Sequence[Posterior]) -> list[tuple[Posterior, Part]]:
    """The layers that can be smaller, and what each then holds."""
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    alone = [each for each in posteriors if owners[id(each.theta)] == 1]  # else another module reads the weight too
    return [(each, part) for each in alone if (part := part_left(each)) is not None]


def part_left(posterior: Posterior) -> Part | None:
    """The inputs and units that a layer still needs after dropping, or None if it had better stay as it is."""
    if not posterior.contractible:
        return None
    alive = posterior.alive()
    alive = alive.flatten(2).any(2) if alive.ndim > 2 else alive
    units, inputs = (_indices(alive.any(1 - dimension)) for dimension in (0, 1))
    if len(units) * len(inputs) >= _PAYS_BELOW * alive.numel():
        return None
    return Part(inputs, units, width=alive.shape[1], size=alive.shape[0])


def _indices(mask: Tensor) -> Tensor:
    found = mask.nonzero().flatten()
    return found if len(found) else torch.zeros(1, dtype=torch.int64, device=mask.device)  # a layer is never empty


class _Contraction:
    """One layer made smaller: θ and log σ² are exchanged for smaller parameters, which the optimizer takes over.

    Not their data alone: a graph that someone still holds, as a model that keeps its last activations does, remembers
    the shape that a parameter had, and torch would refuse the next backward pass.
    """

    def __init__(self, posterior: Posterior, part: Part, optimizer: torch.optim.Optimizer):
        self._layer, self._optimizer = cast(ProductLayer, posterior.layer), optimizer
        self._where = torch.meshgrid(part.units, part.inputs, indexing="ij")
        self._whole = {posterior.weight: posterior.theta, posterior.noise: posterior.log_sigma2}
        self._layer.part = part
        for name, whole in self._whole.items():
            small = nn.Parameter(self._picked(whole.detach()), requires_grad=whole.requires_grad)
            self._exchange(name, whole, small, self._picked)

    @property
    def inside(self) -> Tensor:
        """True for the weights that take part."""
        return self._among_zeros(torch.tensor(True))

    def undo(self) -> None:
        self._layer.part = None
        for name, whole in self._whole.items():
            small = self._layer.get_parameter(name)
            # What lies outside was dropped, and is what `drop` left there: only the optimizer's numbers are forgotten.
            whole.data[self._where] = small.detach()
            self._exchange(name, small, whole, self._among_zeros)

    def _exchange(self, name: str, before: Tensor, after: Tensor, changed: Callable[[Tensor], Tensor]) -> None:
        """Put one parameter in the place of another, with what the optimizer keeps for each weight changed likewise."""
        setattr(self._layer, name, after)
        for group in self._optimizer.param_groups:
            group["params"] = [after if parameter is before else parameter for parameter in group["params"]]
        kept = self._optimizer.state.pop(before, {})
        self._optimizer.state[after] = {
            slot: changed(value) if isinstance(value, Tensor) and value.shape == before.shape else value
            for slot, value in kept.items()
        }
        before.grad = after.grad = None

    def _picked(self, value: Tensor) -> Tensor:
        """The part, in the order in memory of the whole."""
        part = value[self._where]
        channels_last = value.ndim == 4 and value.stride(1) == 1
        return part.to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)

    def _among_zeros(self, value: Tensor) -> Tensor:
        full = torch.zeros_like(next(iter(self._whole.values())), dtype=value.dtype)
        full[self._where] = value
        return full
