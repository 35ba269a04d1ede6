"""The mean of a network over the last steps: about what it will be once the rate has fallen.

At a high rate the weights jitter around where they are going, and so does the held-out error: one look of several is
lucky. Their mean hardly does (stochastic weight averaging, Izmailov et al. 2018), so a look at it says what the cuts
have cost, and not what the rate costs. Statistics of batch norm are averaged with the weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sparsevd.posterior import posteriors

PREFIX = "mean/"


class WeightMean:
    """Of all that training changes, but for the noise; it begins anew after every look."""

    def __init__(self, model: nn.Module):
        noise = {id(each.log_sigma2) for each in posteriors(model)}
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in noise}
        self._buffers = {name: b for name, b in model.named_buffers() if b.is_floating_point()}
        self._tensors: dict[str, Tensor] = {**parameters, **self._buffers}
        self._means: dict[str, Tensor] = {}
        self._steps = 0

    @torch.no_grad()
    def add(self) -> None:
        """After each step."""
        self._steps += 1
        for name, tensor in self._tensors.items():
            if self._steps == 1:
                self._means[name] = tensor.detach().clone()
                continue
            mean = self._means[name]
            # What did not change, a zero or the −∞ of a mask above all, stays exact.
            mean.copy_(torch.where(mean == tensor, mean, mean.lerp(tensor, 1 / self._steps)))

    def begin_anew(self) -> None:
        self._steps, self._means = 0, {}

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, the network is the mean; where no step was taken since it began anew, it is as it is."""
        before = {name: self._tensors[name].detach().clone() for name in self._means}
        self._set(self._means)
        try:
            yield
        finally:
            self._set(before)

    @torch.no_grad()
    def _set(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self._tensors[name].data.copy_(value)

    def statistics(self) -> list[Tensor]:
        """The means of the buffers, which are each process's own."""
        return [self._means[name] for name in self._buffers if name in self._means]

    # Resuming.

    def state_dict(self) -> dict[str, Tensor]:
        return {f"{PREFIX}steps": torch.tensor(self._steps)} | {
            f"{PREFIX}of/{name}": mean for name, mean in self._means.items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._steps = int(state.get(f"{PREFIX}steps", 0))  # a run of a time without means goes on with its next step
        self._means = {
            name: state[f"{PREFIX}of/{name}"].to(tensor.device).clone()
            for name, tensor in (self._tensors.items() if self._steps else ())
        }

    def problem_of(self, state: dict[str, Tensor]) -> str:
        """Why this is no state that it can have, or an empty string."""
        if not any(name.startswith(PREFIX) for name in state):
            return ""
        steps = state.get(f"{PREFIX}steps")
        if not isinstance(steps, Tensor) or steps.shape != () or steps.dtype is not torch.int64 or steps < 0:
            return "it does not say how many steps the mean of the weights is of"
        means = {
            name.removeprefix(f"{PREFIX}of/"): value for name, value in state.items() if name.startswith(f"{PREFIX}of/")
        }
        wanted = {name: (t.shape, t.dtype) for name, t in self._tensors.items()} if steps else {}
        if {name: (value.shape, value.dtype) for name, value in means.items()} != wanted:
            return "the mean of the weights is that of another network"
        return ""
