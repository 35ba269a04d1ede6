"""What is looked at before C gets an address: C trusts it, so nothing passes here that it could read or write wrongly.

A tensor passes if its numbers lie in the memory of this process, of the type, in the shape and in the order that the
kernel works on. What does not is refused with an ArgumentError. Callers that have another way ask first, with `suits`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch._C import _is_tracing, _len_torch_dispatch_stack
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from sparsevd.errors import ArgumentError

CPU = torch.device("cpu")  # which torch takes sooner than its name, as it does sizes one by one than as a tuple
INT32 = 2**31  # what a size or an offset in C stays below
_PLAIN = (Tensor, torch.nn.Parameter)


def looked_on() -> bool:
    """Whether torch does more with its operations than compute them: it compiles, traces, maps over an axis (vmap),
    carries derivatives along (jvp, forward_ad) or hands them to a dispatch mode. It would not see what C does."""
    return (
        is_compiling()
        or _is_tracing()
        or maybe_current_level() is not None
        or forward_ad._current_level >= 0
        or _len_torch_dispatch_stack() > 0
    )


def readable(tensor: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether all numbers of a tensor are in memory as they are meant, one step of its strides apart."""
    # A subclass may have no memory of its own, a negated view means the numbers with the other sign.
    if type(tensor) not in _PLAIN or tensor.dtype is not dtype or not tensor.is_cpu or tensor.is_neg():
        return False
    if tensor.layout is not torch.strided:
        return False
    try:
        if tensor.data_ptr() == 0:  # zeros that were never written down, or memory that its owner gave back
            return tensor.numel() == 0
        storage = tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):  # within torch.func a tensor stands for others and has no memory
        return False
    return storage >= (tensor.storage_offset() + tensor.numel()) * dtype.itemsize


def dense(tensor: Tensor) -> bool:
    """Whether its numbers lie one after the other, in the order of its axes or as images with their channels last."""
    return tensor.is_contiguous() or (tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def suits(tensor: Tensor) -> bool:
    """Whether it is of the kind that the kernels are for, at a glance: callers that have another way for others ask."""
    return (
        type(tensor) in _PLAIN
        and tensor.dtype is torch.float32
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and dense(tensor)
    )


def plain(tensor: Tensor) -> Tensor:
    """The same numbers as float32 in memory, row by row: the tensor itself where it has them so."""
    if readable(tensor) and tensor.is_contiguous():
        return tensor
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise _refused("the tensor", tensor, "dense, with numbers in it")
    if type(tensor) in _PLAIN and tensor.is_cpu and not tensor._is_zerotensor():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        reach = (tensor.storage_offset() + last + 1) * tensor.dtype.itemsize if tensor.numel() else 0
        held = tensor.untyped_storage().nbytes()
        if held < reach:  # torch itself would read past its end
            raise ArgumentError(
                f"a tensor of shape {tuple(tensor.shape)} has only {held} bytes of memory; did its owner free it, or "
                "keep it elsewhere?"
            )
    copy = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
    copy.copy_(tensor)  # whose result would be of the tensor's own class
    return copy


def address(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
    """Where C finds a tensor of this shape, row by row."""
    if readable(tensor, dtype) and tensor.shape == shape and tensor.is_contiguous():
        return tensor.data_ptr()
    raise _refused(name, tensor, f"a contiguous {_words(dtype)} tensor of shape {tuple(shape)} on the CPU")


def addresses(names: str, tensors: Sequence[Tensor]) -> list[int]:
    """Where C finds tensors that it goes through side by side; `names` are theirs, with blanks between them."""
    shape, stride = tensors[0].shape, tensors[0].stride()
    if not dense(tensors[0]):
        raise _refused(names.split()[0], tensors[0], "contiguous, or in the order channels_last")
    for place, tensor in enumerate(tensors):
        if not readable(tensor) or tensor.shape != shape or tensor.stride() != stride:
            wanted = f"a float32 tensor of shape {tuple(shape)} and strides {stride} on the CPU"
            raise _refused(names.split()[place], tensor, wanted)
    return [tensor.data_ptr() for tensor in tensors]


def array_address(name: str, array: np.ndarray, shape: Sequence[int], dtype: np.dtype | type) -> int:
    """Where C finds an array of this shape and type, row by row."""
    if array.dtype == dtype and array.shape == tuple(shape) and array.flags.c_contiguous and array.flags.aligned:
        return int(array.ctypes.data)
    raise ArgumentError(
        f"{name} must be a contiguous array of {np.dtype(dtype).name} and shape {tuple(shape)}, "
        f"not {array.dtype.name} and {array.shape}"
    )


def int32(name: str, value: int, least: int = 0) -> int:
    """A size or an offset that C holds in 32 bits."""
    if not least <= value < INT32:
        raise ArgumentError(f"{name}: {value:,} must be at least {least} and below {INT32:,}; C counts in 32 bits here")
    return value


def _refused(name: str, tensor: Tensor, wanted: str) -> ArgumentError:
    strides = f", strides {tensor.stride()}" if tensor.layout is torch.strided else ""
    return ArgumentError(
        f"{name} must be {wanted}, not a {type(tensor).__name__} of {_words(tensor.dtype)}, shape "
        f"{tuple(tensor.shape)}{strides} on {tensor.device}"
    )


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
