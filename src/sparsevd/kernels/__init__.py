"""The fused training kernels: plain C behind a C ABI, and one thin door to it.

`kl` and `noisy_output` take the C way for contiguous float32 tensors on the CPU and the way of `functional` everywhere
else: no compiler at installation, another device, another type. Under torch.compile and torch.export they take the
latter too, since the compiler fuses those operations by itself.
"""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsevd import functional

_POINTER, _INT, _SIZE, _SEED = ctypes.c_void_p, ctypes.c_int, ctypes.c_ssize_t, ctypes.c_uint64
BEST = 0  # the widest instruction set of this machine; kernels.c numbers them


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they were not built or do not load."""
    found = [path for path in Path(__file__).parent.glob("_kernels*") if path.suffix in (".so", ".pyd", ".dylib")]
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
    kernels.sparsevd_kl_blocks.argtypes, kernels.sparsevd_kl_blocks.restype = [_SIZE], _SIZE
    kernels.sparsevd_kl.argtypes, kernels.sparsevd_kl.restype = [_INT, _INT, _SIZE, *[_POINTER] * 5], ctypes.c_double
    kernels.sparsevd_noise_forward.argtypes = [_INT, _INT, _SIZE, _SEED, *[_POINTER] * 4]
    kernels.sparsevd_noise_forward.restype = None
    kernels.sparsevd_noise_backward.argtypes = [_INT, _INT, _SIZE, _SEED, *[_POINTER] * 3]
    kernels.sparsevd_noise_backward.restype = None
    kernels.sparsevd_supports.argtypes, kernels.sparsevd_supports.restype = [_INT], _INT
    return kernels


def available() -> bool:
    """Whether the compiled kernels are in use; without them everything works, and training is slower."""
    return library() is not None


def _fits(*tensors: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors)  # a subclass may have no memory of its own
        and all(t.device.type == "cpu" and t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
        and available()
    )


def kl(theta: Tensor, log_sigma2: Tensor) -> Tensor:
    """`functional.kl`: the KL of all weights (eq. 14), in one pass with both its gradients."""
    if not _fits(theta, log_sigma2):
        return functional.kl(theta, log_sigma2)
    return _KL.apply(theta, log_sigma2)  # type: ignore[no-any-return,no-untyped-call]


def noisy_output(gamma: Tensor, delta: Tensor) -> Tensor:
    """`functional.noisy_output` with fresh noise: γ + √δ·ε, in one pass that draws ε too (eq. 17, 18).

    The noise comes from a counter-based generator whose seed torch's own generator gives. It does not depend on
    the number of threads, nor but for rounding on the vector width, and the backward pass makes it again.
    """
    if not _fits(gamma, delta):
        return functional.noisy_output(gamma, delta, torch.randn_like(delta))
    return _NoisyOutput.apply(gamma, delta, fresh_seed())  # type: ignore[no-any-return,no-untyped-call]


def fresh_seed() -> int:
    """A seed from torch's global generator, which a checkpoint keeps."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


class _KL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, theta: Tensor, log_sigma2: Tensor) -> Tensor:
        value, grad_theta, grad_log_sigma2 = kl_with_gradients(theta, log_sigma2)
        ctx.save_for_backward(grad_theta, grad_log_sigma2)
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        grad_theta, grad_log_sigma2 = ctx.saved_tensors
        return grad_theta * grad, grad_log_sigma2 * grad


def kl_with_gradients(theta: Tensor, log_sigma2: Tensor, instruction_set: int = BEST) -> tuple[Tensor, Tensor, Tensor]:
    """The summed KL and its gradients with respect to θ and log σ²."""
    kernels = library()
    assert kernels is not None
    grad_theta, grad_log_sigma2 = torch.empty_like(theta), torch.empty_like(log_sigma2)
    sums = torch.empty(kernels.sparsevd_kl_blocks(theta.numel()), dtype=torch.float64, device="cpu")
    tensors = (theta, log_sigma2, grad_theta, grad_log_sigma2, sums)
    pointers = [tensor.data_ptr() for tensor in tensors]
    value = kernels.sparsevd_kl(instruction_set, torch.get_num_threads(), theta.numel(), *pointers)
    return torch.tensor(value, dtype=torch.float32, device="cpu"), grad_theta, grad_log_sigma2


class _NoisyOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gamma: Tensor, delta: Tensor, seed: int) -> Tensor:
        ctx.save_for_backward(delta)
        ctx.seed = seed
        return add_noise(gamma, delta, seed)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (delta,) = ctx.saved_tensors
        return grad, noise_gradient(grad.contiguous(), delta, ctx.seed), None


def add_noise(
    gamma: Tensor, delta: Tensor, seed: int, epsilon: Tensor | None = None, instruction_set: int = BEST
) -> Tensor:
    """γ + √δ·ε with the noise of this seed, which goes to `epsilon` if that is given."""
    kernels = library()
    assert kernels is not None
    out = torch.empty_like(gamma)
    pointers = [tensor.data_ptr() if tensor is not None else None for tensor in (gamma, delta, out, epsilon)]
    kernels.sparsevd_noise_forward(instruction_set, torch.get_num_threads(), gamma.numel(), seed, *pointers)
    return out


def noise_gradient(grad: Tensor, delta: Tensor, seed: int, instruction_set: int = BEST) -> Tensor:
    """The gradient with respect to δ, with the same noise made again."""
    kernels = library()
    assert kernels is not None
    grad_delta = torch.empty_like(delta)
    pointers = [tensor.data_ptr() for tensor in (grad, delta, grad_delta)]
    kernels.sparsevd_noise_backward(instruction_set, torch.get_num_threads(), grad.numel(), seed, *pointers)
    return grad_delta
