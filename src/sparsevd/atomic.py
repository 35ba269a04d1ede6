"""Files that are there whole or not at all, whatever stops the process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path` to write to; on success it takes the place of `path` in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write(path: Path, content: bytes | str) -> None:
    """Write the whole content, atomically; text as UTF-8."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left half-written in this folder."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)
