"""Finding and loading the compiled kernels: the types of their functions, and the instruction sets to choose from."""

import ctypes
import enum
import functools
import os
from pathlib import Path

import torch

from sparsevd.errors import ArgumentError

_POINTER, _INT, _SIZE, _SEED = ctypes.c_void_p, ctypes.c_int, ctypes.c_ssize_t, ctypes.c_uint64


class InstructionSet(enum.IntEnum):
    """enum instruction_set of kernels.h."""

    BEST = 0  # the widest of this machine
    GENERIC = 1
    AVX2 = 2
    AVX512 = 3


BEST = InstructionSet.BEST


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
    kernels.sparsevd_lanes.argtypes, kernels.sparsevd_lanes.restype = [_INT], _INT
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


def required() -> ctypes.CDLL:
    """The same where there is no other way."""
    kernels = library()
    if kernels is None:
        raise ArgumentError("the C kernels are not built; install with a C compiler")
    return kernels


@functools.cache
def lanes(instruction_set: int = BEST) -> int:
    """Numbers in a register of this instruction set; 0 if the machine does not have it, or without the kernels."""
    kernels = library()
    return int(kernels.sparsevd_lanes(instruction_set)) if kernels else 0


def instruction_sets() -> list[InstructionSet]:
    """Those of this machine by name, the narrowest first."""
    return [one for one in InstructionSet if one is not BEST and lanes(one)]
