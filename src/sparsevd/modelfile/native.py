"""The choice between the coder in C and its Python twin."""

from typing import Protocol

from sparsevd import kernels
from sparsevd.kernels.coder import NativeCoder
from sparsevd.modelfile.symbols import Matrix, PythonCoder


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
    return NativeCoder(data) if kernels.available() else PythonCoder(data)
