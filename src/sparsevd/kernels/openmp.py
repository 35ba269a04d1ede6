"""One OpenMP for torch and the kernels.

torch brings an OpenMP runtime of its own, under a name that differs between its builds. With a second one in the
process the threads of one would spin in the way of the other's. So on Linux the compiled kernels name no runtime: they
take what is visible when they are loaded, and that is torch's. No other one need be installed.
"""

import ctypes
import os
import re
import sys
from pathlib import Path

import torch

_RUNTIME = re.compile(r"lib(gomp|iomp5|omp)[-.]")
_FUNCTION = "GOMP_parallel"  # GCC's entry, which LLVM's and Intel's runtimes have too
_USUAL = "libgomp.so.1"


class _Symbol(ctypes.Structure):
    """Dl_info of dlfcn.h: where the code at an address comes from."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def share() -> None:
    """Make torch's runtime visible to what is loaded next; or the system's, if torch has none."""
    if sys.platform == "linux":  # elsewhere setup.py links the kernels with a runtime
        ctypes.CDLL(of_torch() or _USUAL, mode=ctypes.RTLD_GLOBAL)


def of_torch() -> str | None:
    """The file of the runtime that torch computes with, where that can be found out."""
    return _file_of(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")


def of_kernels() -> str | None:
    """The same of the kernels, or of whatever else asks for a runtime without naming one."""
    return _file_of(None)


def loaded() -> list[str] | None:
    """The files of all runtimes in this process; None where the system does not say."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    files = {line.split(maxsplit=5)[5] for line in lines if line.count("/") and len(line.split(maxsplit=5)) == 6}
    return sorted(file for file in files if _RUNTIME.match(os.path.basename(file)))


def _file_of(library: Path | None) -> str | None:
    """Where a library, or None for what is visible to all, finds OpenMP's functions."""
    found = _Symbol()
    try:
        address = ctypes.cast(getattr(ctypes.CDLL(str(library) if library else None), _FUNCTION), ctypes.c_void_p)
        dladdr = ctypes.CDLL(None).dladdr
    except (OSError, AttributeError, TypeError):  # TypeError: Windows has no None
        return None
    dladdr.argtypes, dladdr.restype = [ctypes.c_void_p, ctypes.POINTER(_Symbol)], ctypes.c_int
    return os.fsdecode(found.file) if dladdr(address, ctypes.byref(found)) and found.file else None
