"""The adaptive binary coder of the model file in Python: the oracle of `kernels/adaptive.h`, and what works without it.

Every decision is predicted by a few counters, whose opinions a small mixer weighs, and is then coded arithmetically.
Counters and mixer learn from the decision, in the encoder as in the decoder, so no tables travel in the file. All of it
is integer arithmetic: every machine makes the same bytes and reads the same numbers. docs/format.md specifies it.
"""

import math
from collections.abc import Sequence
from typing import NoReturn

from sparsevd.errors import FormatError

LARGEST_STRETCH = 3071  # of the logistic domain: 12, in steps of 1/256
CERTAIN = 16  # no probability is nearer to 0 or 1 than this, of 65536
DECISIONS_PER_BYTE = 22720  # at least: a decision costs at least −log₂(1 − 16/65536) bits
# What this coder decides at most unless it is allowed more: a hundred times slower than the one in C, it would take
# a minute for a file of 400 bytes. A network that was worth training has a few decisions a byte.
FREE_DECISIONS, SLOW_DECISIONS_PER_BYTE = 1 << 19, 1 << 10
COUNT_LIMIT = 1023
RATE_LIMIT = 4095
COUNTERS = 1 << 17
MIXERS = 64
MAX_INPUTS = 4
FIRST_WEIGHT = 22000  # of 65536: a third
WEIGHT_LIMIT = 1 << 20


def _squash_table() -> list[int]:
    upper, e = [], 1 << 32  # e^(−k/256)
    for _ in range(LARGEST_STRETCH + 1):
        upper.append((1 << 48) // ((1 << 32) + e))
        e = e * 4278222849 >> 32  # e^(−1/256)
    return [65536 - p for p in reversed(upper[1:])] + upper


def _stretch_table() -> list[int]:
    table, x = [], 0
    for p in range(65537):
        while x < 2 * LARGEST_STRETCH and SQUASH[x] < p:
            x += 1
        table.append(x - LARGEST_STRETCH)
    return table


SQUASH = _squash_table()  # stretch + LARGEST_STRETCH → probability of 65536
STRETCH = _stretch_table()
STEP = [655360 // (10 * n + 16) for n in range(COUNT_LIMIT + 1)]  # how far a counter moves after n decisions
TRUST = [131072 * n // (2 * n + 3) for n in range(COUNT_LIMIT + 1)]  # how much it counts
RATE = [131 + 235930 // (200 + n) for n in range(RATE_LIMIT + 1)]  # how fast a mixer learns


class AdaptiveCoder:
    """Codes binary decisions: an encoder without `data`, else a decoder, which ignores the bits it is given."""

    def __init__(self, data: bytes | None = None):
        self.decoding = data is not None
        self.learning = False
        self.bits = 0.0  # what the decisions cost by their probabilities; an encoder's account
        self._probability = [1 << 31] * COUNTERS  # of a one, of 2³²
        self._seen = [0] * COUNTERS
        self._weights = [[FIRST_WEIGHT] * MAX_INPUTS for _ in range(MIXERS)]
        self._mixed = [0] * MIXERS
        self._low, self._range, self._code = 0, 0xFFFFFFFF, 0
        self._out = bytearray()
        self._in = data or b""
        self._position = 0
        self._possible = DECISIONS_PER_BYTE * (len(self._in) + 8)
        self._decisions = 0
        self.allow(0)
        for _ in range(4):
            self._code = self._code << 8 | self._next_byte()

    def allow(self, more: int) -> None:
        """Take so many decisions more than a file of this size usually has; never more than its bytes can hold."""
        usual = FREE_DECISIONS + SLOW_DECISIONS_PER_BYTE * len(self._in)
        self._budget = min(usual + more, self._possible)

    def prime_from(self, other: "AdaptiveCoder") -> None:
        """Know all that another has learned."""
        self._probability, self._seen = other._probability.copy(), other._seen.copy()
        self._weights, self._mixed = [weights.copy() for weights in other._weights], other._mixed.copy()

    def expect(self, decisions: int) -> None:
        """FormatError if there will be more decisions than may be."""
        if decisions > self._budget:
            self._refuse()

    def _next_byte(self) -> int:
        self._position += 1
        return self._in[self._position - 1] if self._position <= len(self._in) else 0

    def decide(self, bit: int, probability: int) -> int:
        """One binary decision with a given probability of a one, of 65536."""
        if self.learning:
            return bit
        if probability < CERTAIN:
            probability = CERTAIN
        elif probability > 65536 - CERTAIN:
            probability = 65536 - CERTAIN
        bound = (self._range >> 16) * probability
        if self.decoding:
            self._decisions += 1
            if self._decisions > self._budget:
                self._refuse()
            bit = int(self._code < bound)
            if not bit:
                self._code -= bound
        elif not bit:
            self._low += bound
            if self._low >> 32:
                self._carry()
        self._range = bound if bit else self._range - bound
        if not self.decoding:
            self.bits -= math.log2((probability if bit else 65536 - probability) / 65536)
        while self._range < 1 << 24:
            if self.decoding:
                self._code = (self._code << 8 | self._next_byte()) & 0xFFFFFFFF
            else:
                self._out.append(self._low >> 24)
            self._low = self._low << 8 & 0xFFFFFFFF
            self._range <<= 8
        return bit

    def _refuse(self) -> NoReturn:
        if self._budget == self._possible:
            raise FormatError("it promises more numbers than its bytes can hold")
        raise FormatError(
            f"it takes more than {self._budget:,} decisions, which is long without the compiled kernels; install "
            "with a C compiler, or, if you trust the file, give max_bytes: for each of them 17 more are taken"
        )

    def _carry(self) -> None:
        self._low &= 0xFFFFFFFF
        place = len(self._out) - 1
        while place >= 0 and self._out[place] == 255:
            self._out[place] = 0
            place -= 1
        if place >= 0:
            self._out[place] += 1

    def code_bit(self, bit: int, mixer: int, contexts: Sequence[int]) -> int:
        """One decision predicted by the counters of these contexts."""
        weights, probabilities, seen = self._weights[mixer], self._probability, self._seen
        inputs = [STRETCH[probabilities[c] >> 16] * TRUST[seen[c]] >> 16 for c in contexts]
        inputs.append(256)
        dot = 0
        for i, value in enumerate(inputs):
            dot += weights[i] * value
        dot = (dot >> 16) + LARGEST_STRETCH
        probability = SQUASH[dot if 0 <= dot <= 2 * LARGEST_STRETCH else 0 if dot < 0 else -1]
        bit = self.decide(bit, probability)

        mixed = self._mixed[mixer]
        step = ((bit << 16) - probability) * RATE[mixed] >> 8
        if mixed < RATE_LIMIT:
            self._mixed[mixer] = mixed + 1
        for i, value in enumerate(inputs):
            weight = weights[i] + (step * value >> 16)
            weights[i] = (
                weight if -WEIGHT_LIMIT <= weight <= WEIGHT_LIMIT else WEIGHT_LIMIT if weight > 0 else -WEIGHT_LIMIT
            )
        target = 0xFFFFFFFF if bit else 0
        for context in contexts:
            times = seen[context]
            probabilities[context] += (target - probabilities[context]) * STEP[times] >> 16
            if times < COUNT_LIMIT:
                seen[context] = times + 1
        return bit

    def code_raw(self, value: int, bits: int) -> int:
        """Bits that nothing predicts, the highest first."""
        result = 0
        for place in reversed(range(bits)):
            result = result << 1 | self.decide(value >> place & 1, 32768)
        return result

    def finish(self) -> bytes:
        """Everything written, with the fewest bytes that tell the last range; after them a decoder reads zeros."""
        for keep in range(5):
            below = (1 << 8 * (4 - keep)) - 1
            value = (self._low + below) & ~below
            if value < self._low + self._range:
                break
        if value >> 32:
            self._carry()
        return bytes(self._out) + (value & 0xFFFFFFFF).to_bytes(4, "big")[:keep]
