"""The C kernels: plain C behind a C ABI. Only the modules of this package call it, and all that they hand over has
passed `door`.

Here are the fused training kernels; `inference` has the sparse layers and networks, `coder` the model file's coder.
They take dense float32 tensors on the CPU, as `take` tells; everywhere else (no compiler at installation, another
device, another type) the equations in torch are used. Under torch.compile and torch.export too, since the compiler
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

from sparsevd.errors import ArgumentError
from sparsevd.kernels import door

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
    kernels.sparsevd_sparse_lanes.argtypes, kernels.sparsevd_sparse_lanes.restype = [_INT], _INT
    kernels.sparsevd_sparse_scratch.argtypes, kernels.sparsevd_sparse_scratch.restype = [_POINTER], _SIZE
    for run in (kernels.sparsevd_sparse_run, kernels.sparsevd_plan_run):
        run.argtypes, run.restype = [_INT, _INT, _POINTER, _SIZE, _POINTER, _POINTER, _POINTER], None
    coder: dict[str, tuple[list[type], type | None]] = {
        "open": ([_POINTER, _SIZE, _POINTER], _POINTER),
        "prime": ([_POINTER, _POINTER, _SIZE], None),
        "learn_from": ([_POINTER, _POINTER], None),
        "bytes": ([_POINTER, _POINTER, _SIZE], _INT),
        "matrix": ([_POINTER, _POINTER, *[_SIZE] * 4, _POINTER, _INT], _INT),
        "account": ([_POINTER, _POINTER], None),
        "finish": ([_POINTER], _SIZE),
        "written": ([_POINTER], _POINTER),
        "close": ([_POINTER], None),
    }
    for name, (arguments, result) in coder.items():
        function = getattr(kernels, f"sparsevd_pack_{name}")
        function.argtypes, function.restype = arguments, result
    return kernels


def available() -> bool:
    """Whether the compiled kernels are in use; without them everything works, and training is slower."""
    return library() is not None


def supports(instruction_set: int) -> bool:
    """Whether this machine has the instruction set of this number."""
    kernels = library()
    return kernels is not None and bool(kernels.sparsevd_supports(instruction_set))


def take(*tensors: Tensor) -> bool:
    """Whether the kernels can take these: float32 numbers in the memory of this machine, one after the other."""
    return not torch.compiler.is_compiling() and available() and all(map(door.suits, tensors))


def take_side_by_side(theta: Tensor, log_sigma2: Tensor) -> bool:
    """Whether the kernels can go through both at once: they can take them, and both have the same shape and order."""
    same = theta.shape == log_sigma2.shape and theta.stride() == log_sigma2.stride()
    return same and take(theta, log_sigma2)


def kl(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The KL (eq. 14) summed over pairs (θ, log σ²) of tensors of weights, in one pass with all its gradients.

    All of a model's layers in one call: on a small network a call costs as much as the work.
    """
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
    kernels = _library()
    gradients = [torch.empty_like(tensor) for tensor in flat]
    sums = torch.empty(kernels.sparsevd_blocks(max(t.numel() for t in flat)), dtype=torch.float64, device="cpu")
    value = 0.0
    for i in range(0, len(flat), 2):
        given = door.addresses("θ log_σ²", flat[i : i + 2])
        ours = [tensor.data_ptr() for tensor in (*gradients[i : i + 2], sums)]
        value += kernels.sparsevd_kl(*_common(instruction_set, flat[i]), *given, *ours)
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
    adam = (ctypes.c_float * 7)(*settings)
    given = door.addresses("θ gradient mean square log_σ² gradient mean square", tensors)
    _library().sparsevd_adam(*_common(instruction_set, tensors[0]), adam, *given)


def sample_(
    gamma: Tensor, delta: Tensor, seed: int, epsilon: Tensor | None = None, instruction_set: int = BEST
) -> None:
    """γ + √δ·ε (eq. 17, 18) in place of γ, and its slope ε/(2√δ) with respect to δ in place of δ, in one pass.

    The noise comes from a counter-based generator. It depends on the seed alone: not on the number of threads, nor but
    for rounding on the vector width. It goes to `epsilon` if that is given.
    """
    tensors = (gamma, delta) if epsilon is None else (gamma, delta, epsilon)
    given = [*door.addresses("γ δ ε", tensors), None][:3]
    _library().sparsevd_sample(*_common(instruction_set, gamma), seed, *given)


def fresh_seed() -> int:
    """A seed from torch's global generator, which a checkpoint keeps."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def variance(log_sigma2: Tensor, dtype: torch.dtype = torch.float32, instruction_set: int = BEST) -> Tensor:
    """σ² = exp(log σ²), in float32 or bfloat16."""
    functions = {torch.float32: _library().sparsevd_exp, torch.bfloat16: _library().sparsevd_exp_bf16}
    if dtype not in functions:
        raise ArgumentError(f"σ² can be made as float32 or bfloat16, not as {dtype}")
    given = door.addresses("log_σ²", [log_sigma2])
    sigma2 = torch.empty_like(log_sigma2, dtype=dtype)
    functions[dtype](*_common(instruction_set, log_sigma2), *given, sigma2.data_ptr())
    return sigma2


def times_variance_(grad_sigma2: Tensor, log_sigma2: Tensor, instruction_set: int = BEST) -> None:
    """The gradient of σ² becomes that of log σ²: times σ², in place."""
    given = door.addresses("log_σ² gradient", (log_sigma2, grad_sigma2))
    _library().sparsevd_times_exp(*_common(instruction_set, log_sigma2), *given)


@functools.cache
def sgemm() -> int | None:
    """The address of the matrix product that torch itself uses, where its library shows it."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(library.sgemm_, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def fit_together(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the shapes are those of a fully-connected layer; torch has its own word, or way, for others."""
    if input.ndim == 0 or input.shape[-1] != weight.shape[1] or input.numel() // weight.shape[1] >= door.INT32:
        return False
    return bias is None or (bias.shape == weight.shape[:1] and door.suits(bias))


def linear_forward(
    input: Tensor, weight: Tensor, bias: Tensor | None, log_sigma2: Tensor, seed: int
) -> tuple[Tensor, Tensor]:
    """A sample of a fully-connected layer's output (eq. 17), and its slope with respect to δ, in one call."""
    outs, ins, rows = _sizes(weight, input)
    given = [
        door.address("input", input, (*input.shape[:-1], ins)),
        door.address("weight", weight, (outs, ins)),
        door.address("log_σ²", log_sigma2, (outs, ins)),
        None if bias is None else door.address("bias", bias, (outs,)),
    ]
    output = input.new_empty(*input.shape[:-1], outs)
    slope, squared, sigma2 = torch.empty_like(output), torch.empty_like(input), torch.empty_like(weight)
    ours = (output, slope, squared, sigma2)
    common = (BEST, torch.get_num_threads(), rows)
    _library().sparsevd_linear_forward(*common, seed, ins, outs, _sgemm(), *given, *map(_pointer, ours))
    return output, slope


def linear_backward(
    grad: Tensor, slope: Tensor, input: Tensor, weight: Tensor, log_sigma2: Tensor, with_bias: bool, with_input: bool
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor]:
    """The gradients of input, weight, bias and log σ²."""
    outs, ins, rows = _sizes(weight, input)
    given = [
        door.address("gradient", grad, (*input.shape[:-1], outs)),
        door.address("slope", slope, (*input.shape[:-1], outs)),
        door.address("input", input, (*input.shape[:-1], ins)),
        door.address("weight", weight, (outs, ins)),
        door.address("log_σ²", log_sigma2, (outs, ins)),
    ]
    grad_weight, grad_log_sigma2 = torch.empty_like(weight), torch.empty_like(weight)
    grad_bias = weight.new_empty(outs) if with_bias else None
    grad_input, sigma2 = (torch.empty_like(input), torch.empty_like(weight)) if with_input else (None, None)
    delta, squared = torch.empty_like(grad), torch.empty_like(input)
    ours = (grad_weight, grad_log_sigma2, grad_bias, grad_input, delta, squared, sigma2)
    common = (BEST, torch.get_num_threads(), rows)
    _library().sparsevd_linear_backward(*common, ins, outs, _sgemm(), *given, *map(_pointer, ours))
    return grad_input, grad_weight, grad_bias, grad_log_sigma2


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


def _library() -> ctypes.CDLL:
    kernels = library()
    if kernels is None:
        raise ArgumentError("the C kernels are not built; install with a C compiler")
    return kernels


def _common(instruction_set: int, tensor: Tensor) -> tuple[int, int, int]:
    if instruction_set != BEST and not supports(instruction_set):
        raise ArgumentError(f"this machine has no instruction set {instruction_set}")
    return instruction_set, torch.get_num_threads(), tensor.numel()
