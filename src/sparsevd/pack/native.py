"""The door to `kernels/pack.c`, and the choice between it and its Python twin."""

import ctypes
import functools
from typing import Protocol

import numpy as np

from sparsevd import kernels
from sparsevd.errors import FormatError, WriteError
from sparsevd.pack.symbols import Matrix, PythonCoder

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_ssize_t


class Coder(Protocol):
    """The four things a file is made of; a decoder fills what it is given."""

    def prime(self, known: bytes) -> None: ...
    def code_bytes(self, data: bytearray) -> None: ...
    def code_matrix(self, values: Matrix, width: int, plane: int, hint: Matrix | None, mantissa: int) -> None: ...
    def account(self) -> tuple[float, float]: ...
    def finish(self) -> bytes: ...
    def close(self) -> None: ...


def coder(data: bytes | None = None) -> Coder:
    """An encoder, or a decoder of this data: in C where that was built."""
    return NativeCoder(data) if _library() is not None else PythonCoder(data)


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = kernels.library()
    if library is None:
        return None
    try:
        signatures = {
            "open": ([_POINTER, _SIZE, _POINTER], _POINTER),
            "prime": ([_POINTER, _POINTER, _SIZE], None),
            "learn_from": ([_POINTER, _POINTER], None),
            "bytes": ([_POINTER, _POINTER, _SIZE], ctypes.c_int),
            "matrix": ([_POINTER, _POINTER, *[_SIZE] * 4, _POINTER, ctypes.c_int], ctypes.c_int),
            "account": ([_POINTER, _POINTER], None),
            "finish": ([_POINTER], _SIZE),
            "written": ([_POINTER], _POINTER),
            "close": ([_POINTER], None),
        }
        for name, (arguments, result) in signatures.items():
            function = getattr(library, f"sparsevd_pack_{name}")
            function.argtypes, function.restype = arguments, result
    except AttributeError:  # built from other sources than these
        return None
    return library


@functools.cache
def _prices() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Bits of a decision by its probability, of 4096."""
    return np.asarray(-np.log2((np.arange(4096) + 0.5) / 4096), dtype=np.float32)


def _checked(array: Matrix) -> Matrix:
    """What C takes: int32 in one piece."""
    assert array.dtype == np.int32
    assert array.flags.c_contiguous
    return array


class NativeCoder:
    """The coder in C. It holds memory of its own until `close`."""

    def __init__(self, data: bytes | None = None):
        library = _library()
        assert library is not None
        self._library = library
        self._data = data  # C reads it in place
        prices = _prices().ctypes.data if data is None else None
        self._state = library.sparsevd_pack_open(data, len(data or b""), prices)
        if not self._state:
            raise MemoryError("no memory for the coder")

    def close(self) -> None:
        if self._state:
            self._library.sparsevd_pack_close(self._state)
            self._state = None

    def prime(self, known: bytes) -> None:
        self._library.sparsevd_pack_learn_from(self._state, _primed(known)._state)

    def code_bytes(self, data: bytearray) -> None:
        view = (ctypes.c_char * len(data)).from_buffer(data)
        self._check(self._library.sparsevd_pack_bytes(self._state, view, len(data)))

    def code_matrix(self, values: Matrix, width: int, plane: int, hint: Matrix | None, mantissa: int) -> None:
        values = _checked(values)
        if hint is not None:
            assert len(_checked(hint)) == values.shape[1]
        pointer = None if hint is None else hint.ctypes.data
        self._check(
            self._library.sparsevd_pack_matrix(
                self._state, values.ctypes.data, *values.shape, width, plane, pointer, mantissa
            )
        )

    def account(self) -> tuple[float, float]:
        bits = (ctypes.c_double * 2)()
        self._library.sparsevd_pack_account(self._state, bits)
        return bits[0], bits[1]

    def finish(self) -> bytes:
        size = self._library.sparsevd_pack_finish(self._state)
        if size < 0:
            raise WriteError("the model could not be coded: no memory")
        return ctypes.string_at(self._library.sparsevd_pack_written(self._state), size) if size else b""

    def learn(self, known: bytes) -> "NativeCoder":
        """Learn from bytes, one by one; `prime` has what was learned before."""
        copy = ctypes.create_string_buffer(known, len(known))
        self._library.sparsevd_pack_prime(self._state, copy, len(known))
        return self

    def _check(self, failed: int) -> None:
        if failed and self._data is None:
            raise WriteError("the model could not be coded: no memory, or a number beyond 2³⁰ steps")
        if failed:
            raise FormatError("it promises more or larger numbers than its bytes can hold")


@functools.cache
def _primed(known: bytes) -> NativeCoder:
    """A coder that knows these bytes, kept: learning them anew would take longer than reading a small file."""
    return NativeCoder().learn(known)
