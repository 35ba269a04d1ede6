"""How bytes and matrices become binary decisions, in Python; `kernels/coder.c` is the same in C. See docs/format.md.

A matrix is told as: which rows and columns hold anything, then for each place where both do whether there is a number,
and the number: sign, exponent, mantissa. The contexts are what Sparse VD leaves behind: dead rows and columns,
neighbours in the filter or the image, how full the column is and how full the row of the layer before that feeds it.
"""

import functools

import numpy as np
from numpy.typing import NDArray

from sparsevd.errors import FormatError
from sparsevd.modelfile.adaptive import AdaptiveCoder

Matrix = NDArray[np.int32]

# Where each kind of decision has its counters, and its mixers.
BYTES_AT, ROWS_AT, COLUMNS_AT, FLAGS_AT = 0, 3 << 14, 13 << 12, 14 << 12
SIGNS_AT, EXPONENTS_AT, MANTISSAS_AT = 20 << 12, 21 << 12, 24 << 12
BYTE_MIXER, ROW_MIXER, COLUMN_MIXER, FLAG_MIXER, VECTOR_FLAG_MIXER = 0, 8, 9, 10, 11
SIGN_MIXER, MANTISSA_MIXER, FLOAT_MANTISSA_MIXER, EXPONENT_MIXER, FLOAT_EXPONENT_MIXER = 12, 13, 14, 16, 56
INTEGERS = -1  # instead of a number of mantissa bits
_LARGEST_EXPONENT = 30


def _bucket(n: int) -> int:
    return n if n < 5 else 5 if n < 7 else 6 if n < 10 else 7 if n < 16 else 8 if n < 32 else 9


def _hash(value: int) -> int:
    return (value * 2654435761 & 0xFFFFFFFF) >> 18


def _sign(value: int) -> int:
    return 1 + (value > 0) if value else 0


class PythonCoder:
    """The four things a file is made of. An encoder without `data`; a decoder fills what it is given."""

    def __init__(self, data: bytes | None = None):
        self._coder = AdaptiveCoder(data)
        self._spent = [0.0, 0.0]

    def close(self) -> None:
        """Nothing to give back."""

    def allow(self, more: int) -> None:
        """Take so many decisions more than a file of this size usually has."""
        self._coder.allow(more)

    def expect(self, decisions: int) -> None:
        """FormatError if so many decisions are more than may be."""
        self._coder.expect(decisions)

    def prime(self, known: bytes) -> None:
        """Know all that can be learned from bytes that both sides have."""
        self._coder.prime_from(_primed(known)._coder)

    def learn(self, known: bytes) -> "PythonCoder":
        """Learn from bytes, one by one; `prime` takes over what was learned before."""
        self._coder.learning = True
        self.code_bytes(bytearray(known))
        self._coder.learning = False
        return self

    def finish(self) -> bytes:
        return self._coder.finish()

    def account(self) -> tuple[float, float]:
        """Bits an encoder spent so far: on positions, and on values and bytes."""
        return self._spent[0], self._coder.bits - self._spent[0]

    def code_bytes(self, data: bytearray) -> None:
        """Bytes, predicted by the two before them."""
        before = 0
        for i, byte in enumerate(data):
            node, order1 = 1, before & 255
            order2 = ((before & 0xFFFF) * 40503 & 0xFFFFFFFF) >> 4 & 0x3FFF
            for place in reversed(range(8)):
                contexts = (
                    BYTES_AT + node,
                    BYTES_AT + (1 << 14) + _hash(order1 << 8 | node),
                    BYTES_AT + (2 << 14) + _hash(order2 << 8 | node),
                )
                node = node << 1 | self._coder.code_bit(byte >> place & 1, BYTE_MIXER + 7 - place, contexts)
            data[i] = node & 255
            before = before << 8 & 0xFFFFFFFF | data[i]

    def code_matrix(self, values: Matrix, width: int, plane: int, hint: Matrix | None, mantissa: int) -> None:
        """A matrix of integers, or of float32 bits whose last 23 − `mantissa` bits are zero.

        width, plane: how many columns back the places above and behind are, or 0; hint: for each column, how many
        numbers the row of the matrix before has that feeds it.
        """
        rows, columns = values.shape
        if values.size == 0:
            return
        code = self._coder.code_bit
        vector = rows == 1
        hints = None if hint is None else hint.tolist()
        before = self._coder.bits
        if vector:
            rows_alive, columns_alive = [1], [1] * columns
        else:
            rows_alive, columns_alive = self._alive(values, width, plane, hints)
        expected = _expected(hints, columns)
        alive = [c for c, lives in enumerate(columns_alive) if lives]
        count = [0] * columns
        column_sign, column_exponent = [0] * columns, [0] * columns
        flags = FLAGS_AT + (3 << 12 if vector else 0)
        mixer = VECTOR_FLAG_MIXER if vector else FLAG_MIXER
        around_offsets = [-1, 1]
        if width:
            around_offsets += [sign * width + step for sign in (-1, 1) for step in (-1, 0, 1)]

        for r in range(rows):
            if not rows_alive[r]:
                continue
            row = values[r].tolist()
            row_exponent = 0
            for c in alive:
                left = row[c - 1] if c >= 1 else 0
                above = row[c - width] if width and c >= width else 0
                behind = row[c - plane] if plane and c >= plane else 0
                near = (
                    left != 0,
                    c >= 2 and row[c - 2] != 0,
                    above != 0,
                    width > 0 and c >= width + 1 and row[c - width - 1] != 0,
                    width > 1 and c >= width - 1 and row[c - width + 1] != 0,
                    behind != 0,
                )
                around = sum(count[c + offset] for offset in around_offsets if 0 <= c + offset < columns)
                contexts = (
                    flags + expected[c] * 16 + _bucket(count[c]),
                    flags + (1 << 12) + sum(there << i for i, there in enumerate(near)),
                    flags + (2 << 12) + _bucket(around) * 8 + sum(near),
                )
                if not code(int(row[c] != 0), mixer, contexts):
                    continue
                self._spent[0] += self._coder.bits - before
                signs = (
                    SIGNS_AT + _sign(left) * 9 + _sign(above) * 3 + _sign(behind),
                    SIGNS_AT + 32 + column_sign[c] * 3 + _sign(left),
                )
                if mantissa == INTEGERS:
                    row[c], row_exponent = self._integer(row[c], signs, row_exponent, column_exponent[c])
                else:
                    row[c], row_exponent = self._float(row[c], signs, row_exponent, mantissa)
                column_sign[c], column_exponent[c] = _sign(row[c]), row_exponent
                before = self._coder.bits
            if self._coder.decoding:  # an encoder's memory may be read-only
                values[r] = row
            if not vector:
                for c in alive:
                    count[c] += row[c] != 0
        self._spent[0] += self._coder.bits - before

    def _alive(self, values: Matrix, width: int, plane: int, hints: list[int] | None) -> tuple[list[int], list[int]]:
        """Which rows and columns hold anything."""
        code = self._coder.code_bit
        rows = np.count_nonzero(values, axis=1).clip(max=1).tolist()
        columns = np.count_nonzero(values, axis=0).clip(max=1).tolist()
        for r, lives in enumerate(rows):
            context = ROWS_AT + (rows[r - 1] if r > 0 else 0) + 2 * (rows[r - 2] if r > 1 else 0)
            rows[r] = code(lives, ROW_MIXER, (context,))
        for c, lives in enumerate(columns):

            def back(distance: int, c: int = c) -> int:
                return columns[c - distance] if 0 < distance <= c else 0

            fed = 0 if hints is None else 1 + (hints[c] > 0)
            above = (back(width), back(width - 1), back(width + 1)) if width else (0, 0, 0)
            contexts = (
                COLUMNS_AT + (back(1) | above[0] << 1 | above[1] << 2 | back(plane) << 3) * 3 + fed,
                COLUMNS_AT + 64 + (back(1) | back(2) << 1 | above[0] << 2 | above[2] << 3) * 3 + fed,
            )
            columns[c] = code(lives, COLUMN_MIXER, contexts)
        return rows, columns

    def _integer(self, value: int, signs: tuple[int, int], row_exponent: int, column_exponent: int) -> tuple[int, int]:
        """Sign, the exponent in unary, and what follows the first bit."""
        code = self._coder.code_bit
        magnitude = abs(value)
        negative = code(int(value < 0), SIGN_MIXER, signs)
        length = magnitude.bit_length() - 1
        exponent = 0
        while True:
            if exponent > _LARGEST_EXPONENT:
                raise FormatError("one of its numbers is too large")
            contexts = (
                EXPONENTS_AT + exponent,
                EXPONENTS_AT + 32 + 32 * row_exponent + exponent,
                EXPONENTS_AT + 2048 + 32 * column_exponent + exponent,
            )
            if not code(int(length > exponent), EXPONENT_MIXER + exponent, contexts):
                break
            exponent += 1
        node = 1
        fine = min(exponent, 3)  # bits that are predicted; the rest are as good as random
        for k in range(1, fine + 1):
            place = exponent * 16 + node
            mantissas = (MANTISSAS_AT + place, MANTISSAS_AT + 1024 + place * 32 + column_exponent)
            node = node << 1 | code(magnitude >> (exponent - k) & 1, MANTISSA_MIXER, mantissas)
        rest = exponent - fine
        node = node << rest | self._coder.code_raw(magnitude & (1 << rest) - 1, rest)
        return (-node if negative else node), exponent + 1

    def _float(self, value: int, signs: tuple[int, int], row_exponent: int, mantissa: int) -> tuple[int, int]:
        """Sign, exponent and mantissa of a float32, by its bits."""
        code = self._coder.code_bit
        bits = value & 0xFFFFFFFF
        negative = code(bits >> 31, SIGN_MIXER, signs)
        node = 1
        for place in reversed(range(8)):
            contexts = (EXPONENTS_AT + 4096 + node, EXPONENTS_AT + 8192 + ((row_exponent & 15) << 8 | node))
            node = node << 1 | code(bits >> (23 + place) & 1, FLOAT_EXPONENT_MIXER + place, contexts)
        exponent = node & 255
        fine = min(mantissa, 2)
        fraction = 1
        for k in range(1, fine + 1):
            context = MANTISSAS_AT + 20480 + (exponent << 2 | fraction)
            fraction = fraction << 1 | code(bits >> (23 - k) & 1, FLOAT_MANTISSA_MIXER, (context,))
        rest = mantissa - fine
        fraction &= (1 << fine) - 1
        fraction = fraction << rest | self._coder.code_raw(bits >> (23 - mantissa) & (1 << rest) - 1, rest)
        bits = negative << 31 | exponent << 23 | fraction << (23 - mantissa)
        return bits - (1 << 32) if negative else bits, exponent & 31


@functools.cache
def _primed(known: bytes) -> PythonCoder:
    """A coder that knows these bytes, kept: learning them anew would take longer than reading a small file."""
    return PythonCoder().learn(known)


def _expected(hints: list[int] | None, columns: int) -> list[int]:
    """How full a column is likely to be: 0 unknown, 1 empty, 2 to 15 by the ratio of its hint to the mean."""
    if hints is None:
        return [0] * columns
    total, fed = sum(hints), sum(hint > 0 for hint in hints)
    return [2 + min(8 * hint * fed // total, 26) // 2 if hint else 1 for hint in hints]
