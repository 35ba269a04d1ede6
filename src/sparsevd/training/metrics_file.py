"""The metrics of a run as lines of JSON, one for each epoch: a copy of the checkpoint's history for people and tools.

A line is appended after each epoch, since to write all of them anew would take longer with every epoch. Appending is
not atomic. Therefore the checkpoint, which is written first, holds the length and the checksum that the file will have,
and `repair` compares.
"""

import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from sparsevd.errors import WriteError
from sparsevd.files import atomic
from sparsevd.files.json_object import is_whole
from sparsevd.training.history import LARGEST_INTEGER, EpochMetrics, History


class _Content(NamedTuple):
    """What the file should hold: so many lines, in so many bytes, with this CRC-32."""

    lines: int = 0
    size: int = 0
    checksum: int = 0

    def plus(self, epochs: Iterable[EpochMetrics]) -> tuple["_Content", bytes]:
        added = [metrics.line() for metrics in epochs]
        text = b"".join(added)
        return _Content(self.lines + len(added), self.size + len(text), zlib.crc32(text, self.checksum)), text


class MetricsFile:
    """`path` as this process has written it; `prepare` and then `write` are called with an ever longer history."""

    def __init__(self, path: Path):
        self.path = path
        self._content = _Content()
        self._prepared = _Content(), b""

    def prepare(self, history: History) -> list[int]:
        """What a checkpoint says of the file: lines, bytes and checksum, once this history is written."""
        self._prepared = self._content.plus(history[self._content.lines :])
        return list(self._prepared[0])

    def write(self, history: History) -> None:
        """Append what is new, as prepared; write all lines where the file has become shorter or is gone."""
        content, text = self._prepared
        if not self._content.lines:
            atomic.write(self.path, text)
        elif not _written_behind(self.path, self._content.size, text):
            content, text = _Content().plus(history)
            atomic.write(self.path, text)
        self._content = content

    def repair(self, history: History, stored: object) -> None:
        """Make the file hold this history; `stored` is what `prepare` gave, or None for an older checkpoint.

        Only the last line can be torn, or missing: then it alone is written.
        """
        last = history[-1].line() if history else b""
        content = _content_of(stored)
        if content is not None and content.lines == len(history) and content.size >= len(last):
            before = content.size - len(last)
            found = _read(self.path, content.size + 1)
            intact = len(found) >= before and zlib.crc32(last, zlib.crc32(found[:before])) == content.checksum
            if intact and (found[before:] == last or _written_behind(self.path, before, last)):
                self._content = content
                return
        self._content = _Content()
        self.prepare(history)
        self.write(history)


def _content_of(stored: object) -> _Content | None:
    if isinstance(stored, list) and len(stored) == 3 and all(is_whole(n, 0, LARGEST_INTEGER) for n in stored):
        return _Content(*stored)
    return None


def _read(path: Path, most: int) -> bytes:
    """The beginning of the file; nothing of one that cannot be read."""
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return file.read(min(most, path.stat().st_size))
    except OSError:
        return b""


def _written_behind(path: Path, size: int, text: bytes) -> bool:
    """Whether the text could be put behind the first bytes of the file, in place of what is there; no link is followed.

    Not where the file is shorter, or gone.
    """
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size < size:
            return False
        with open(path, "r+b", opener=_without_links) as file:
            file.truncate(size)
            file.seek(size)
            file.write(text)
    except OSError as error:
        raise WriteError(f"{path} cannot be written: {error.strerror or error}") from error
    return True


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0))  # Windows has no such flag
