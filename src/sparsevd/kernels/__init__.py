"""The C kernels: plain C behind a C ABI. Only the modules of this package call it, and all that they hand over has
passed `door`.

`training` has the fused kernels of training, `inference` and `program` sparse layers and networks, `coder` the model
file's coder. All but the last work on dense float32 tensors on the CPU; `can_take` says which. For everything else
callers have torch's way: no compiler at installation, another device, another type. Also under torch.compile,
torch.export, torch.jit.trace and torch.func, which see torch's operations only.
"""

from torch import Tensor

from sparsevd.kernels import door
from sparsevd.kernels.loading import BEST, InstructionSet, instruction_sets, lanes, library
from sparsevd.kernels.training import (
    adam_step_,
    fresh_seed,
    kl,
    kl_with_gradients,
    linear_backward,
    linear_forward,
    sample_,
    sgemm,
    shapes_fit,
    times_variance_,
    variance,
)

__all__ = [
    "BEST",
    "InstructionSet",
    "adam_step_",
    "available",
    "can_take",
    "can_take_pair",
    "fresh_seed",
    "instruction_sets",
    "kl",
    "kl_with_gradients",
    "lanes",
    "library",
    "linear_backward",
    "linear_forward",
    "sample_",
    "sgemm",
    "shapes_fit",
    "times_variance_",
    "variance",
]


def available() -> bool:
    """Whether the compiled kernels are in use; without them everything works, and training is slower."""
    return library() is not None


def can_take(*tensors: Tensor) -> bool:
    """Whether the kernels can take these: float32 numbers in the memory of this machine, one after the other."""
    return not door.looked_on() and available() and all(map(door.suits, tensors))


def can_take_pair(theta: Tensor, log_sigma2: Tensor) -> bool:
    """Whether the kernels can go through both at once: they can take them, and both have the same shape and order."""
    same = theta.shape == log_sigma2.shape and theta.stride() == log_sigma2.stride()
    return same and can_take(theta, log_sigma2)
