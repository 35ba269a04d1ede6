"""The model file: a few bytes of frame, then one coded stream of a header and the tensors. docs/format.md specifies it.

    "SPVD", version, CRC-32 of all other bytes, stream

Whatever the file says is checked before memory is taken for it. The number of decisions is bounded by the bytes there
are, the size of the tensors by an allowance for each byte, which the encoder pads up to where that is needed. A reader
may allow more or less than that with `max_bytes`.
"""

import math
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from sparsevd.errors import ArgumentError, FormatError
from sparsevd.modelfile.adaptive import DECISIONS_PER_BYTE, FREE_DECISIONS, SLOW_DECISIONS_PER_BYTE
from sparsevd.modelfile.fields import Reader, varint
from sparsevd.modelfile.native import Coder, coder
from sparsevd.modelfile.prime import PRIME
from sparsevd.modelfile.symbols import INTEGERS, Matrix, PythonCoder

MAGIC = b"SPVD"
VERSION = 1
FRAME = len(MAGIC) + 1 + 4
FREE_BYTES, MOST_PER_BYTE = 1 << 26, 1 << 16  # what the tensors of any file may take, and what each byte of it adds
FREE_HEADER, HEADER_PER_BYTE = 1 << 16, 1 << 6  # the same for the header
# What a reader allows who gives no `max_bytes`: for each byte of the file less than the format, since 4096 bytes of
# float32 for a byte are 0.008 bits for each number, which a network of any use needs.
USUAL_PER_BYTE = 1 << 12
FREE_VALUES = 1 << 30  # what one example may take on its way through the graph, in any file
DECISIONS_PER_TENSOR_BYTE = 17  # at most: a number of 4 bytes is told in 63, and in 2 for its row and column

DTYPE_SIZES = (4, 2, 2, 8, 8, 4, 2, 1, 1, 1)  # in bytes, of the types in `quantise.DTYPES`
FLOATS = (0, 1, 2)  # those that FLOAT and GRID can hold


class Form(IntEnum):
    """How a tensor's numbers are told."""

    RAW = 0  # its bytes
    FLOAT = 1  # float32 bits, with a number of mantissa bits
    GRID = 2  # integers times a step
    ALIAS = 3  # the same tensor as an earlier one


@dataclass
class Entry:
    """One tensor of the file. `values` are a matrix for FLOAT (as float32 bits) and GRID, bytes for RAW."""

    name: str
    dtype: int  # its place in `quantise.DTYPES`
    shape: tuple[int, ...]
    form: Form
    mantissa: int = 23  # FLOAT
    step: int = 0  # GRID: the upper 16 bits of the float32
    width: int = 0  # columns from a place to the one above it, for a matrix that reads images
    alias: int = 0  # ALIAS: which earlier entry
    values: Matrix | bytearray | None = field(default=None, repr=False)
    bits: tuple[float, float] = (0.0, 0.0)  # what the encoder spent: on positions, on values

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def step_value(self) -> float:
        return float(np.array([self.step << 16], dtype=np.uint32).view(np.float32)[0])

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The first dimension by all others; a vector is one row."""
        return (self.shape[0], math.prod(self.shape[1:])) if len(self.shape) > 1 else (1, self.numel)


@dataclass
class Packed:
    """The content of a file: the tensors, the network's graph if it travels with them, and what the header costs.

    The last `extra` entries are constants of the graph that the network's state_dict does not have.
    """

    entries: list[Entry]
    graph: bytes = b""
    extra: int = 0
    values: int = 0  # bytes that one example takes on its way through the graph; for the encoder
    header_bits: float = 0.0


def encode(packed: Packed, choose_widths: bool = True) -> bytes:
    """The bytes of the file; the entries get their accounts."""
    if choose_widths:
        for entry, plane, hint in with_context(packed.entries):
            if entry.form in (Form.FLOAT, Form.GRID) and len(entry.shape) == 2:
                entry.width = _best_width(entry, plane, hint)
    header = header_of(packed)
    with closing(coder()) as stream:
        stream.prime(PRIME)
        for byte in varint(len(header)):  # one by one, as a reader must take them
            stream.code_bytes(bytearray([byte]))
        stream.code_bytes(bytearray(header))
        packed.header_bits = sum(stream.account())
        for entry, plane, hint in with_context(packed.entries):
            before = stream.account()
            _code(stream, entry, plane, hint)
            after = stream.account()
            entry.bits = (after[0] - before[0], after[1] - before[1])
        content = stream.finish()
    # As many bytes as entitle a reader to the memory and the time that the file takes.
    needed = [
        -(-(_dense_bytes(packed.entries) - FREE_BYTES) // min(USUAL_PER_BYTE, MOST_PER_BYTE)),
        -(-(packed.values - FREE_BYTES) // USUAL_PER_BYTE) if packed.values > FREE_VALUES else 0,
        -(-(len(header) - FREE_HEADER) // HEADER_PER_BYTE),
        -(-(_decisions(packed.entries) + 8 * (len(header) + 5) - FREE_DECISIONS) // SLOW_DECISIONS_PER_BYTE),
    ]
    content = content.ljust(max(needed), b"\0")
    return MAGIC + bytes([VERSION]) + _checksum(content) + content


def allowed_bytes(data: bytes, max_bytes: int | None) -> int:
    """What the tensors of a file may take: `max_bytes`, or what every file is allowed that `encode` makes."""
    if max_bytes is None:
        return FREE_BYTES + USUAL_PER_BYTE * max(0, len(data) - FRAME)
    if type(max_bytes) is not int or max_bytes < 0:
        raise ArgumentError(f"max_bytes={max_bytes!r} must be a number of bytes, or None for what a usual file takes")
    return max_bytes


def decode(data: bytes, accept: Callable[[Packed], None] = lambda packed: None, max_bytes: int | None = None) -> Packed:
    """The content of a file, or a FormatError. `accept` sees the header before any tensor is unpacked."""
    allowed = allowed_bytes(data, max_bytes)
    if data[: len(MAGIC)] != MAGIC:
        raise FormatError("it is not a sparsevd model file: it does not begin with SPVD")
    if len(data) < FRAME:
        raise FormatError(f"it is cut off after {len(data)} bytes")
    if data[len(MAGIC)] != VERSION:
        raise FormatError(f"it has format {data[len(MAGIC)]}; this version of sparsevd reads format {VERSION}")
    content = data[FRAME:]
    if data[len(MAGIC) + 1 : FRAME] != _checksum(content):
        raise FormatError("it is damaged or cut off: its checksum does not match")
    with closing(coder(content)) as stream:
        if isinstance(stream, PythonCoder) and max_bytes is not None:
            stream.allow(DECISIONS_PER_TENSOR_BYTE * max_bytes)
        stream.prime(PRIME)
        size = _decoded_varint(stream)
        if size > FREE_HEADER + HEADER_PER_BYTE * len(content):
            raise FormatError(f"its header claims {size:,} bytes")
        header = bytearray(size)
        stream.code_bytes(header)
        packed = _parsed(bytes(header))
        needed = _dense_bytes(packed.entries)
        if needed > FREE_BYTES + MOST_PER_BYTE * len(content):
            raise FormatError(f"its {len(data):,} bytes claim to hold {needed:,}")
        if needed > allowed:
            raise FormatError(
                f"its tensors take {needed:,} bytes, and {allowed:,} are allowed; if you trust the file, give "
                f"max_bytes={needed}"
            )
        decisions = sum(map(_least_decisions, packed.entries))
        if decisions > DECISIONS_PER_BYTE * (len(content) + 8):
            raise FormatError("it promises more numbers than its bytes can hold")
        if isinstance(stream, PythonCoder):
            stream.expect(decisions)
        accept(packed)
        for entry, plane, hint in with_context(packed.entries):
            if entry.form == Form.RAW:
                entry.values = bytearray(entry.numel * DTYPE_SIZES[entry.dtype])
            elif entry.form != Form.ALIAS:
                entry.values = np.zeros(entry.matrix_shape, dtype=np.int32)
            _code(stream, entry, plane, hint)
    return packed


def _checksum(content: bytes) -> bytes:
    return struct.pack("<I", zlib.crc32(content, zlib.crc32(MAGIC + bytes([VERSION]))))


def _dense_bytes(entries: list[Entry]) -> int:
    """The memory that the tensors take; an empty dimension counts as one, since the others cost memory too."""
    return sum(math.prod(max(1, size) for size in e.shape) * max(4, DTYPE_SIZES[e.dtype]) for e in entries)


def _least_decisions(entry: Entry) -> int:
    """How many decisions a tensor takes if it is all zeros; with more of them than it has bytes for, a file is none."""
    if entry.form == Form.ALIAS or not entry.numel:
        return 0
    if entry.form == Form.RAW:
        return 8 * entry.numel * DTYPE_SIZES[entry.dtype]
    rows, columns = entry.matrix_shape
    return columns if rows == 1 else rows + columns


def _decisions(entries: list[Entry]) -> int:
    """How many decisions these tensors take, or a few more."""
    total = 0
    for entry in entries:
        total += _least_decisions(entry)
        if not isinstance(entry.values, np.ndarray) or not entry.values.size:
            continue
        numbers = entry.values[entry.values != 0]
        if len(entry.values) > 1:
            total += int(entry.values.any(axis=1).sum()) * int(entry.values.any(axis=0).sum())
        if entry.form == Form.FLOAT:
            total += (9 + entry.mantissa) * len(numbers)
        else:
            total += 2 * int(np.frexp(numbers)[1].sum(dtype=np.int64)) + len(numbers)
    return total


def with_context(entries: list[Entry]) -> Iterator[tuple[Entry, int, Matrix | None]]:
    """Each entry with what the matrix before it says: how full its rows are, for the columns that they feed."""
    fullness: NDArray[np.int32] | None = None
    for entry in entries:
        if entry.form in (Form.RAW, Form.ALIAS):
            yield entry, 0, None
            continue
        columns = entry.matrix_shape[1]
        hint, repeat = None, 0
        if fullness is not None and len(fullness) and columns and columns % len(fullness) == 0:
            repeat = columns // len(fullness)
            hint = np.repeat(fullness, repeat)
        plane = math.prod(entry.shape[2:]) if len(entry.shape) > 2 else repeat if repeat > 1 else 0
        if len(entry.shape) > 2:
            entry.width = entry.shape[-1] if len(entry.shape) > 3 else 0
        yield entry, plane, hint
        if len(entry.shape) > 1:
            assert isinstance(entry.values, np.ndarray)
            fullness = (entry.values != 0).sum(axis=1, dtype=np.int32)


def _code(stream: Coder, entry: Entry, plane: int, hint: Matrix | None) -> None:
    if entry.form == Form.RAW:
        assert isinstance(entry.values, bytearray)
        stream.code_bytes(entry.values)
    elif entry.form != Form.ALIAS:
        assert isinstance(entry.values, np.ndarray)
        stream.code_matrix(
            entry.values, entry.width, plane, hint, entry.mantissa if entry.form == Form.FLOAT else INTEGERS
        )


def _best_width(entry: Entry, plane: int, hint: Matrix | None) -> int:
    """How far apart the columns of one image row and the next are, if the matrix reads images: what codes best.

    Pixels that matter lie together, so the numbers in a column go with those one image row away.
    """
    assert isinstance(entry.values, np.ndarray)
    rows, columns = entry.values.shape
    if rows < 2 or columns < 16:
        return 0
    sample = np.ascontiguousarray(entry.values[: max(2, (1 << 18) // columns)])
    counts = np.count_nonzero(entry.values, axis=0).astype(np.float64)
    counts -= counts.mean()
    power = np.abs(np.fft.rfft(counts, 2 * columns)) ** 2
    similar = np.fft.irfft(power)[2 : columns // 2]
    peaks = [i for i in range(1, len(similar) - 1) if similar[i] > similar[i - 1] and similar[i] >= similar[i + 1]]
    candidates = [0, *sorted(peaks, key=lambda i: -similar[i])[:2]]
    costs = {}
    for width in [candidates[0], *(peak + 2 for peak in candidates[1:])]:
        with closing(coder()) as stream:
            stream.code_matrix(sample, width, plane, hint, entry.mantissa if entry.form == Form.FLOAT else INTEGERS)
            costs[width] = sum(stream.account())
    return min(costs, key=lambda width: (costs[width], width))


def _decoded_varint(stream: Coder) -> int:
    value = shift = 0
    while True:
        byte = bytearray(1)
        stream.code_bytes(byte)
        value |= (byte[0] & 127) << shift
        shift += 7
        if byte[0] < 128:
            return value
        if shift > 28:
            raise FormatError("the length of its header is damaged")


def header_of(packed: Packed) -> bytes:
    out = bytearray(varint(len(packed.graph)) + packed.graph)
    if packed.graph:
        out += varint(packed.extra)
    out += varint(len(packed.entries))
    for entry in packed.entries:
        out += entry.name.encode() + b"\n"
        out.append(entry.form | entry.dtype << 2)
        if entry.form == Form.ALIAS:
            out += varint(entry.alias)
            continue
        out += b"".join(varint(size) for size in (len(entry.shape), *entry.shape))
        if entry.form == Form.FLOAT:
            out.append(entry.mantissa)
        elif entry.form == Form.GRID:
            out += struct.pack(">H", entry.step)
        if entry.form != Form.RAW and len(entry.shape) == 2:
            out += varint(entry.width)
    return bytes(out)


def _parsed(header: bytes) -> Packed:
    reader = Reader(header, "header")
    graph = reader.take(reader.varint())
    extra = reader.varint() if graph else 0
    entries: list[Entry] = []
    names: set[str] = set()
    for _ in range(reader.varint()):
        entry = _parsed_entry(reader, entries)
        if entry.name in names:
            raise FormatError(f"it holds {entry.name!r} twice")
        names.add(entry.name)
        entries.append(entry)
    if not reader.finished():
        raise FormatError("its header is longer than what it describes")
    if extra > len(entries):
        raise FormatError(f"its graph claims {extra} of its {len(entries)} tensors")
    return Packed(entries, graph, extra)


def _parsed_entry(reader: Reader, earlier: list[Entry]) -> Entry:
    name = reader.line()
    kind = reader.byte()
    form, dtype = Form(kind & 3), kind >> 2
    if dtype >= len(DTYPE_SIZES) or (form in (Form.FLOAT, Form.GRID) and dtype not in FLOATS):
        raise FormatError(f"{name!r} has the unknown type {dtype}")
    if form == Form.ALIAS:
        alias = reader.varint()
        if alias >= len(earlier) or earlier[alias].form == Form.ALIAS:
            raise FormatError(f"{name!r} is said to be the same as a tensor that does not come before it")
        if dtype != earlier[alias].dtype:
            raise FormatError(f"{name!r} is said to be the same as {earlier[alias].name!r}, of another type")
        return Entry(name, dtype, earlier[alias].shape, form, alias=alias)
    dimensions = reader.varint()
    if dimensions > 16:
        raise FormatError(f"{name!r} has {dimensions} dimensions")
    entry = Entry(name, dtype, tuple(reader.varint() for _ in range(dimensions)), form)
    if form == Form.FLOAT:
        entry.mantissa = reader.byte()
        if entry.mantissa > 23:
            raise FormatError(f"{name!r} has {entry.mantissa} mantissa bits")
    elif form == Form.GRID:
        (entry.step,) = struct.unpack(">H", reader.take(2))
        if not 0 < entry.step_value < math.inf:
            raise FormatError(f"{name!r} has the step {entry.step_value}")
    if form != Form.RAW and dimensions == 2:
        entry.width = reader.varint()
        if entry.width > entry.shape[1]:
            raise FormatError(f"{name!r} has images wider than its {entry.shape[1]} columns")
    return entry
