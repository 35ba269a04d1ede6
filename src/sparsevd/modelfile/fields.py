"""Numbers and words as bytes, and a reader that never runs past the end."""

from sparsevd.errors import FormatError


def varint(value: int) -> bytes:
    """Seven bits per byte, the lowest first; the last byte is below 128."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def unsigned(value: int) -> int:
    """0, −1, 1, −2, … as 0, 1, 2, 3, …"""
    return 2 * value if value >= 0 else -2 * value - 1


def signed(value: int) -> int:
    """The way back from `unsigned`."""
    return value // 2 if value % 2 == 0 else -(value + 1) // 2


class Reader:
    """Takes bytes apart; running out of them is a FormatError."""

    def __init__(self, data: bytes, what: str):
        self._data, self._at, self._what = data, 0, what

    def take(self, n: int) -> bytes:
        if n > len(self._data) - self._at:
            raise FormatError(f"its {self._what} is cut off")
        self._at += n
        return self._data[self._at - n : self._at]

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise FormatError(f"a number in its {self._what} is damaged")

    def numbers(self, signs: bool = False) -> tuple[int, ...]:
        """A list: how many, and each."""
        values = []
        for _ in range(self.varint()):
            value = self.varint()
            values.append(signed(value) if signs else value)
        return tuple(values)

    def line(self) -> str:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise FormatError(f"a name in its {self._what} is cut off")
        try:
            text = self.take(end - self._at).decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"a name in its {self._what} is not text ({error})") from error
        self._at += 1
        return text

    def finished(self) -> bool:
        return self._at == len(self._data)
