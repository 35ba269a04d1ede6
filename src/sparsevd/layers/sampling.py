"""The noisy forward pass of a Sparse VD layer in training: b = γ + √δ·ε with γ = A·θ and δ = A²·σ² (eq. 17, 18).

Two ways to the same distribution. `composed` is the equation as it stands, for autograd, torch.compile and every
device. `fused` is one autograd function around the C kernels that keeps no more than the input and one number per
output: σ² and A² are made again, and the noise is not needed again.
"""

import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from sparsevd import kernels
from sparsevd.errors import ArgumentError
from sparsevd.kernels import door
from sparsevd.posterior import equations


class LinearMap(Protocol):
    """What a layer does with an input and a weight, whichever weight that is. `shape`: extra arguments of the call."""

    channel: int  # the dimension of the output that the bias belongs to, counted from the end

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None, *shape: Any) -> Tensor: ...

    def gradients(
        self, grad: Tensor, input: Tensor, weight: Tensor, wants: tuple[bool, bool], *shape: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of the input and of the weight, None for one that is not wanted."""
        ...


def sample(
    linear_map: LinearMap,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    log_sigma2: Tensor,
    variance_dtype: torch.dtype,
    *shape: Any,
) -> Tensor:
    """A sample of the layer's output; `variance_dtype` is the type of A² and σ² in their product."""
    way = fused if _can_fuse(input, weight, log_sigma2, variance_dtype) else composed
    return way(linear_map, input, weight, bias, log_sigma2, variance_dtype, *shape)


def sample_part(
    linear_map: LinearMap,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    log_sigma2: Tensor,
    variance_dtype: torch.dtype,
    part: tuple[Tensor, Tensor, int],
    *shape: Any,
) -> Tensor:
    """The same where the weight has only some inputs and some of `size` units; the other units give out their bias."""
    inputs, units, size = part
    whole_bias = bias is None or (bias.shape == (size,) and door.suits(bias))
    if (
        whole_bias
        and _can_fuse(input, weight, log_sigma2, variance_dtype)
        and _all_in_c(linear_map, input, weight, variance_dtype)
    ):
        return _FusedPart.apply(input, weight, bias, log_sigma2, *part)  # type: ignore[no-any-return,no-untyped-call]
    input = select(input, linear_map.channel, inputs)
    output = sample(linear_map, input, weight, None, log_sigma2, variance_dtype, *shape)
    return spread(output, linear_map.channel, units, size, bias)


def _can_fuse(input: Tensor, weight: Tensor, log_sigma2: Tensor, variance_dtype: torch.dtype) -> bool:
    return (
        variance_dtype in (torch.float32, torch.bfloat16)
        and weight.shape == log_sigma2.shape
        and kernels.can_take(input, weight, log_sigma2)
        and not torch.is_autocast_enabled("cpu")
    )


def composed(
    linear_map: LinearMap,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    log_sigma2: Tensor,
    variance_dtype: torch.dtype,
    *shape: Any,
) -> Tensor:
    if weight.shape != log_sigma2.shape:  # torch would spread one over the other without a word
        raise ArgumentError(f"the weight has shape {tuple(weight.shape)}, its log σ² {tuple(log_sigma2.shape)}")
    gamma = linear_map.product(input, weight, bias, *shape)
    wide, device = log_sigma2.dtype, input.device.type
    # bfloat16 has the range of float32, so autocast may use it for the product. float16 has not: σ² underflows.
    keep_autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
    with torch.autocast(device, dtype=torch.bfloat16, enabled=keep_autocast):
        squared, sigma2 = input.to(wide).square().to(variance_dtype), torch.exp(log_sigma2).to(variance_dtype)
        delta = linear_map.product(squared, sigma2, None, *shape).to(wide)
    return equations.noisy_output(gamma, delta, torch.randn_like(delta))


def fused(
    linear_map: LinearMap,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    log_sigma2: Tensor,
    variance_dtype: torch.dtype,
    *shape: Any,
) -> Tensor:
    if _all_in_c(linear_map, input, weight, variance_dtype) and kernels.shapes_fit(input, weight, bias):
        return _FusedLinear.apply(input, weight, bias, log_sigma2)  # type: ignore[no-any-return,no-untyped-call]
    arguments = (linear_map, input, weight, bias, log_sigma2, variance_dtype, shape)
    return _Fused.apply(*arguments)  # type: ignore[no-any-return,no-untyped-call]


def _all_in_c(linear_map: LinearMap, input: Tensor, weight: Tensor, variance_dtype: torch.dtype) -> bool:
    """Whether this is a product of matrices that the kernels do whole."""
    matrices = linear_map.channel == -1 and input.is_contiguous() and 0 not in (input.numel(), weight.numel())
    return matrices and variance_dtype is torch.float32 and kernels.sgemm() is not None


class _FusedLinear(torch.autograd.Function):
    """A fully-connected layer, all of it in C."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, log_sigma2: Tensor) -> Tensor:
        output, slope = kernels.linear_forward(input, weight, bias, log_sigma2, kernels.fresh_seed())
        ctx.save_for_backward(input, weight, log_sigma2, slope)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, log_sigma2, slope = ctx.saved_tensors
        wants_input, _, wants_bias, _ = ctx.needs_input_grad
        if grad.is_neg() or not grad.is_contiguous():
            grad = door.plain(grad)
        return kernels.linear_backward(grad, slope, input, weight, log_sigma2, wants_bias, wants_input)


class _FusedPart(torch.autograd.Function):
    """The part of a fully-connected layer that is left: one function, since on small networks each costs as much."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        log_sigma2: Tensor,
        inputs: Tensor,
        units: Tensor,
        size: int,
    ) -> Tensor:
        chosen = input.index_select(-1, inputs)
        part_bias = None if bias is None else bias.index_select(0, units)
        output, slope = kernels.linear_forward(chosen, weight, part_bias, log_sigma2, kernels.fresh_seed())
        ctx.save_for_backward(chosen, weight, log_sigma2, slope, inputs, units)
        ctx.width = input.shape[-1]
        whole = input.new_empty(*input.shape[:-1], size)
        whole = whole.zero_() if bias is None else whole.copy_(bias)
        return whole.index_copy_(-1, units, output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        chosen, weight, log_sigma2, slope, inputs, units = ctx.saved_tensors
        wants_input, _, wants_bias, *_ = ctx.needs_input_grad
        arguments = (grad.index_select(-1, units), slope, chosen, weight, log_sigma2, False, wants_input)
        grad_input, grad_weight, _, grad_log_sigma2 = kernels.linear_backward(*arguments)
        if grad_input is not None:
            grad_input = _spread(grad_input, -1, inputs, ctx.width)
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if wants_bias else None
        return grad_input, grad_weight, grad_bias, grad_log_sigma2, None, None, None


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        linear_map: LinearMap,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        log_sigma2: Tensor,
        variance_dtype: torch.dtype,
        shape: tuple[Any, ...],
    ) -> Tensor:
        gamma = linear_map.product(input, weight, bias, *shape)
        squared, sigma2 = _factors(input, log_sigma2, variance_dtype)
        delta = _like(gamma, _rounded(variance_dtype, linear_map.product(squared, sigma2, None, *shape)))
        kernels.sample_(gamma, delta, kernels.fresh_seed())
        ctx.linear_map, ctx.variance_dtype, ctx.shape = linear_map, variance_dtype, shape
        ctx.save_for_backward(input, weight, log_sigma2, delta)  # what was δ is now d b / d δ
        return gamma

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, log_sigma2, slope = ctx.saved_tensors
        _, wants_input, wants_weight, wants_bias, wants_noise, *_ = ctx.needs_input_grad
        gradients, dtype = ctx.linear_map.gradients, ctx.variance_dtype
        grad_input, grad_weight = gradients(grad, input, weight, (wants_input, wants_weight), *ctx.shape)
        # And through δ = A²·σ², where d A² = 2·A·d A and d σ² = σ²·d log σ².
        squared, sigma2 = _factors(input, log_sigma2, dtype, sigma2_is_read=wants_input)
        grad_delta = _rounded(dtype, _as(squared.dtype, grad * slope))
        grad_squared, grad_sigma2 = gradients(grad_delta, squared, sigma2, (wants_input, wants_noise), *ctx.shape)
        if wants_input:
            grad_input.addcmul_(input, _rounded(dtype, grad_squared), value=2)
        if wants_noise:
            grad_sigma2 = _like(log_sigma2, _rounded(dtype, grad_sigma2))
            if wants_input:
                grad_sigma2.mul_(sigma2)
            else:
                kernels.times_variance_(grad_sigma2, log_sigma2)
        grad_bias = None
        if wants_bias:
            grad_bias = grad.sum([d for d in range(grad.ndim) if d != grad.ndim + ctx.linear_map.channel])
        return None, grad_input, grad_weight, grad_bias, grad_sigma2, None, None


def _factors(
    input: Tensor, log_sigma2: Tensor, dtype: torch.dtype, sigma2_is_read: bool = True
) -> tuple[Tensor, Tensor]:
    """A² and σ². On a CPU that cannot multiply bfloat16, float32 numbers rounded to it; see `_rounded`."""
    squared = _as(dtype, input * input)
    sigma2 = kernels.variance(log_sigma2, dtype) if sigma2_is_read else log_sigma2
    multiplied = torch.float32 if dtype == torch.bfloat16 and not multiplies_bfloat16() else dtype
    return _as(multiplied, squared), _as(multiplied, sigma2)


def _rounded(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Float32 numbers that stand for some of a shorter type, rounded as these would be: the same result, no faster."""
    return tensor if dtype is torch.float32 or tensor.dtype is dtype else tensor.to(dtype).to(tensor.dtype)


def _as(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it; without them torch's product takes ten times that of float32."""
    found = torch.cpu.get_capabilities()
    return any(found.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


# Multiply-adds of a product from which bfloat16 saves more than rounding the factors costs, and rows of a matrix below
# which making σ² costs most: measured layer by layer in benchmarks/results/variance_dtype.json.
_WORTH_OF_MATRICES, _FEWEST_ROWS = 1 << 26, 64
_WORTH_OF_CONVOLUTIONS = 1 << 25


def worth_bfloat16(linear_map: LinearMap, input: Tensor, weight: Tensor) -> bool:
    """Whether the variance product is faster in bfloat16, on a CPU with instructions for it.

    By size alone, so that the same network on the same data always computes the same.
    """
    rows = input.numel() // max(1, input.shape[linear_map.channel])  # the places of a convolution, but for its stride
    if linear_map.channel == -1:
        return rows >= _FEWEST_ROWS and rows * weight.numel() >= _WORTH_OF_MATRICES
    return rows * weight.numel() >= _WORTH_OF_CONVOLUTIONS


def _like(pattern: Tensor, tensor: Tensor) -> Tensor:
    """The tensor with the type and the order in memory of the pattern, itself where it has them."""
    if tensor.dtype == pattern.dtype and tensor.stride() == pattern.stride():
        return tensor
    return torch.empty_like(pattern).copy_(tensor)


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


def _select(tensor: Tensor, dimension: int, indices: Tensor) -> Tensor:
    last = tensor.movedim(dimension, -1)
    if not last.is_contiguous():
        return tensor.index_select(dimension, indices)
    # Channels that are next to each other in memory stay so: what comes after, convolutions above all, relies on it.
    rows = last.reshape(-1, last.shape[-1]).index_select(1, indices)
    return rows.view(*last.shape[:-1], -1).movedim(-1, dimension)


def _spread(tensor: Tensor, dimension: int, indices: Tensor, size: int, bias: Tensor | None = None) -> Tensor:
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
        return _select(input, dimension, indices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _spread(grad, *ctx.arguments), None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, dimension: int, indices: Tensor, size: int, bias: Tensor | None) -> Tensor:
        ctx.arguments = dimension, indices
        return _spread(output, dimension, indices, size, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dimension, _ = ctx.arguments
        others = [d for d in range(grad.ndim) if d != grad.ndim + dimension]
        grad_bias = grad.sum(others) if ctx.needs_input_grad[4] else None
        return _select(grad, *ctx.arguments), None, None, None, grad_bias
