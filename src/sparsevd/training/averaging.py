"""The gradients of one network on several processes, averaged by torch's DistributedDataParallel while they are made.

It must know beforehand whether every parameter gets a gradient, and looks for those that do not only where it is told
to, since that costs time. So the first step of an epoch is taken without it, and shows.
"""

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsevd.training.inputs import Forward


class Averaging:
    """Calls the network; after the backward pass, `finish` leaves the same mean gradients on every process."""

    def __init__(self, model: nn.Module, forward: Forward):
        self._called = _Called(model, forward)
        self._parallel: DistributedDataParallel | None = None

    def __call__(self, inputs: Any) -> Any:
        return (self._parallel or self._called)(inputs)

    def begin_anew(self) -> None:
        """Other parameters may have a gradient from now on: some were frozen, or the noise went off."""
        self._parallel = None

    def close(self) -> None:
        """Let go of the processes. Torch's part must not outlive their group: if it were the last to hold it, it would
        wait for the group's threads and keep Python's lock, which these may be waiting for."""
        self._parallel = None
        gc.collect()  # it can be in a cycle

    def finish(self) -> None:
        """After each backward pass."""
        if self._parallel is not None:
            return  # it was done on the way
        trained = [parameter for parameter in self._called.parameters() if parameter.requires_grad]
        used = torch.tensor([float(parameter.grad is not None) for parameter in trained])
        dist.all_reduce(used)
        for parameter, count in zip(trained, used.tolist(), strict=True):
            if count:  # by any of them
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                mean = parameter.grad.contiguous() / dist.get_world_size()
                dist.all_reduce(mean)
                parameter.grad.copy_(mean)
        every = bool(used.all())
        self._parallel = DistributedDataParallel(self._called, find_unused_parameters=not every)


class _Called(nn.Module):
    """A network and how it is called, as one module: what the user's function does with the network is its own."""

    def __init__(self, model: nn.Module, forward: Forward):
        super().__init__()
        self.model, self._how = model, forward

    def forward(self, inputs: Any) -> Tensor:
        return self._how(self.model, inputs)  # type: ignore[no-any-return]
