"""Files that are there whole or not at all, whatever stops the process.

What is written lies beside the file in one of its own, `.<name>.<random>.tmp`, until it is complete. The writer holds a
lock on it (see `lock`). So a temporary file that can be locked belongs to a dead process, and is removed when the same
file is written again.
"""

import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from sparsevd.errors import ArgumentError, WriteError
from sparsevd.files import lock

# Longer names give their hash to the temporary file, which has to be shorter than any file system's limit.
_LONGEST_NAME = 100
_RANDOM = re.compile(r"[0-9a-f]{16}\.tmp")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yields a file to write to; if nothing fails, it takes the place of `path` in one step, and is on the disk.

    A new file has the permissions that the user's umask leaves, an old one keeps its own. If `path` is a symbolic link,
    the link is replaced and the file it leads to stays as it is: others may use it. What is not a file (a folder, a
    device) is refused. Parent folders are made.
    """
    try:
        permissions = _permissions(path)
        make_folder(path.parent)
        remove_leftovers(path)
        temporary, file = _create(path, 0o666 if permissions is None else 0o600)
        try:
            with file:
                yield file
                file.flush()
                if permissions is not None:
                    _permit(file.fileno(), permissions)
                os.fsync(file.fileno())
                if os.name == "nt":
                    file.close()  # Windows renames no open file; elsewhere the lock has to last until the name is final
                temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except OSError as error:
        raise WriteError(f"{path} cannot be written: {error.strerror or error}") from error


def write(path: Path, content: bytes | str) -> None:
    """Write the whole content, atomically; text as UTF-8."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def make_folder(path: Path) -> None:
    """Make a folder and its parents, as far as they are missing, so that they too are there after a power failure.

    As with Path.mkdir, what goes wrong is an OSError.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def make_writable_folder(path: Path) -> None:
    """The same for a folder that results go to, or a sentence: before the work, not after it."""
    try:
        make_folder(path)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ArgumentError(f"{path} cannot be written to ({error.strerror})") from error


def remove_leftovers(path: Path) -> None:
    """Remove what dead processes left half-written of this file. What a live one writes is locked, and stays."""
    prefix = _prefix(path)
    try:
        names = os.listdir(path.parent)
    except OSError:  # no such folder, or one that may be written to but not read
        return
    for name in names:
        if name.startswith(prefix) and _RANDOM.fullmatch(name, len(prefix)):
            with suppress(OSError):  # it was finished or removed in the meantime, or belongs to another user
                _remove_if_dead(path.with_name(name))


def _remove_if_dead(temporary: Path) -> None:
    handle = os.open(temporary, os.O_RDWR | lock.NO_LINK)
    try:
        if lock.take(handle) and lock.leads_to(temporary, handle):
            temporary.unlink()
    finally:
        os.close(handle)


def _prefix(path: Path) -> str:
    name = os.fsencode(path.name)
    return f".{path.name if len(name) <= _LONGEST_NAME else hashlib.sha256(name).hexdigest()}."


def _create(path: Path, permissions: int) -> tuple[Path, BinaryIO]:
    """A new temporary file, locked. Nobody can foresee its name, and a link of that name would not be followed."""
    while True:
        temporary = path.with_name(f"{_prefix(path)}{secrets.token_hex(8)}.tmp")
        file = open(temporary, "xb", opener=lambda name, flags: os.open(name, flags | lock.NO_LINK, permissions))  # noqa: SIM115
        # Before the lock is taken, another writer may think that it is a leftover: it then holds the lock or has
        # already removed the file.
        if lock.take(file.fileno()) is not False and lock.leads_to(temporary, file.fileno()):
            return temporary, file
        file.close()


def _permissions(path: Path) -> int | None:
    """Those of the file that is replaced, if there is one."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise WriteError(f"{path} cannot be written: it exists, and is not a file")
    return None if path.is_symlink() else found.st_mode & 0o777


def _permit(handle: int, permissions: int) -> None:
    """Only where it changes something: a file system without permissions of its own may refuse."""
    if os.name != "nt" and stat.S_IMODE(os.fstat(handle).st_mode) != permissions:
        os.fchmod(handle, permissions)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # Windows opens no folders
        return
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # it may be written to but not read
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have no such thing
            raise
    finally:
        os.close(handle)
