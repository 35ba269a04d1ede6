"""The fused training kernels: plain C behind a C ABI, and one thin door to it.

They take dense float32 tensors on the CPU, as `fit` tells; everywhere else (no compiler at installation, another
device, another type) the way of `functional` is taken. Under torch.compile and torch.export too, since the compiler
fuses those operations by itself.
"""

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsevd import functional

_POINTER, _INT, _SIZE, _SEED = ctypes.c_void_p, ctypes.c_int, ctypes.c_ssize_t, ctypes.c_uint64
BEST = 0  # the widest instruction set of this machine; kernels.c numbers them


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they were not built or do not load, or SPARSEVD_KERNELS=0 forbids them.

    SPARSEVD_KERNELS may also name a library built from the same sources in another way, such as with sanitisers.
    """
    chosen = os.environ.get("SPARSEVD_KERNELS", "")
    if chosen == "0":
        return None
    built = [path for path in Path(__file__).parent.glob("_kernels*") if path.suffix in (".so", ".pyd", ".dylib")]
    found = [Path(chosen)] if chosen else built
    if not found:
        return None
    try:
        # torch's own OpenMP first and for all: with two of them the threads of one would spin in the way of the other.
        for runtime in Path(torch.__file__).parent.glob("lib/libgomp*"):
            ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
        return _declared(ctypes.CDLL(str(found[0])))
    except (OSError, AttributeError):  # AttributeError: built from other sources than these
        return None


def _declared(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the types of its functions."""
    common = [_INT, _INT, _SIZE]  # instruction set, threads, how many numbers
    kernels.sparsevd_blocks.argtypes, kernels.sparsevd_blocks.restype = [_SIZE], _SIZE
    kernels.sparsevd_kl.argtypes, kernels.sparsevd_kl.restype = [*common, *[_POINTER] * 5], ctypes.c_double
    kernels.sparsevd_adam.argtypes, kernels.sparsevd_adam.restype = [*common, *[_POINTER] * 9], None
    kernels.sparsevd_sample.argtypes, kernels.sparsevd_sample.restype = [*common, _SEED, *[_POINTER] * 3], None
    for name in ("sparsevd_exp", "sparsevd_exp_bf16", "sparsevd_times_exp"):
        function = getattr(kernels, name)
        function.argtypes, function.restype = [*common, _POINTER, _POINTER], None
    kernels.sparsevd_linear_forward.argtypes = [*common, _SEED, _INT, _INT, *[_POINTER] * 9]
    kernels.sparsevd_linear_backward.argtypes = [*common, _INT, _INT, *[_POINTER] * 13]
    kernels.sparsevd_linear_forward.restype = kernels.sparsevd_linear_backward.restype = None
    kernels.sparsevd_supports.argtypes, kernels.sparsevd_supports.restype = [_INT], _INT
    return kernels


def available() -> bool:
    """Whether the compiled kernels are in use; without them everything works, and training is slower."""
    return library() is not None


def fit(*tensors: Tensor) -> bool:
    """Whether the kernels can take these: float32 numbers in the memory of this machine, one after the other."""
    if torch.compiler.is_compiling() or not available():
        return False
    for t in tensors:
        if type(t) not in (Tensor, torch.nn.Parameter):  # a subclass may have no memory of its own
            return False
        if t.dtype is not torch.float32 or t.device.type != "cpu":
            return False
        if not t.is_contiguous() and not (t.ndim == 4 and t.is_contiguous(memory_format=torch.channels_last)):
            return False
    return True


def kl(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The KL (eq. 14) summed over pairs (θ, log σ²) of tensors of weights, in one pass with all its gradients.

    All of a model's layers in one call: on a small network a call costs as much as the work.
    """
    flat = [tensor for pair in pairs for tensor in pair]
    if fit(*flat) and all(theta.stride() == log_sigma2.stride() for theta, log_sigma2 in pairs):
        return _KL.apply(*flat)  # type: ignore[no-any-return,no-untyped-call]
    terms = [functional.kl(theta, log_sigma2) for theta, log_sigma2 in pairs]
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


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
    kernels = _library()
    gradients = [torch.empty_like(tensor) for tensor in flat]
    sums = torch.empty(kernels.sparsevd_blocks(max(t.numel() for t in flat)), dtype=torch.float64, device="cpu")
    value = 0.0
    for i in range(0, len(flat), 2):
        pointers = [tensor.data_ptr() for tensor in (*flat[i : i + 2], *gradients[i : i + 2], sums)]
        value += kernels.sparsevd_kl(*_common(instruction_set, flat[i]), *pointers)
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
    adam = (ctypes.c_float * 7)(*settings)
    _library().sparsevd_adam(*_common(instruction_set, tensors[0]), adam, *map(_pointer, tensors))


def sample_(
    gamma: Tensor, delta: Tensor, seed: int, epsilon: Tensor | None = None, instruction_set: int = BEST
) -> None:
    """γ + √δ·ε (eq. 17, 18) in place of γ, and its slope ε/(2√δ) with respect to δ in place of δ, in one pass.

    The noise comes from a counter-based generator. It depends on the seed alone: not on the number of threads, nor but
    for rounding on the vector width. It goes to `epsilon` if that is given.
    """
    _library().sparsevd_sample(*_common(instruction_set, gamma), seed, *map(_pointer, (gamma, delta, epsilon)))


def fresh_seed() -> int:
    """A seed from torch's global generator, which a checkpoint keeps."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def variance(log_sigma2: Tensor, dtype: torch.dtype = torch.float32, instruction_set: int = BEST) -> Tensor:
    """σ² = exp(log σ²), in float32 or bfloat16."""
    sigma2 = torch.empty_like(log_sigma2, dtype=dtype)
    exp = _library().sparsevd_exp_bf16 if dtype == torch.bfloat16 else _library().sparsevd_exp
    exp(*_common(instruction_set, log_sigma2), log_sigma2.data_ptr(), sigma2.data_ptr())
    return sigma2


def times_variance_(grad_sigma2: Tensor, log_sigma2: Tensor, instruction_set: int = BEST) -> None:
    """The gradient of σ² becomes that of log σ²: times σ², in place."""
    pointers = (log_sigma2.data_ptr(), grad_sigma2.data_ptr())
    _library().sparsevd_times_exp(*_common(instruction_set, log_sigma2), *pointers)


@functools.cache
def sgemm() -> int | None:
    """The address of the matrix product that torch itself uses, where its library shows it."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(library.sgemm_, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def linear_forward(
    input: Tensor, weight: Tensor, bias: Tensor | None, log_sigma2: Tensor, seed: int
) -> tuple[Tensor, Tensor]:
    """A sample of a fully-connected layer's output (eq. 17), and its slope with respect to δ, in one call."""
    outs, ins = weight.shape
    output = input.new_empty(*input.shape[:-1], outs)
    slope, squared, sigma2 = torch.empty_like(output), torch.empty_like(input), torch.empty_like(weight)
    tensors = (input, weight, log_sigma2, bias, output, slope, squared, sigma2)
    common = (BEST, torch.get_num_threads(), input.numel() // ins)
    _library().sparsevd_linear_forward(*common, seed, ins, outs, sgemm(), *map(_pointer, tensors))
    return output, slope


def linear_backward(
    grad: Tensor, slope: Tensor, input: Tensor, weight: Tensor, log_sigma2: Tensor, with_bias: bool, with_input: bool
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor]:
    """The gradients of input, weight, bias and log σ²."""
    outs, ins = weight.shape
    grad_weight, grad_log_sigma2 = torch.empty_like(weight), torch.empty_like(weight)
    grad_bias = weight.new_empty(outs) if with_bias else None
    grad_input, sigma2 = (torch.empty_like(input), torch.empty_like(weight)) if with_input else (None, None)
    delta, squared = torch.empty_like(grad), torch.empty_like(input)
    gradients = (grad_weight, grad_log_sigma2, grad_bias, grad_input)
    tensors = (grad, slope, input, weight, log_sigma2, *gradients, delta, squared, sigma2)
    common = (BEST, torch.get_num_threads(), input.numel() // ins)
    _library().sparsevd_linear_backward(*common, ins, outs, sgemm(), *map(_pointer, tensors))
    return grad_input, grad_weight, grad_bias, grad_log_sigma2


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _library() -> ctypes.CDLL:
    kernels = library()
    assert kernels is not None
    return kernels


def _common(instruction_set: int, tensor: Tensor) -> tuple[int, int, int]:
    return instruction_set, torch.get_num_threads(), tensor.numel()
