"""The fused training kernels. They take what `kernels.can_take` says; `posterior` and `layers` have torch's way for the
rest."""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsevd.errors import ArgumentError
from sparsevd.kernels import door
from sparsevd.kernels.loading import BEST, lanes, required
from sparsevd.kernels.structs import AdamStruct, LinearStruct, TrainedStruct


def kl(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The KL (eq. 14) summed over pairs (θ, log σ²) of tensors of weights, in one pass with all its gradients."""
    flat = [tensor for pair in pairs for tensor in pair]
    return _KL.apply(*flat)  # type: ignore[no-any-return,no-untyped-call]


class _KL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *flat: Tensor) -> Tensor:
        value, ctx.gradients = _kl_and_gradients(flat)
        ctx.save_for_backward(*flat)
        return torch.tensor(value, dtype=torch.float32, device="cpu")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        # The gradients are handed over, not copied; who comes back a second time gets them made again.
        gradients = ctx.gradients or _kl_and_gradients(ctx.saved_tensors)[1]
        ctx.gradients = None
        torch._foreach_mul_(gradients, grad.item())
        return tuple(gradients)


def _kl_and_gradients(flat: Sequence[Tensor], instruction_set: int = BEST) -> tuple[float, list[Tensor]]:
    """The sum over θ, log σ², θ, log σ², ... and the gradient of each of them."""
    library = required()
    gradients = [torch.empty_like(tensor) for tensor in flat]
    sums = torch.empty(library.sparsevd_blocks(max(t.numel() for t in flat)), dtype=torch.float64, device="cpu")
    value = 0.0
    for i in range(0, len(flat), 2):
        given = door.addresses("θ log_σ²", flat[i : i + 2])
        ours = [tensor.data_ptr() for tensor in (*gradients[i : i + 2], sums)]
        value += library.sparsevd_kl(*_common(instruction_set, flat[i]), *given, *ours)
    return value, gradients


def kl_with_gradients(theta: Tensor, log_sigma2: Tensor, instruction_set: int = BEST) -> tuple[Tensor, Tensor, Tensor]:
    """The summed KL of one tensor of weights and its gradients with respect to θ and log σ²."""
    value, (grad_theta, grad_log_sigma2) = _kl_and_gradients((theta, log_sigma2), instruction_set)
    return torch.tensor(value, dtype=torch.float32, device="cpu"), grad_theta, grad_log_sigma2


def adam_step_(*tensors: Tensor, settings: Sequence[float], instruction_set: int = BEST) -> None:
    """One step of Adam in place, with the gradient of the KL made on the way.

    Args:
        tensors: θ, its gradient from the data, Adam's two averages for it; then the same four of log σ².
        settings: the weight of the KL, β₁, β₂, √(1 − β₂ᵗ), ε, and the rates of θ and log σ² divided by 1 − β₁ᵗ.
    """
    if len(tensors) != 8 or len(settings) != 7:
        raise ArgumentError(f"Adam takes 8 tensors and 7 settings, not {len(tensors)} and {len(settings)}")
    adam = AdamStruct(*settings)
    given = door.addresses("θ gradient mean square log_σ² gradient mean square", tensors)
    theta, log_sigma2 = TrainedStruct(*given[:4]), TrainedStruct(*given[4:])
    pair = ctypes.byref(theta), ctypes.byref(log_sigma2)
    required().sparsevd_adam(*_common(instruction_set, tensors[0]), ctypes.byref(adam), *pair)


def sample_(
    gamma: Tensor, delta: Tensor, seed: int, epsilon: Tensor | None = None, instruction_set: int = BEST
) -> None:
    """γ + √δ·ε (eq. 17, 18) in place of γ, and its slope ε/(2√δ) with respect to δ in place of δ, in one pass.

    The noise comes from a counter-based generator. It depends on the seed alone: not on the number of threads, nor but
    for rounding on the vector width. It goes to `epsilon` if that is given.
    """
    tensors = (gamma, delta) if epsilon is None else (gamma, delta, epsilon)
    given = [*door.addresses("γ δ ε", tensors), None][:3]
    required().sparsevd_sample(*_common(instruction_set, gamma), seed, *given)


def fresh_seed() -> int:
    """A seed from torch's global generator, which a checkpoint keeps."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def variance(log_sigma2: Tensor, dtype: torch.dtype = torch.float32, instruction_set: int = BEST) -> Tensor:
    """σ² = exp(log σ²), in float32 or bfloat16."""
    functions = {torch.float32: required().sparsevd_exp, torch.bfloat16: required().sparsevd_exp_bf16}
    if dtype not in functions:
        raise ArgumentError(f"σ² can be made as float32 or bfloat16, not as {dtype}")
    given = door.addresses("log_σ²", [log_sigma2])
    sigma2 = torch.empty_like(log_sigma2, dtype=dtype)
    functions[dtype](*_common(instruction_set, log_sigma2), *given, sigma2.data_ptr())
    return sigma2


def times_variance_(grad_sigma2: Tensor, log_sigma2: Tensor, instruction_set: int = BEST) -> None:
    """The gradient of σ² becomes that of log σ²: times σ², in place."""
    given = door.addresses("log_σ² gradient", (log_sigma2, grad_sigma2))
    required().sparsevd_times_exp(*_common(instruction_set, log_sigma2), *given)


@functools.cache
def sgemm() -> int | None:
    """The address of the matrix product that torch itself uses, where its library shows it."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(library.sgemm_, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def shapes_fit(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the shapes are those of a fully-connected layer; torch has its own word, or way, for others."""
    if input.ndim == 0 or input.shape[-1] != weight.shape[1] or input.numel() // weight.shape[1] >= door.INT32:
        return False
    return bias is None or (bias.shape == weight.shape[:1] and door.suits(bias))


def linear_forward(
    input: Tensor, weight: Tensor, bias: Tensor | None, log_sigma2: Tensor, seed: int
) -> tuple[Tensor, Tensor]:
    """A sample of a fully-connected layer's output (eq. 17), and its slope with respect to δ, in one call."""
    layer, _kept = _layer(input, weight, log_sigma2, with_sigma2=True)
    given = None if bias is None else door.address("bias", bias, weight.shape[:1])
    output = input.new_empty(*input.shape[:-1], weight.shape[0])
    slope = torch.empty_like(output)
    common = BEST, torch.get_num_threads(), ctypes.byref(layer)
    required().sparsevd_linear_forward(*common, seed, given, output.data_ptr(), slope.data_ptr())
    return output, slope


def linear_backward(
    grad: Tensor, slope: Tensor, input: Tensor, weight: Tensor, log_sigma2: Tensor, with_bias: bool, with_input: bool
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor]:
    """The gradients of input, weight, bias and log σ²."""
    layer, _kept = _layer(input, weight, log_sigma2, with_sigma2=with_input)
    shape = (*input.shape[:-1], weight.shape[0])
    given = door.address("gradient", grad, shape), door.address("slope", slope, shape)
    grad_weight, grad_log_sigma2, delta = torch.empty_like(weight), torch.empty_like(weight), torch.empty_like(grad)
    grad_bias = weight.new_empty(weight.shape[0]) if with_bias else None
    grad_input = torch.empty_like(input) if with_input else None
    ours = (grad_weight, grad_log_sigma2, grad_bias, grad_input, delta)
    common = BEST, torch.get_num_threads(), ctypes.byref(layer)
    required().sparsevd_linear_backward(*common, *given, *map(_pointer, ours))
    return grad_input, grad_weight, grad_bias, grad_log_sigma2


def _layer(
    input: Tensor, weight: Tensor, log_sigma2: Tensor, with_sigma2: bool
) -> tuple[LinearStruct, tuple[Tensor, Tensor | None]]:
    """A fully-connected layer and its batch as C gets them, and the scratch memory that must live as long."""
    outs, ins, rows = _sizes(weight, input)
    given = (
        door.address("input", input, (*input.shape[:-1], ins)),
        door.address("weight", weight, (outs, ins)),
        door.address("log_σ²", log_sigma2, (outs, ins)),
    )
    squared, sigma2 = torch.empty_like(input), torch.empty_like(weight) if with_sigma2 else None
    scratch = squared.data_ptr(), _pointer(sigma2)
    return LinearStruct(rows, ins, outs, _sgemm(), *given, *scratch), (squared, sigma2)


def _sizes(weight: Tensor, input: Tensor) -> tuple[int, int, int]:
    """Outputs, inputs and rows of a product of matrices: none is 0, and BLAS counts each in 32 bits."""
    if weight.ndim != 2 or input.ndim < 1 or 0 in (weight.numel(), input.numel()):
        raise ArgumentError(
            f"a weight of shape {tuple(weight.shape)} and an input of shape {tuple(input.shape)} make no product"
        )
    outs, ins = weight.shape
    return door.int32("outputs", outs), door.int32("inputs", ins), door.int32("rows", input.numel() // ins)


def _sgemm() -> int:
    """The matrix product; a null pointer never reaches C."""
    found = sgemm()
    if found is None:
        raise ArgumentError("torch's library shows no sgemm here; use the layers, which then take another way")
    return found


def _pointer(tensor: Tensor | None) -> int | None:
    """Of memory that was taken here."""
    return None if tensor is None else tensor.data_ptr()


def _common(instruction_set: int, tensor: Tensor) -> tuple[int, int, int]:
    if instruction_set != BEST and not lanes(instruction_set):
        raise ArgumentError(f"this machine has no instruction set {instruction_set!r}")
    return instruction_set, torch.get_num_threads(), tensor.numel()
