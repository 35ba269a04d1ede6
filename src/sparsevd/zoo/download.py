"""Where data sets come from when they are not on this machine. What comes is only bytes: `datasets.py` checks them.

Whatever a server sends, or how slowly, ends in the content or in a DataError, so that the next mirror is tried: within
`LONGEST` seconds, and with a few times `LARGEST` bytes of memory.
"""

import gzip
import io
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from sparsevd.errors import DataError
from sparsevd.zoo.transfer import Limits, Transfer

# A mirror takes the names of the files wanted and gives their contents.
Mirror = Callable[[Iterable[str]], dict[str, bytes]]

SECONDS_TO_ANSWER = 5.0
LONGEST = 7200.0  # seconds for one file or archive
LARGEST = 250_000_000  # bytes; more than any file or archive here, packed or unpacked
SLOWEST = 20_000  # bytes per second, below which a mirror is given up
MOST_MEMBERS = 1000  # of an archive; those here have ten


def http_files(base: str) -> Mirror:
    """A web folder with every file gzipped."""

    def mirror(names: Iterable[str]) -> dict[str, bytes]:
        return {name: gunzip(http_get(f"{base}/{name}.gz"), f"{base}/{name}.gz") for name in names}

    return mirror


def http_archive(url: str) -> Mirror:
    """One tar.gz on the web with all the files in one folder."""

    def mirror(names: Iterable[str]) -> dict[str, bytes]:
        return read_archive(http_get(url), set(names), url)

    return mirror


def read_archive(content: bytes, wanted: set[str], name: str) -> dict[str, bytes]:
    """The wanted files of a tar.gz.

    Only plain members are read, by their headers of 512 bytes. `tarfile` itself would follow extended headers, which
    may claim gigabytes of names and sparse maps.
    """
    found: dict[str, bytes] = {}
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        archive = Bounded(file, name, "tar.gz archive")
        for _ in range(MOST_MEMBERS):
            try:
                member = tarfile.TarInfo.frombuf(archive.read(tarfile.BLOCKSIZE), "utf-8", "surrogateescape")
            except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # the block of zeros at the end
                return found
            except tarfile.HeaderError as error:
                raise DataError(f"{name} is not a whole tar.gz archive ({error})") from error
            if member.size < 0:
                raise DataError(f"{name} is not a whole tar.gz archive (a file of {member.size} bytes)")
            padding = -member.size % tarfile.BLOCKSIZE
            base = Path(member.name).name
            if base in wanted and member.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
                found[base] = archive.read(member.size)
                archive.skip(padding)
            else:
                archive.skip(member.size + padding)
    raise DataError(f"{name} has more than {MOST_MEMBERS} members")


class Bounded:
    """A compressed stream, of which no more than LARGEST bytes are unpacked."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile, name: str, kind: str):
        self._file, self._name, self._kind = file, name, kind
        self._left = LARGEST

    def read(self, size: int) -> bytes:
        """Exactly so many bytes."""
        if size > self._left:
            raise self._too_large()
        content = self.read_up_to(size)
        if len(content) < size:
            raise DataError(f"{self._name} is not a whole {self._kind} (it ends too early)")
        return content

    def read_up_to(self, size: int) -> bytes:
        """So many bytes, or fewer at the end."""
        try:
            content = self._file.read(min(size, self._left + 1))
        except (OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile) as error:
            raise DataError(f"{self._name} is not a whole {self._kind} ({error})") from error
        self._left -= len(content)
        if self._left < 0:
            raise self._too_large()
        return content

    def skip(self, size: int) -> None:
        if size > self._left:
            raise self._too_large()
        for begin in range(0, size, 1 << 20):
            self.read(min(1 << 20, size - begin))

    def _too_large(self) -> DataError:
        return DataError(f"{self._name} unpacks to more than {LARGEST:,} bytes")


def http_get(url: str) -> bytes:
    """The content behind a URL; gives up within seconds on a server that does not answer, stalls or crawls."""
    limits = Limits(to_answer=SECONDS_TO_ANSWER, in_all=LONGEST, largest=LARGEST, slowest=SLOWEST)
    return Transfer(url, limits).content()


def gunzip(content: bytes, name: str) -> bytes:
    """The unpacked content, of bounded size."""
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        stream = Bounded(file, name, "gzip file")
        parts = []
        while part := stream.read_up_to(1 << 20):
            parts.append(part)
    return b"".join(parts)
