"""The door to the adaptive coder of the model file in C, `coder.c`."""

import ctypes
import functools
import weakref

import numpy as np
from numpy.typing import NDArray

from sparsevd.errors import ArgumentError, FormatError, WriteError
from sparsevd.kernels import door
from sparsevd.kernels.loading import required

Matrix = NDArray[np.int32]
MANTISSA_BITS = 23  # of a float32; -1 stands for integers


@functools.cache
def _prices() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Bits of a decision by its probability, of 4096."""
    return np.asarray(-np.log2((np.arange(4096) + 0.5) / 4096), dtype=np.float32)


class NativeCoder:
    """The coder in C: an encoder without `data`, else a decoder of it. It holds a megabyte of its own until `close`."""

    def __init__(self, data: bytes | None = None):
        library = required()
        if not isinstance(data, bytes | None):
            raise ArgumentError(f"the coder reads bytes, which stay as they are, not {type(data).__name__}")
        self._library = library
        self._data = data  # C reads it in place
        prices = _prices().ctypes.data if data is None else None
        self._address: int | None = library.sparsevd_coder_open(data, len(data or b""), prices)
        if not self._address:
            raise MemoryError("no memory for the coder")
        # Also when it is forgotten.
        self._give_back = weakref.finalize(self, library.sparsevd_coder_close, self._address)

    @property
    def _state(self) -> int:
        if self._address is None:
            raise ArgumentError("the coder was closed; open another one")
        return self._address

    def close(self) -> None:
        self._give_back()
        self._address = None

    def prime(self, known: bytes) -> None:
        """Know what these bytes teach; they are learned once for all coders."""
        self._library.sparsevd_coder_prime_from(self._state, _primed(known)._state)

    def code_bytes(self, data: bytearray) -> None:
        view = (ctypes.c_char * len(data)).from_buffer(data)
        self._check(self._library.sparsevd_coder_bytes(self._state, view, len(data)))

    def code_matrix(self, values: Matrix, width: int, plane: int, hint: Matrix | None, mantissa: int) -> None:
        if values.ndim != 2 or (self._data is not None and not values.flags.writeable):
            raise ArgumentError(f"values of shape {values.shape} must be a matrix, and one that a decoder can write to")
        if values.size == 0:  # there is nothing to code, nor any place in it
            return
        rows, columns = values.shape
        if not (0 <= width <= columns and 0 <= plane <= columns and -1 <= mantissa <= MANTISSA_BITS):
            raise ArgumentError(
                f"width={width} and plane={plane} must lie between 0 and the {columns} columns, and "
                f"mantissa={mantissa} between -1 and {MANTISSA_BITS}"
            )
        if hint is not None and (hint < 0).any():
            raise ArgumentError("the hint counts numbers, and none of its counts may be negative")
        addresses = [
            door.array_address("values", values, (rows, columns), np.int32),
            None if hint is None else door.array_address("hint", hint, (columns,), np.int32),
        ]
        sizes = (rows, columns, width, plane)
        self._check(self._library.sparsevd_coder_matrix(self._state, addresses[0], *sizes, addresses[1], mantissa))

    def account(self) -> tuple[float, float]:
        bits = (ctypes.c_double * 2)()
        self._library.sparsevd_coder_account(self._state, bits)
        return bits[0], bits[1]

    def finish(self) -> bytes:
        size = self._library.sparsevd_coder_finish(self._state)
        if size < 0:
            raise WriteError("the model could not be coded: no memory")
        return ctypes.string_at(self._library.sparsevd_coder_written(self._state), size) if size else b""

    def learn(self, known: bytes) -> "NativeCoder":
        """Learn from bytes, one by one; `prime` takes over what was learned before."""
        copy = ctypes.create_string_buffer(known, len(known))
        self._library.sparsevd_coder_learn(self._state, copy, len(known))
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
