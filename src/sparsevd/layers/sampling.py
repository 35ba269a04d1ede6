"""The noisy forward pass of a Sparse VD layer in training: b = γ + √δ·ε with γ = A·θ and δ = A²·σ² (eq. 17, 18).

Two ways to the same distribution. `composed` is the equation as it stands, for autograd, torch.compile and every
device. `fused` is one autograd function around the C kernels that keeps no more than the input and one number per
output: σ² and A² are made again, and the noise is not needed again.
"""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsevd import kernels
from sparsevd.errors import ArgumentError
from sparsevd.kernels import door
from sparsevd.layers.linear_map import LinearMap, MatrixProduct
from sparsevd.layers.selection import select, spread, spread_plainly
from sparsevd.posterior import equations


class NoisyWeight(NamedTuple):
    """The weight of a layer: θ, the bias, log σ², and the type of A² and σ² in their product."""

    theta: Tensor
    bias: Tensor | None
    log_sigma2: Tensor
    variance_dtype: torch.dtype

    def without_bias(self) -> "NoisyWeight":
        return self._replace(bias=None)


def sample_weights(theta: Tensor, log_sigma2: Tensor, epsilon: Tensor) -> Tensor:
    """θ + σ·ε: a sample of the weights themselves, for layers that read them more than once (eq. 11)."""
    noise = torch.exp(0.5 * log_sigma2) * epsilon
    return theta + noise.to(theta.dtype)


def sample(linear_map: LinearMap, input: Tensor, noisy: NoisyWeight) -> Tensor:
    """A sample of the layer's output."""
    if _can_fuse(input, noisy):
        return fused(linear_map, input, noisy)
    if _can_fuse_in_bfloat16(input, noisy):
        return _Fused.apply(linear_map, torch.bfloat16, input, *noisy[:3], torch.bfloat16)  # type: ignore[no-any-return,no-untyped-call]
    return composed(linear_map, input, noisy)


def sample_part(
    linear_map: LinearMap, input: Tensor, noisy: NoisyWeight, inputs: Tensor, units: Tensor, size: int
) -> Tensor:
    """The same where the weight has only some inputs and some of `size` units; the other units give out their bias."""
    bias = noisy.bias
    whole_bias = bias is None or (bias.shape == (size,) and door.suits(bias))
    if whole_bias and _can_fuse(input, noisy) and _all_in_c(linear_map, input, noisy):
        arguments = (input, noisy.theta, bias, noisy.log_sigma2, inputs, units, size)
        return _FusedPart.apply(*arguments)  # type: ignore[no-any-return,no-untyped-call]
    input = select(input, linear_map.channel, inputs)
    output = sample(linear_map, input, noisy.without_bias())
    return spread(output, linear_map.channel, units, size, bias)


def _can_fuse(input: Tensor, noisy: NoisyWeight) -> bool:
    return (
        noisy.variance_dtype in (torch.float32, torch.bfloat16)
        and noisy.theta.shape == noisy.log_sigma2.shape
        and kernels.can_take(input, noisy.theta, noisy.log_sigma2)
        and not torch.is_autocast_enabled("cpu")
    )


def _can_fuse_in_bfloat16(input: Tensor, noisy: NoisyWeight) -> bool:
    """Under autocast to bfloat16: both products are in it, and what the kernels get is float32 that was made here."""
    return (
        torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") is torch.bfloat16
        and input.dtype in (torch.float32, torch.bfloat16)
        and type(input) in (Tensor, torch.nn.Parameter)
        and input.is_cpu
        and input.layout is torch.strided
        and door.dense(input)
        and noisy.theta.shape == noisy.log_sigma2.shape
        and kernels.can_take(noisy.theta, noisy.log_sigma2)
    )


def composed(linear_map: LinearMap, input: Tensor, noisy: NoisyWeight) -> Tensor:
    theta, bias, log_sigma2, variance_dtype = noisy
    if theta.shape != log_sigma2.shape:  # torch would spread one over the other without a word
        raise ArgumentError(f"the weight has shape {tuple(theta.shape)}, its log σ² {tuple(log_sigma2.shape)}")
    gamma = linear_map.product(input, theta, bias)
    wide, device = log_sigma2.dtype, input.device.type
    with _autocast_to_bfloat16_at_most(device):
        squared, sigma2 = input.to(wide).square().to(variance_dtype), torch.exp(log_sigma2).to(variance_dtype)
        delta = linear_map.product(squared, sigma2, None).to(wide)
    return equations.noisy_output(gamma, delta, torch.randn_like(delta))


def _autocast_to_bfloat16_at_most(device: str) -> AbstractContextManager[object]:
    """bfloat16 has the range of float32, so autocast may use it for the product. float16 has not: σ² underflows."""
    if not torch.amp.is_autocast_available(device):  # as on meta
        return nullcontext()
    stays = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
    return torch.autocast(device, dtype=torch.bfloat16, enabled=stays)


def fused(linear_map: LinearMap, input: Tensor, noisy: NoisyWeight) -> Tensor:
    if _all_in_c(linear_map, input, noisy) and kernels.shapes_fit(input, noisy.theta, noisy.bias):
        return _FusedLinear.apply(input, *noisy[:3])  # type: ignore[no-any-return,no-untyped-call]
    return _Fused.apply(linear_map, torch.float32, input, *noisy)  # type: ignore[no-any-return,no-untyped-call]


def _all_in_c(linear_map: LinearMap, input: Tensor, noisy: NoisyWeight) -> bool:
    """Whether this is a product of matrices that the kernels do whole."""
    matrices = (
        isinstance(linear_map, MatrixProduct)
        and input.is_contiguous()
        and 0 not in (input.numel(), noisy.theta.numel())
    )
    return matrices and noisy.variance_dtype is torch.float32 and kernels.sgemm() is not None


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
            grad_input = spread_plainly(grad_input, -1, inputs, ctx.width)
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if wants_bias else None
        return grad_input, grad_weight, grad_bias, grad_log_sigma2, None, None, None


class _Fused(torch.autograd.Function):
    """Any linear map. `dtype` is that of γ's product and of the output; √δ and the noise are float32 in any case."""

    @staticmethod
    def forward(
        ctx: Any,
        linear_map: LinearMap,
        dtype: torch.dtype,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        log_sigma2: Tensor,
        variance_dtype: torch.dtype,
    ) -> Tensor:
        ctx.given = input.dtype
        if dtype is not torch.float32:  # autocast: else torch has its word on types that do not fit
            input, bias = _as(dtype, input), None if bias is None else _as(dtype, bias)
        with torch.autocast("cpu", enabled=False):
            product = linear_map.product(input, _as(dtype, weight), bias)
            squared, sigma2 = _factors(input, log_sigma2, variance_dtype)
            delta = _rounded(variance_dtype, linear_map.product(squared, sigma2, None))
        gamma = _as(torch.float32, product)
        slope = _like(gamma, delta)
        kernels.sample_(gamma, slope, kernels.fresh_seed())  # what was δ is now d b / d δ
        ctx.linear_map, ctx.dtype, ctx.variance_dtype = linear_map, dtype, variance_dtype
        ctx.save_for_backward(input, weight, log_sigma2, slope)
        return _as(dtype, gamma)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, log_sigma2, slope = ctx.saved_tensors
        _, _, wants_input, wants_weight, wants_bias, wants_noise, _ = ctx.needs_input_grad
        gradients, dtype = ctx.linear_map.gradients, ctx.variance_dtype
        with torch.autocast("cpu", enabled=False):
            grad_input, grad_weight = gradients(grad, input, _as(ctx.dtype, weight), (wants_input, wants_weight))
            # And through δ = A²·σ², where d A² = 2·A·d A and d σ² = σ²·d log σ².
            squared, sigma2 = _factors(input, log_sigma2, dtype, sigma2_is_read=wants_input)
            grad_delta = _rounded(dtype, _as(squared.dtype, grad * slope))
            grad_squared, grad_sigma2 = gradients(grad_delta, squared, sigma2, (wants_input, wants_noise))
        if wants_input:
            grad_input = _as(ctx.given, grad_input.addcmul_(input, _rounded(dtype, grad_squared), value=2))
        if wants_weight:
            grad_weight = _as(weight.dtype, grad_weight)
        if wants_noise:
            grad_sigma2 = _like(log_sigma2, _rounded(dtype, grad_sigma2))
            if wants_input:
                grad_sigma2.mul_(sigma2)
            else:
                kernels.times_variance_(grad_sigma2, log_sigma2)
        grad_bias = None
        if wants_bias:
            rest = [d for d in range(grad.ndim) if d != grad.ndim + ctx.linear_map.channel]
            grad_bias = grad.sum(rest, dtype=torch.float32) if rest else grad.float()
        return None, None, grad_input, grad_weight, grad_bias, grad_sigma2, None


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
