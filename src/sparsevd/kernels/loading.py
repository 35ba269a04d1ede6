"""Finding and loading the compiled kernels: the types of their functions, and the instruction sets to choose from."""

import ctypes
import enum
import functools
import os
import warnings
from pathlib import Path

from sparsevd.errors import ArgumentError, SparseVDWarning
from sparsevd.kernels import openmp, structs

_POINTER, _INT, _SIZE, _SEED = ctypes.c_void_p, ctypes.c_int, ctypes.c_ssize_t, ctypes.c_uint64


class InstructionSet(enum.IntEnum):
    """enum instruction_set of kernels.h."""

    BEST = 0  # the widest of this machine
    GENERIC = 1
    AVX2 = 2
    AVX512 = 3


BEST = InstructionSet.BEST

BUILT = Path(__file__).with_name("_kernels.so")
NOT_BUILT = "this installation has no C kernels"
BUILD = (
    "Install a wheel for this platform, or install again with a C compiler; in a clone, run python setup.py build_ext "
    "--inplace --force"
)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where SPARSEVD_KERNELS=0 forbids them. Also None, with a warning that says why, where
    they were not built, do not load, or were built from sources that do not fit this Python code.

    SPARSEVD_KERNELS may also name a library built from the same sources in another way, such as with sanitisers.
    """
    chosen = os.environ.get("SPARSEVD_KERNELS", "")
    if chosen == "0":
        return None
    path = Path(chosen) if chosen else BUILT
    if not chosen and not path.exists():
        _warn(f"{NOT_BUILT}: everything works, and training takes about twice as long. {BUILD}")
        return None
    try:
        openmp.share()
        kernels = _declared(ctypes.CDLL(str(path)))
        reason = structs.difference(kernels)
    except (OSError, AttributeError) as error:  # AttributeError: a function is missing
        reason = str(error)
    if reason is None:
        return kernels
    _warn(f"the compiled kernels are not used, and everything is slower: {reason}. {BUILD}")
    return None


def _warn(sentence: str) -> None:
    warnings.warn(sentence, SparseVDWarning, stacklevel=3)


_COMMON = [_INT, _INT, _SIZE]  # instruction set, threads, how many numbers
_RUN: list[type] = [_INT, _INT, _POINTER, _SIZE, _POINTER, _POINTER, _POINTER]
_FUNCTIONS: dict[str, tuple[list[type], type | None]] = {
    "lanes": ([_INT], _INT),
    "blocks": ([_SIZE], _SIZE),
    "kl": ([*_COMMON, *[_POINTER] * 5], ctypes.c_double),
    "adam": ([*_COMMON, _POINTER, _POINTER, _POINTER], None),
    "sample": ([*_COMMON, _SEED, *[_POINTER] * 3], None),
    "exp": ([*_COMMON, _POINTER, _POINTER], None),
    "exp_bf16": ([*_COMMON, _POINTER, _POINTER], None),
    "times_exp": ([*_COMMON, _POINTER, _POINTER], None),
    "linear_forward": ([_INT, _INT, _POINTER, _SEED, *[_POINTER] * 3], None),
    "linear_backward": ([_INT, _INT, *[_POINTER] * 8], None),
    "sparse_scratch": ([_POINTER], _SIZE),
    "sparse_run": (_RUN, None),
    "plan_run": (_RUN, None),
    "coder_open": ([_POINTER, _SIZE, _POINTER], _POINTER),
    "coder_learn": ([_POINTER, _POINTER, _SIZE], None),
    "coder_prime_from": ([_POINTER, _POINTER], None),
    "coder_bytes": ([_POINTER, _POINTER, _SIZE], _INT),
    "coder_matrix": ([_POINTER, _POINTER, *[_SIZE] * 4, _POINTER, _INT], _INT),
    "coder_account": ([_POINTER, _POINTER], None),
    "coder_finish": ([_POINTER], _SIZE),
    "coder_written": ([_POINTER], _POINTER),
    "coder_close": ([_POINTER], None),
}


def _declared(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the types of its functions."""
    for name, (arguments, result) in _FUNCTIONS.items():
        function = getattr(kernels, f"sparsevd_{name}")
        function.argtypes, function.restype = arguments, result
    return kernels


def required() -> ctypes.CDLL:
    """The same where there is no other way."""
    kernels = library()
    if kernels is None:
        raise ArgumentError(f"the C kernels are not in use here, and this works with them only. {BUILD}")
    return kernels


@functools.cache
def lanes(instruction_set: int = BEST) -> int:
    """Numbers in a register of this instruction set; 0 if the machine does not have it, or without the kernels."""
    kernels = library()
    return int(kernels.sparsevd_lanes(instruction_set)) if kernels else 0


def instruction_sets() -> list[InstructionSet]:
    """Those of this machine by name, the narrowest first."""
    return [one for one in InstructionSet if one is not BEST and lanes(one)]
