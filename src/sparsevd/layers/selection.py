"""Some channels of a tensor, and back among zeros: what a layer that lost inputs and units reads and gives out."""

from typing import Any

import torch
from torch import Tensor


def select(input: Tensor, dimension: int, indices: Tensor) -> Tensor:
    """`input.index_select` with a backward pass that copies; torch's own adds, in case an index comes twice."""
    if len(indices) == input.shape[dimension]:
        return input
    return _Select.apply(input, dimension, indices)  # type: ignore[no-any-return,no-untyped-call]


def spread(output: Tensor, dimension: int, indices: Tensor, size: int, bias: Tensor | None = None) -> Tensor:
    """The inverse of `select`: a tensor of this size with the output at the indices and zero elsewhere, plus bias."""
    if len(indices) == size:
        return output if bias is None else output + _beside(bias, dimension)
    return _Spread.apply(output, dimension, indices, size, bias)  # type: ignore[no-any-return,no-untyped-call]


def select_plainly(tensor: Tensor, dimension: int, indices: Tensor) -> Tensor:
    last = tensor.movedim(dimension, -1)
    if not last.is_contiguous():
        return tensor.index_select(dimension, indices)
    # Channels that are next to each other in memory stay so: what comes after, convolutions above all, relies on it.
    rows = last.reshape(-1, last.shape[-1]).index_select(1, indices)
    return rows.view(*last.shape[:-1], -1).movedim(-1, dimension)


def spread_plainly(tensor: Tensor, dimension: int, indices: Tensor, size: int, bias: Tensor | None = None) -> Tensor:
    last = tensor.movedim(dimension, -1)
    if not last.is_contiguous():
        shape = list(tensor.shape)
        shape[dimension] = size
        whole = tensor.new_zeros(shape).index_copy_(dimension, indices, tensor)
        return whole if bias is None else whole + _beside(bias, dimension)
    # The same, channels next to each other. Reading any column and multiplying is faster than torch's copy to columns.
    source = indices.new_zeros(size).index_copy_(0, indices, torch.arange(len(indices), device=indices.device))
    there = tensor.new_zeros(size).index_fill_(0, indices, 1)
    rows = last.reshape(-1, len(indices)).index_select(1, source)
    rows = rows.mul_(there) if bias is None else torch.addcmul(bias, rows, there, out=rows)
    return rows.view(*last.shape[:-1], size).movedim(-1, dimension)


def _beside(bias: Tensor, dimension: int) -> Tensor:
    """A number per channel, in a shape to add to tensors that have the channels at this dimension, from the end."""
    return bias.view(-1, *[1] * (-1 - dimension))


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, dimension: int, indices: Tensor) -> Tensor:
        ctx.arguments = dimension, indices, input.shape[dimension]
        return select_plainly(input, dimension, indices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return spread_plainly(grad, *ctx.arguments), None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, dimension: int, indices: Tensor, size: int, bias: Tensor | None) -> Tensor:
        ctx.arguments = dimension, indices
        return spread_plainly(output, dimension, indices, size, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dimension, _ = ctx.arguments
        others = [d for d in range(grad.ndim) if d != grad.ndim + dimension]
        grad_bias = grad.sum(others) if ctx.needs_input_grad[4] else None
        return select_plainly(grad, *ctx.arguments), None, None, None, grad_bias
