"""Linear maps of an input by a weight, whichever weight that is: what a layer computes, with its gradients.

`sampling` applies a layer's map twice, to θ and to σ².
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

Gradients = tuple[Tensor | None, Tensor | None]


class LinearMap(ABC):
    """A·W for a matrix, A ∗ w for a filter."""

    @property
    @abstractmethod
    def channel(self) -> int:
        """The dimension of the output that the bias belongs to, counted from the end."""

    @abstractmethod
    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output."""

    @abstractmethod
    def gradients(self, grad: Tensor, input: Tensor, weight: Tensor, wants: tuple[bool, bool]) -> Gradients:
        """The gradients of the input and of the weight, None for one that is not wanted."""


@final
class MatrixProduct(LinearMap):
    """A·Wᵀ, as `nn.Linear` has it."""

    @property
    def channel(self) -> int:
        return -1

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)

    def gradients(self, grad: Tensor, input: Tensor, weight: Tensor, wants: tuple[bool, bool]) -> Gradients:
        grad_input = grad @ weight if wants[0] else None
        if grad.ndim != 2:
            grad, input = grad.reshape(-1, grad.shape[-1]), input.reshape(-1, input.shape[-1])
        return grad_input, grad.t() @ input if wants[1] else None


@final
class ColumnProduct(LinearMap):
    """A·W, with a column of the weight for each unit."""

    @property
    def channel(self) -> int:
        return -1

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        output = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
        return output.view(*input.shape[:-1], weight.shape[1])

    def gradients(self, grad: Tensor, input: Tensor, weight: Tensor, wants: tuple[bool, bool]) -> Gradients:
        grad_input = grad @ weight.t() if wants[0] else None
        grad, input = grad.reshape(-1, grad.shape[-1]), input.reshape(-1, input.shape[-1])
        return grad_input, input.t() @ grad if wants[1] else None


@final
@dataclass(frozen=True)
class Convolution(LinearMap):
    """A ∗ w in any number of dimensions; `convolve` is torch's function for that number, transposed or not."""

    convolve: Callable[..., Tensor]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    output_padding: tuple[int, ...] | None = None  # of a transposed one

    @property
    def channel(self) -> int:
        return -1 - len(self.stride)

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.output_padding is None:
            return self.convolve(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        settings = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
        return self.convolve(input, weight, bias, *settings)

    def gradients(self, grad: Tensor, input: Tensor, weight: Tensor, wants: tuple[bool, bool]) -> Gradients:
        batched = input.ndim == weight.ndim
        if not batched:
            grad, input = grad.unsqueeze(0), input.unsqueeze(0)
        transposed = self.output_padding is not None
        settings: tuple[Any, ...] = (self.stride, self.padding, self.dilation, transposed, self.output_padding or [0])
        backward = torch.ops.aten.convolution_backward
        found = backward(grad, input, weight, None, *settings, self.groups, [*wants, False])
        grad_input, grad_weight, _ = found
        return grad_input if batched or grad_input is None else grad_input.squeeze(0), grad_weight
