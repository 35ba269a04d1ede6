"""Progressive pruning: what has been superfluous for long enough is zero for good, and stops costing anything.

`drop` makes the zeros. `contracted` takes the inputs and units without any weight left out of the layers while an epoch
lasts: parameters and Adam's state become smaller tensors, and get their shapes back at its end, so that nothing outside
the loop over batches ever sees them. It needs no picture of the network: a layer skips inputs that it does not read,
and a unit that reads nothing gives its bias, whatever comes before and after.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sparsevd.layers import Part, SparseLayer

# How many epochs in a row a weight has been above the threshold. It stands beside Adam's own numbers for log σ², and so
# goes with them into a checkpoint and back.
EPOCHS_ABOVE = "epochs_above"
# Smaller matrices must at least pay for picking the inputs and putting the outputs back.
_PAYS_BELOW = 0.8


@torch.no_grad()
def drop(layers: list[SparseLayer], optimizer: torch.optim.Optimizer, patience: int, whole_only: bool = False) -> int:
    """Call after every epoch: drops each weight that was above its threshold after `patience` epochs in a row.

    With `whole_only`, only where all weights of an input or of a unit were: these are what costs time, and while the
    learning rate is high a single weight may still come back. Returns how many weights were dropped by this call.
    """
    dropped = 0
    for layer in layers:
        state = optimizer.state.get(layer.log_sigma2)
        if not state:  # a frozen layer
            continue
        before = state.get(EPOCHS_ABOVE, torch.zeros_like(layer.weight, dtype=torch.int16))
        above = layer.log_alpha() > layer.threshold
        state[EPOCHS_ABOVE] = torch.where(above, (before + 1).clamp_max(patience), 0).to(torch.int16)
        superfluous = state[EPOCHS_ABOVE] >= patience
        if whole_only:
            superfluous = _whole(superfluous) if layer.can_contract() else torch.zeros_like(superfluous)
        superfluous = superfluous & layer.alive()
        layer.drop(superfluous)
        dropped += int(superfluous.sum())
    return dropped


def _whole(mask: Tensor) -> Tensor:
    """The part of a mask over [unit, input, ...] that covers whole units or whole inputs."""
    matrix = mask.flatten(2).all(2) if mask.ndim > 2 else mask
    covered = matrix.all(1, keepdim=True) | matrix.all(0, keepdim=True)
    return covered.view(*covered.shape, *[1] * (mask.ndim - 2)).expand_as(mask)


def zero_for_good(layers: list[SparseLayer]) -> list[tuple[SparseLayer, Tensor]]:
    """The layers that have dropped weights, with a mask to multiply their weight with after each step."""
    masks = [(layer, layer.alive()) for layer in layers]
    return [(layer, alive.to(layer.weight.dtype)) for layer, alive in masks if not alive.all()]


@contextmanager
def contracted(model: nn.Module, layers: list[SparseLayer], optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While it lasts, layers hold and compute only what has a weight left."""
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    done: list[_Contraction] = []
    try:
        for layer in layers:
            part = part_left(layer)
            if part is not None and owners[id(layer.weight)] == 1:  # else another module reads the weight too
                done.append(_Contraction(layer, part, optimizer))
        yield
    finally:
        for contraction in done:
            contraction.undo()


def part_left(layer: SparseLayer) -> Part | None:
    """The inputs and units that a dropped layer still needs, or None if it had better stay as it is."""
    if not layer.can_contract():
        return None
    alive = layer.alive().flatten(2).any(2) if layer.weight.ndim > 2 else layer.alive()
    units, inputs = (_indices(alive.any(1 - dimension)) for dimension in (0, 1))
    if len(units) * len(inputs) >= _PAYS_BELOW * alive.numel():
        return None
    return Part(inputs, units, alive.shape[1])


def _indices(mask: Tensor) -> Tensor:
    found = mask.nonzero().flatten()
    return found if len(found) else torch.zeros(1, dtype=torch.int64, device=mask.device)  # a layer is never empty


class _Contraction:
    """One layer made smaller: its two parameters are exchanged for smaller ones, and the optimizer takes these over."""

    def __init__(self, layer: SparseLayer, part: Part, optimizer: torch.optim.Optimizer):
        self._layer, self._optimizer = layer, optimizer
        self._where = torch.meshgrid(part.units, part.inputs, indexing="ij")
        self._whole = {"weight": layer.weight, "log_sigma2": layer.log_sigma2}
        layer.part = part
        for name, whole in self._whole.items():
            small = nn.Parameter(self._picked(whole.detach()))
            self._exchange(name, whole, small, self._picked)

    def undo(self) -> None:
        self._layer.part = None
        for name, whole in self._whole.items():
            small = getattr(self._layer, name)
            # What lies outside was dropped, and is what `drop` left there: only its Adam state is forgotten.
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
        full = torch.zeros_like(self._whole["weight"], dtype=value.dtype)
        full[self._where] = value
        return full
